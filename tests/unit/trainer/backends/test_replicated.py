"""Keep replicated state: sums over many values, buckets of gradients, and AdamW compared with torch."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist

from tests.testing.trainer.base_models import initial_model
from trainium_contract.trainer.model import ModelConfig
from trainium_contract.trainer.optimizer import OptimizerConfig, WeightDecayScope
from trainium_trainer.backends import replicated_store
from trainium_trainer.backends.optimizers import adamw
from trainium_trainer.backends.replicated_store import ReplicatedStore
from trainium_trainer.backends.state_store import sum_squares
from trainium_trainer.configuration.model_shape import resolve_shape
from trainium_trainer.models.initialization import draw_initial_tensor
from trainium_trainer.models.llama import Llama
from trainium_trainer.models.loss import compute_loss_sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fifty_million_values_are_summed_to_five_digits(dtype: torch.dtype) -> None:
    values = torch.full((50_000_001,), 2.0**-7, dtype=dtype)
    assert sum_squares([values]) == pytest.approx(50_000_001 * 2.0**-14, rel=1e-5)


@given(st.lists(st.integers(0, 40_000), max_size=4), st.booleans())
def test_every_value_counts_once(sizes: list[int], transposed: bool) -> None:
    generator = torch.Generator().manual_seed(sum(sizes))
    tensors = [torch.randn(2, size, generator=generator) for size in sizes]
    values = [tensor.t() for tensor in tensors] if transposed else tensors
    expected = sum(float(tensor.double().square().sum()) for tensor in tensors)
    assert sum_squares(values) == pytest.approx(expected, rel=1e-6)


def test_a_value_that_is_not_finite_changes_the_sum() -> None:
    values = torch.zeros(100_000)
    values[77_777] = torch.nan
    assert torch.tensor(sum_squares([torch.ones(3), values])).isnan()


@pytest.mark.parametrize("tied", [True, False])
def test_buckets_are_reduced_in_order_during_the_last_backward_pass(
    single_rank_group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    monkeypatch.setattr(replicated_store, "_BUCKET_VALUES", 5000)
    shape = resolve_shape(ModelConfig(num_layers=2, hidden_size=32, intermediate_size=48, tie_embeddings=tied), 64)
    plain, model = initial_model(shape), Llama(shape)
    store = ReplicatedStore(model, torch.device("cpu"), single_rank_group, 0, moments=("expAvg", "expAvgSq"))
    launched: list[tuple[int, int]] = []
    reduce = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, **options: object) -> object:
        launched.append((tensor.storage_offset(), tensor.numel()))
        return reduce(tensor, **options)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with torch.no_grad():
        for part in store.iterate_parameters():
            part.local.copy_(draw_initial_tensor(part.name, part.size, seed=0, shape=shape))
    tokens = torch.randint(0, 64, (2, 3, 10), generator=torch.Generator().manual_seed(0))
    for number, micro_batch in enumerate(tokens):
        store.begin_backward(int(number == 1))
        compute_loss_sum(model(micro_batch), micro_batch).backward()
        compute_loss_sum(plain(micro_batch), micro_batch).backward()
        assert bool(launched) == (number == 1)
    assert len(launched) > 2
    assert launched == sorted(launched)
    assert sum(count for _, count in launched) == store.list_local_tensors()["model"].numel()
    store.reduce()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])
    divided, repeated = store.sum_gradient_squares()
    assert repeated == 0.0
    total = sum(float(gradient.square().sum()) for gradient in expected.values() if gradient is not None)
    assert divided == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("scope", WeightDecayScope)
@pytest.mark.parametrize(
    ("bucket", "fused"), [(3000, True), (10**6, True), (3000, False)], ids=["many buckets", "one bucket", "not fused"]
)
def test_updates_equal_those_of_torch(
    scope: WeightDecayScope, bucket: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicated_store, "_BUCKET_VALUES", bucket)
    if not fused:  # as on a device without this kernel of torch
        monkeypatch.setattr(adamw, "_FUSED", frozenset())
    config = OptimizerConfig(decay_scope=scope, weight_decay=0.7, beta1=0.8, beta2=0.9, eps=1e-6)
    shape = resolve_shape(ModelConfig(num_layers=2, hidden_size=32, intermediate_size=48), 64)
    plain, model = initial_model(shape), Llama(shape)
    store = ReplicatedStore(model, torch.device("cpu"), None, 0, moments=config.kind.moments)
    with torch.no_grad():
        for part in store.iterate_parameters():
            part.local.copy_(draw_initial_tensor(part.name, part.size, seed=0, shape=shape))
    vectors = [parameter for parameter in plain.parameters() if parameter.ndim == 1]
    matrices = [parameter for parameter in plain.parameters() if parameter.ndim == 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors}]
    if scope is WeightDecayScope.MATRICES:
        groups[1]["weight_decay"] = 0.0
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.7)
    for step in range(1, 4):
        tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(step))
        store.begin_backward(1)
        for network in (plain, model):
            compute_loss_sum(network(tokens), tokens).backward()
        store.reduce()
        for parameter in plain.parameters():
            parameter.grad *= 0.25
        reference.step()
        reference.zero_grad()
        adamw.update(store.iterate_slots(), config, step=step, learning_rate=0.01, gradient_scale=0.25)
        store.zero_grad()
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        # A ten-thousandth of an update: gradients that nearly cancel show the last bit of a weight.
        torch.testing.assert_close(parameter, expected[name], rtol=1e-5, atol=1e-6)
