"""Refuse settings, nodes and installations that backend Nxd does not support."""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from trainium_contract.trainer.config import TrainingConfig
from trainium_contract.trainer.parallelism import BackendChoice, DeviceChoice
from trainium_trainer.backends.choose import choose_backend, create_backend, find_backend, refuse_unsupported
from trainium_trainer.backends.nxd.requirements import PACKAGES
from trainium_trainer.cli import run
from trainium_trainer.compile.dry_run import create_dry_run_launch
from trainium_trainer.configuration.config import Settings, resolve_settings
from trainium_trainer.exits import UserError, find_exit_code

MODEL = {"numLayers": 2, "hiddenSize": 64, "intermediateSize": 64, "numAttentionHeads": 4, "numKeyValueHeads": 4}
TEXT = {"sequenceLength": 32}
PACKED = TEXT | {"format": "Instruction", "source": "/data/examples.jsonl", "examples": {"packing": True}}


def create_settings(ranks: int = 1, *, node: int = 1, is_dry_run: bool = False, **fields: Any) -> Settings:
    document = {"backend": "Nxd", "model": MODEL, "batch": {"globalSize": 8}, "data": TEXT} | fields
    launch = replace(create_dry_run_launch(0, ranks, node), is_dry_run=is_dry_run)
    return resolve_settings(TrainingConfig.model_validate(document), launch, vocabulary=320)


@pytest.mark.parametrize(
    ("ranks", "fields", "sentence"),
    [
        (2, {"parallelism": {"pipeline": 2}}, "parallelism.pipeline is 2, but backend Nxd has no pipeline: use 1"),
        (1, {"device": "Cpu"}, "device is Cpu, but backend Nxd computes on NeuronCores only: leave device out"),
        (2, {"precision": "BFloat16Stochastic"}, "drift apart; set dataParallel to ShardedOptimizer"),
        (2, {"parallelism": {"context": 2}}, "parallelism.context is 2, but backend Nxd does not divide sequences"),
        (
            1,
            {"torchCompile": "Layers"},
            "torchCompile is Layers, but backend Nxd compiles whole steps by itself: leave",
        ),
    ],
)
def test_unsupported_settings_are_refused_by_the_configuration(
    ranks: int, fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError) as refused:
        refuse_unsupported(create_settings(ranks, **fields))
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("ranks", "fields"),
    [
        (1, {"data": PACKED}),
        (1, {"data": TEXT | {"maskDocuments": True}}),
        (1, {"precision": "BFloat16Stochastic"}),
        (2, {"precision": "BFloat16Stochastic", "dataParallel": "ShardedOptimizer"}),
        (2, {"precision": "BFloat16"}),
    ],
    ids=["packed", "masked", "no replicas", "sharded", "masters"],
)
def test_settings_that_others_restrict_are_allowed(ranks: int, fields: dict[str, Any]) -> None:
    refuse_unsupported(create_settings(ranks, **fields))


@pytest.mark.parametrize(
    ("preset", "sentence"),
    [
        ("OLMo2-1B", "backend Nxd has no models of the family olmo2, only llama, mistral, qwen2, qwen3: set backend"),
        ("Granite3.3-2B", "backend Nxd has no models of the family granite, only"),
        ("SmolLM3-3B", "backend Nxd has no models of the family smollm3, only"),
        ("Gemma3-1B", "backend Nxd has no models of the family gemma3_text, only"),
    ],
)
def test_a_family_that_it_cannot_compute_is_refused_by_name(preset: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        refuse_unsupported(create_settings(1, model={"preset": preset, "vocabSize": 320}))
    refuse_unsupported(create_settings(1, model={"preset": "Qwen3-0.6B", "vocabSize": 320}))


@pytest.mark.parametrize("command", [("check", "--ranks", "2"), ("train",), ("precompile", "--sizes", "1")])
def test_every_command_refuses_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    document = {
        "backend": "Nxd",
        "device": "Cpu",
        "model": {"preset": "Llama2-7B"},
        "data": {"source": "python-docs"},
    }
    (tmp_path / "trainer.yaml").write_text(yaml.safe_dump(document))
    assert run([command[0], "--config", str(tmp_path / "trainer.yaml"), *command[1:]]) == 64
    assert "device is Cpu, but backend Nxd computes on NeuronCores only" in capsys.readouterr().err


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the packages on the path; return a folder of device files."""
    for name in PACKAGES:
        (tmp_path / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("NXD_CPU_MODE", "PJRT_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    devices = tmp_path / "dev"
    devices.mkdir()
    return devices


def test_a_node_without_neuron_devices_is_refused(packages: Path) -> None:
    with pytest.raises(UserError, match=r"this node has no Neuron device: give the worker aws.amazon.com/neuron"):
        find_backend(create_settings(), devices=packages)
    (packages / "neuron0").touch()
    assert find_backend(create_settings(), devices=packages) is BackendChoice.NXD


def test_graphs_are_compiled_on_a_node_without_devices_but_not_in_the_mode_without_graphs(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_backend(create_settings(is_dry_run=True), devices=packages) is BackendChoice.NXD
    monkeypatch.setenv("NXD_CPU_MODE", "1")
    with pytest.raises(UserError, match="NXD_CPU_MODE is set, with which NxD makes no graphs to compile: unset it"):
        find_backend(create_settings(is_dry_run=True), devices=packages)


def test_a_node_that_cannot_be_divided_by_four_is_refused(packages: Path) -> None:
    (packages / "neuron0").touch()
    four = {"parallelism": {"tensor": 4}}
    assert find_backend(create_settings(8, node=8, **four), devices=packages) is BackendChoice.NXD
    with pytest.raises(UserError, match="a node has 2 processes: backend Nxd divides a node into groups of 4; start"):
        find_backend(create_settings(8, node=2, **four), devices=packages)


def test_auto_does_not_choose_nxd_where_another_device_is_configured(packages: Path) -> None:
    assert choose_backend(BackendChoice.AUTO) is BackendChoice.NXD
    assert choose_backend(BackendChoice.AUTO, DeviceChoice.NEURON) is BackendChoice.NXD
    assert choose_backend(BackendChoice.AUTO, DeviceChoice.CPU) is BackendChoice.NATIVE


@pytest.fixture
def first_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder that is searched for packages before all others."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in (*PACKAGES, "trainium_trainer.backends.nxd.backend"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in PACKAGES:  # transformers would use the empty modules
        sys.modules.pop(name, None)


def missing_package() -> UserError:
    with pytest.raises(UserError) as refused:
        create_backend(BackendChoice.NXD, cast("Settings", None))
    return refused.value


@pytest.mark.skipif(any(map(importlib.util.find_spec, PACKAGES)), reason="packages of backend Nxd are installed")
def test_importing_the_backend_names_the_missing_package_and_its_source(first_on_path: Path) -> None:
    error = missing_package()
    assert "backend is Nxd, but torch_xla cannot be imported" in str(error)
    assert "Neuron SDK 2.30" in str(error)
    assert find_exit_code(error) == 64


def test_a_package_that_lacks_another_is_reported_by_the_missing_one(first_on_path: Path) -> None:
    (first_on_path / "torch_xla.py").touch()
    (first_on_path / "neuronx_distributed.py").write_text("import torch_neuronx_of_no_machine\n")
    assert "but torch_neuronx_of_no_machine cannot be imported" in str(missing_package())
