"""Gradient buckets of the replicated layout: in order, while the backward pass still runs, and with the same sums."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist

from trainium_contract.trainer.model import ModelConfig
from trainium_trainer.backends import replicated
from trainium_trainer.backends.replicated import ReplicatedStore
from trainium_trainer.configuration.model_shape import resolve_shape
from trainium_trainer.models.initial import initial_whole
from trainium_trainer.models.llama import Llama
from trainium_trainer.models.loss import loss_sum


@pytest.mark.parametrize("tied", [True, False])
def test_buckets_are_reduced_in_order_during_the_last_backward_pass(
    world_of_one: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    monkeypatch.setattr(replicated, "_BUCKET_VALUES", 5000)
    shape = resolve_shape(ModelConfig(num_layers=2, hidden_size=32, intermediate_size=48, tie_embeddings=tied), 64)
    plain, model = Llama(shape), Llama(shape)
    store = ReplicatedStore([model], torch.device("cpu"), world_of_one, 0, moments=("expAvg", "expAvgSq"))
    launched: list[tuple[int, int]] = []
    reduce = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, **options: object) -> object:
        launched.append((tensor.storage_offset(), tensor.numel()))
        return reduce(tensor, **options)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(initial_whole(name, parameter.shape, seed=0, shape=shape))
        for name, size, local, _ in store.parameters():
            local.copy_(initial_whole(name, size, seed=0, shape=shape))
    tokens = torch.randint(0, 64, (2, 3, 10), generator=torch.Generator().manual_seed(0))
    for number, micro_batch in enumerate(tokens):
        store.begin_backward(int(number == 1))
        loss_sum(model(micro_batch), micro_batch).backward()
        loss_sum(plain(micro_batch), micro_batch).backward()
        assert bool(launched) == (number == 1)
    assert len(launched) > 2
    assert launched == sorted(launched)
    assert sum(count for _, count in launched) == store.local_tensors()["model"].numel()
    store.reduce()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])
    divided, repeated = store.square_sums()
    assert repeated == 0.0
    total = sum(float(gradient.square().sum()) for gradient in expected.values() if gradient is not None)
    assert divided == pytest.approx(total, rel=1e-5)
