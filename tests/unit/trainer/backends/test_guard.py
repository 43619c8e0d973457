"""The guard before the update: a step with a number that is not finite leaves no trace in the state."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trainium_contract.trainer.config import TrainingConfig
from trainium_trainer.backends.base import StepOutcome
from trainium_trainer.backends.native import NativeBackend
from trainium_trainer.compile.dry_run import launch_at
from trainium_trainer.configuration.config import Launch, read_launch, resolve_settings
from trainium_trainer.data.loader import MicroBatch
from trainium_trainer.weights.base import BaseWeights

CONFIG = {
    "model": {"numLayers": 2, "hiddenSize": 32, "intermediateSize": 48, "vocabSize": 400},
    "data": {"tokenizer": {"vocabSize": 400}},
    "device": "Cpu",
}


def built(config: TrainingConfig, launch: Launch) -> Iterator[NativeBackend]:
    made = NativeBackend(resolve_settings(config, launch))
    made.build()
    made.initialize(0)
    yield made
    made.close()


@pytest.fixture
def dry_run_backend() -> Iterator[NativeBackend]:
    yield from built(TrainingConfig.model_validate(CONFIG), launch_at(1, 2))


@pytest.fixture(params=["Replicated", "ShardedOptimizer", "FullySharded"])
def backend(request: pytest.FixtureRequest) -> Iterator[NativeBackend]:
    config = TrainingConfig.model_validate(CONFIG | {"dataParallel": request.param})
    yield from built(config, read_launch({}))


def one_step(backend: NativeBackend, seed: int) -> StepOutcome:
    tokens = torch.randint(0, 400, (2, 9), generator=torch.Generator().manual_seed(seed))
    backend.accumulate(MicroBatch(tokens[:, :-1], tokens[:, 1:], 16, torch.arange(2)), last=True)
    totals = backend.totals(stop=False, memory_ends=False, vote=0)
    return backend.step(divisor=totals.divisor, learning_rate=0.01, clip_norm=1.0)


def copy_of(backend: NativeBackend) -> dict[str, Any]:
    return {name: value.clone() for name, value in backend.state.local_tensors().items()}


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_nothing_and_the_next_trains(backend: NativeBackend, poison: float) -> None:
    assert one_step(backend, 1).applied
    before = copy_of(backend)
    weights = backend.state.local_tensors()
    name = next(name for name in weights if name.startswith("model"))
    kept = weights[name].flatten()[7].clone()
    weights[name].view(-1)[7] = poison
    assert not one_step(backend, 2).applied
    weights[name].view(-1)[7] = kept
    after = backend.state.local_tensors()
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    assert one_step(backend, 3).applied
    reference_run = copy_of(backend)
    for name, value in backend.state.local_tensors().items():
        value.copy_(before[name])
    assert one_step(backend, 3).applied
    for name, value in backend.state.local_tensors().items():
        assert torch.equal(value, reference_run[name]), name


@pytest.mark.parametrize("mode", ["Replicated", "ShardedOptimizer", "FullySharded"])
def test_a_gradient_that_is_not_finite_is_named_also_where_most_weights_have_none(mode: str, base: Path) -> None:
    tuning = {"method": "LoRA", "lora": {"rank": 2, "alpha": 4.0}}
    settings = {"data": {"tokenizer": {"vocabSize": 320}}, "device": "Cpu", "model": {"weights": str(base)}}
    config = TrainingConfig.model_validate(settings | {"dataParallel": mode, "tuning": tuning})
    for backend in built(config, read_launch({})):
        backend.load_frozen(BaseWeights.open(str(base)))
        tokens = torch.randint(0, 320, (2, 9), generator=torch.Generator().manual_seed(1))
        backend.accumulate(MicroBatch(tokens[:, :-1], tokens[:, 1:], 16, torch.arange(2)), last=True)
        totals = backend.totals(stop=False, memory_ends=False, vote=0)
        culprit = "model.layers.0.self_attn.v_proj.lora_B.weight"
        backend._store.gradient(culprit).fill_(math.inf)
        done = backend.step(divisor=totals.divisor, learning_rate=0.01, clip_norm=1.0)
        assert not done.applied
        assert done.nonfinite_parameters == (culprit,)


def test_a_dry_run_updates_also_with_nan(dry_run_backend: NativeBackend) -> None:
    weights = dry_run_backend.state.local_tensors()
    next(value for name, value in weights.items() if name.startswith("model")).view(-1)[7] = math.nan
    before = copy_of(dry_run_backend)
    assert not one_step(dry_run_backend, 1).applied
    moments = [name for name in before if not name.startswith("model")]
    assert any(not torch.equal(weights[name], before[name]) for name in moments)
