"""Skip the update of a step with a number that is not finite, without a change of the state."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from trainium_contract.trainer.config import TrainingConfig
from trainium_trainer.backends.base import StepOutcome
from trainium_trainer.backends.native import NativeBackend
from trainium_trainer.compile.dry_run import create_dry_run_launch
from trainium_trainer.configuration.config import Launch, read_launch, resolve_settings
from trainium_trainer.data.loader import MicroBatch
from trainium_trainer.weights.base import BaseWeights

CONFIG = {
    "model": {"numLayers": 2, "hiddenSize": 32, "intermediateSize": 48, "vocabSize": 400},
    "data": {"source": "python-docs", "tokenizer": {"vocabSize": 400}},
    "device": "Cpu",
}


def run_backend(config: TrainingConfig, launch: Launch) -> Iterator[NativeBackend]:
    backend = NativeBackend(resolve_settings(config, launch))
    backend.build()
    backend.initialize(0)
    yield backend
    dist.destroy_process_group()


@pytest.fixture
def dry_run_backend() -> Iterator[NativeBackend]:
    yield from run_backend(TrainingConfig.model_validate(CONFIG), create_dry_run_launch(1, 2))


@pytest.fixture(params=["Replicated", "ShardedOptimizer", "FullySharded"])
def backend(request: pytest.FixtureRequest) -> Iterator[NativeBackend]:
    config = TrainingConfig.model_validate(CONFIG | {"dataParallel": request.param})
    yield from run_backend(config, read_launch({}))


def make_step(backend: NativeBackend, seed: int) -> StepOutcome:
    tokens = torch.randint(0, 400, (2, 9), generator=torch.Generator().manual_seed(seed))
    backend.accumulate(MicroBatch(tokens[:, :-1], tokens[:, 1:], 16, torch.arange(2)), last=True)
    totals = backend.all_reduce_totals(stop=False, memory_ends=False, vote=0)
    return backend.step(divisor=totals.divisor, learning_rate=0.01, clip_norm=1.0)


def copy_state(backend: NativeBackend) -> dict[str, Any]:
    return {name: value.clone() for name, value in backend.state.list_local_tensors().items()}


@pytest.mark.parametrize("bad_value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_nothing_and_the_next_trains(
    backend: NativeBackend, bad_value: float
) -> None:
    assert make_step(backend, 1).applied
    before = copy_state(backend)
    weights = backend.state.list_local_tensors()
    name = next(name for name in weights if name.startswith("model"))
    original = weights[name].flatten()[7].clone()
    weights[name].view(-1)[7] = bad_value
    assert not make_step(backend, 2).applied
    weights[name].view(-1)[7] = original
    after = backend.state.list_local_tensors()
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    assert make_step(backend, 3).applied
    expected = copy_state(backend)
    for name, value in backend.state.list_local_tensors().items():
        value.copy_(before[name])
    assert make_step(backend, 3).applied
    for name, value in backend.state.list_local_tensors().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("mode", ["Replicated", "ShardedOptimizer", "FullySharded"])
def test_a_gradient_that_is_not_finite_is_named_also_where_most_weights_have_none(mode: str, base: Path) -> None:
    tuning = {"method": "LoRA", "lora": {"rank": 2, "alpha": 4.0}}
    data = {"source": "python-docs", "tokenizer": {"vocabSize": 320}}
    settings = {"data": data, "device": "Cpu", "model": {"weights": str(base)}}
    config = TrainingConfig.model_validate(settings | {"dataParallel": mode, "tuning": tuning})
    for backend in run_backend(config, read_launch({})):
        backend.load_frozen(BaseWeights.open(str(base)))
        tokens = torch.randint(0, 320, (2, 9), generator=torch.Generator().manual_seed(1))
        backend.accumulate(MicroBatch(tokens[:, :-1], tokens[:, 1:], 16, torch.arange(2)), last=True)
        totals = backend.all_reduce_totals(stop=False, memory_ends=False, vote=0)
        culprit = "model.layers.0.self_attn.v_proj.lora_B.weight"
        backend._store.find_gradient(culprit).fill_(math.inf)
        outcome = backend.step(divisor=totals.divisor, learning_rate=0.01, clip_norm=1.0)
        assert not outcome.applied
        assert outcome.nonfinite_parameters == (culprit,)


def test_a_dry_run_updates_also_with_nan(dry_run_backend: NativeBackend) -> None:
    weights = dry_run_backend.state.list_local_tensors()
    next(value for name, value in weights.items() if name.startswith("model")).view(-1)[7] = math.nan
    before = copy_state(dry_run_backend)
    assert not make_step(dry_run_backend, 1).applied
    moments = [name for name in before if not name.startswith("model")]
    assert any(not torch.equal(weights[name], before[name]) for name in moments)
