"""Estimate the memory of runs with frozen weights, compare with a store, and check the device."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainium_contract.accelerators import Instance
from trainium_contract.models.parameters import parameter_sizes
from trainium_contract.requirements.memory_estimate import TrainedParameters
from trainium_contract.trainer.config import TrainingConfig
from trainium_trainer.backends.replicated_store import ReplicatedStore
from trainium_trainer.compile.dry_run import create_dry_run_launch
from trainium_trainer.configuration.config import Settings
from trainium_trainer.configuration.model_shape import resolve_shape
from trainium_trainer.exits import UserError
from trainium_trainer.loop import memory_check
from trainium_trainer.loop.memory_check import (
    check_device_memory,
    estimate_run_memory,
    find_device_memory,
    find_largest_trained_part,
    refuse_too_small,
)
from trainium_trainer.models.llama import Llama
from trainium_trainer.tuning.apply import apply_tuning
from trainium_trainer.tuning.trainable import select_trainable

LORA = {"method": "LoRA", "lora": {"rank": 4, "targets": ["q_proj", "down_proj"]}}
PARTS: dict[str, Any] = {"method": "Full", "trainable": ["model.layers.1.*", "norm"]}


def create_settings(tuning: dict[str, Any], *, ranks: int = 1, **fields: Any) -> Settings:
    """Return the settings of a small untied model, of which a part is trained."""
    model = {"numLayers": 2, "hiddenSize": 32, "intermediateSize": 48, "weights": "/base", "vocabSize": 64}
    config = TrainingConfig.model_validate({"model": model, "tuning": tuning} | fields)
    shape = resolve_shape(config.model.model_copy(update={"weights": None}), 64)
    return Settings(
        config=config,
        shape=shape,
        launch=create_dry_run_launch(0, ranks),
        trainable=select_trainable(shape, config.tuning),
    )


@pytest.mark.parametrize(
    ("tuning", "precision"),
    [
        (LORA, "Float32"),
        (LORA, "BFloat16"),
        *((PARTS, precision) for precision in ("Float32", "BFloat16", "BFloat16Stochastic")),
    ],
)
def test_the_state_of_a_tuned_run_is_what_the_store_allocates(tuning: dict[str, Any], precision: str) -> None:
    settings = create_settings(tuning, precision=precision)
    with torch.device("meta"):
        model = Llama(settings.shape)
    half = settings.config.precision.has_bfloat16_state
    if half:
        model.to(torch.bfloat16)
    narrow = None if precision == "Float32" else torch.bfloat16
    apply_tuning(model, settings.trainable, settings.config.tuning.lora, frozen=narrow)
    store = ReplicatedStore(model, torch.device("cpu"), None, 0, moments=("expAvg", "expAvgSq"), half=half)
    tensors = [*store._flat.values(), store._gradients, *(parameter.local for parameter in store.iterate_frozen())]
    assert estimate_run_memory(settings, 1).state == sum(tensor.nbytes for tensor in tensors)


def test_adapters_are_divided_like_their_projections() -> None:
    undivided = find_largest_trained_part(create_settings(LORA))
    shape = create_settings(LORA).shape
    heads = shape.num_attention_heads * shape.head_dim
    assert undivided == TrainedParameters(0, create_settings(LORA).trainable.trained)
    by_tensor = find_largest_trained_part(create_settings(LORA, ranks=2, parallelism={"tensor": 2}))
    assert by_tensor.adapters == 2 * (4 * 32 + 4 * heads // 2 + 4 * 48 // 2 + 4 * 32)
    stages = find_largest_trained_part(create_settings(LORA, ranks=2, parallelism={"pipeline": 2}))
    assert stages.adapters == undivided.adapters // 2


def test_patterns_count_for_the_stage_that_holds_most_of_them() -> None:
    settings = create_settings(PARTS, ranks=2, parallelism={"pipeline": 2})
    sizes = parameter_sizes(settings.shape)
    expected = sum(torch.Size(size).numel() for name, size in sizes.items() if name in settings.trainable.weights)
    assert find_largest_trained_part(settings) == TrainedParameters(expected, 0), (
        "the second stage has all trained weights"
    )


def test_a_device_that_is_too_small_is_refused_and_one_that_is_nearly_full_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings, device = create_settings(LORA), torch.device("cuda")
    estimate = estimate_run_memory(settings, 1, on_host=False)
    assert check_device_memory(settings, torch.device("cpu")) == [], "the memory of a CPU is not checked"

    def with_memory(size: int) -> list[str]:
        monkeypatch.setattr(memory_check, "find_device_memory", lambda _: size)
        return check_device_memory(settings, device)

    assert with_memory(2 * estimate.device) == []
    (warning,) = with_memory(estimate.state + 1)
    assert "the device cuda has 0.0 GiB, but a process needs" in warning
    with pytest.raises(UserError, match=r"raise parallelism\.tensor or recompute"):
        with_memory(estimate.state - 1)
    core: Any = SimpleNamespace(type="neuron")
    for size, refused in ((estimate.device * 10 // 9 + 2, False), (estimate.device * 10 // 9 - 2, True)):
        instance = Instance(devices=1, cores=1, efa=0, core_bytes=size)
        monkeypatch.setattr(memory_check, "find_device_memory", lambda _, size=size: size)
        with pytest.raises(UserError) if refused else nullcontext():
            check_device_memory(settings, core)
        with pytest.raises(UserError) if refused else nullcontext():
            refuse_too_small(estimate, instance, "x")


@pytest.mark.parametrize(
    ("instance", "logical", "gib"), [("trn1.32xlarge", "", 16), ("trn2.48xlarge", "", 24), ("trn2.48xlarge", "1", 12)]
)
def test_a_neuron_core_has_the_memory_of_its_instance_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instance: str, logical: str, gib: int
) -> None:
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", logical)
    (tmp_path / "product_name").write_text(f"{instance}\n")
    device: Any = SimpleNamespace(type="neuron")
    assert find_device_memory(device, product_name=tmp_path / "product_name") == gib << 30
    assert find_device_memory(device, product_name=tmp_path / "absent") is None
    assert find_device_memory(torch.device("cpu")) is None
