"""Our AdamW against torch's, with decay on all parameters or on matrices only, over the flat layout of the state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainium_contract.trainer.model import ModelConfig
from trainium_contract.trainer.optimizer import OptimizerConfig, WeightDecayScope
from trainium_trainer.backends import replicated
from trainium_trainer.backends.optimizers import adamw as own
from trainium_trainer.backends.replicated import ReplicatedStore
from trainium_trainer.configuration.model_shape import resolve_shape
from trainium_trainer.models.initial import initial_whole
from trainium_trainer.models.llama import Llama
from trainium_trainer.models.loss import loss_sum


@pytest.mark.parametrize("scope", WeightDecayScope)
@pytest.mark.parametrize(
    ("bucket", "fused"), [(3000, True), (10**6, True), (3000, False)], ids=["many buckets", "one bucket", "not fused"]
)
def test_updates_equal_those_of_torch(
    scope: WeightDecayScope, bucket: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicated, "_BUCKET_VALUES", bucket)
    if not fused:  # as on a device for which torch has no such kernel
        monkeypatch.setattr(own, "_FUSED", frozenset())
    config = OptimizerConfig(decay_scope=scope, weight_decay=0.7, beta1=0.8, beta2=0.9, eps=1e-6)
    shape = resolve_shape(ModelConfig(num_layers=2, hidden_size=32, intermediate_size=48), 64)
    plain, model = Llama(shape), Llama(shape)
    store = ReplicatedStore([model], torch.device("cpu"), None, 0, moments=config.kind.moments)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(initial_whole(name, parameter.shape, seed=0, shape=shape))
        for name, size, local, _ in store.parameters():
            local.copy_(initial_whole(name, size, seed=0, shape=shape))
    vectors = [parameter for parameter in plain.parameters() if parameter.ndim == 1]
    matrices = [parameter for parameter in plain.parameters() if parameter.ndim == 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors}]
    if scope is WeightDecayScope.MATRICES:
        groups[1]["weight_decay"] = 0.0
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.7)
    for step in range(1, 4):
        tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(step))
        store.begin_backward(1)
        for each in (plain, model):
            loss_sum(each(tokens), tokens).backward()
        store.reduce()
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.grad *= 0.25
        reference.step()
        reference.zero_grad()
        own.update(store.slots(), config, step=step, learning_rate=0.01, gradient_scale=0.25)
        store.zero_grad()
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        # A ten-thousandth of an update: a last bit of a weight shows in gradients that all but cancel.
        torch.testing.assert_close(parameter, expected[name], rtol=1e-5, atol=1e-6)
