"""Recompute activations: bitwise the same numbers with less memory between the passes."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.testing.trainer.base_models import initial_model
from tests.unit.trainer.conftest import Launcher
from trainium_contract.trainer.model import ModelConfig
from trainium_contract.trainer.parallelism import Recompute
from trainium_trainer.backends.recompute import apply_recompute
from trainium_trainer.configuration.model_shape import resolve_shape
from trainium_trainer.models.llama import Llama
from trainium_trainer.models.loss import compute_loss_sum


class OperationCounter(TorchDispatchMode):
    """Count the operations that are really computed, below the mode that returns kept activations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[operation._schema.name] += 1
        return operation(*args, **(kwargs or {}))


def build(mode: Recompute) -> Llama:
    shape = resolve_shape(ModelConfig(num_layers=2, hidden_size=32, intermediate_size=96), 64)
    model = initial_model(shape)
    apply_recompute(model, mode)
    return model


def kept_bytes(model: Llama, tokens: torch.Tensor) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, including its output."""
    model(tokens)  # compute cached tables first
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        out = model(tokens)
        kept = out.sum()
    del out, kept
    return sum(event.self_cpu_memory_usage for event in profile.key_averages())


def test_each_mode_keeps_less_than_the_one_before() -> None:
    tokens = torch.randint(0, 64, (4, 64), generator=torch.Generator().manual_seed(0))
    kept = {mode: kept_bytes(build(mode), tokens) for mode in Recompute}
    assert kept[Recompute.SELECTIVE] < 0.75 * kept[Recompute.NONE]
    assert kept[Recompute.FULL] < 0.5 * kept[Recompute.SELECTIVE]


@pytest.mark.parametrize("mode", [Recompute.SELECTIVE, Recompute.FULL])
def test_selective_repeats_no_product_and_full_repeats_all(mode: Recompute) -> None:
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    counts: dict[Recompute, Counter[str]] = {}
    for recompute in (Recompute.NONE, mode):
        model = build(recompute)
        loss = compute_loss_sum(model(tokens), tokens)
        with OperationCounter() as operations:
            loss.backward()
        counts[recompute] = operations.counts
    repeated = counts[mode] - counts[Recompute.NONE]
    # The backward pass does not need the last of the seven products of a layer.
    assert repeated["aten::mm"] == (0 if mode is Recompute.SELECTIVE else 6 * 2)
    assert repeated["aten::_scaled_dot_product_flash_attention_for_cpu"] == (0 if mode is Recompute.SELECTIVE else 2)
    assert repeated["aten::silu"] == 2, "cheap operations are repeated"


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        pytest.param(1, [], id="one process"),
        pytest.param(1, ["precision=BFloat16"], id="one process, half precision"),
        pytest.param(
            2, ["parallelism.tensor=2", "parallelism.sequence=true"], id="tp2, sequence", marks=pytest.mark.long
        ),
        pytest.param(2, ["dataParallel=FullySharded"], id="sharded"),
    ],
)
def test_losses_and_norms_are_bitwise_equal(launch: Launcher, ranks: int, overrides: list[str]) -> None:
    curves: list[list[tuple[Any, ...]]] = []
    for mode in Recompute:
        job = launch(ranks, mode.value, [*overrides, "steps=3", f"recompute={mode.value}"]).finish()
        curves.append([(line["loss"], line["gradNorm"]) for line in job.metrics()])
    assert curves[1:] == curves[:1] * 2
