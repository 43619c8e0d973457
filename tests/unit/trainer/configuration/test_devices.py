"""Which backend and device a run gets, and the message when the requested one is missing."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from trainium_contract.trainer.parallelism import BackendChoice, DeviceChoice
from trainium_trainer.backends.choose import choose
from trainium_trainer.backends.device import pick_device
from trainium_trainer.backends.nxd.presence import PACKAGES
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Job

without_nxd = pytest.mark.skipif(
    all(importlib.util.find_spec(name) for name in PACKAGES), reason="the packages of backend Nxd are installed"
)
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")


@pytest.fixture
def neuron(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Register a stand-in for TorchNeuron, as far as the choice reads it: the library runs on its hardware only."""
    module = SimpleNamespace(is_available=lambda: True, device_count=lambda: 4)
    monkeypatch.setattr(torch, "neuron", module, raising=False)
    # Until a plug-in has given it a name, torch calls the device of plug-ins "privateuseone".
    monkeypatch.setattr(torch, "device", lambda *arguments: arguments)
    return module


@without_nxd
def test_nxd_without_its_packages_names_them_and_where_they_are(launch: Callable[..., Job]) -> None:
    job = launch(1, "nxd", ["backend=Nxd"])
    assert job.wait() == [64]
    sentence = job.log().splitlines()[-1]
    assert "backend is Nxd, but torch_xla and neuronx_distributed cannot be imported" in sentence
    assert "SDK 2.30" in sentence


@without_nxd
def test_auto_is_native_where_nxd_is_not_installed() -> None:
    assert choose(BackendChoice.AUTO) is BackendChoice.NATIVE


@without_cuda
@pytest.mark.parametrize(
    ("device", "message"),
    [("Cuda", "device is Cuda, but no CUDA device can be used"), ("Neuron", "install TorchNeuron")],
)
def test_a_device_that_is_not_there_is_refused_with_what_to_install(
    launch: Callable[..., Job], device: str, message: str
) -> None:
    job = launch(1, device, [f"device={device}"])
    assert job.wait() == [64]
    assert message in job.log().splitlines()[-1]
    assert "set device to Cpu" in job.log().splitlines()[-1]


@without_cuda
def test_a_node_with_neuron_devices_that_nothing_can_drive_never_trains_on_its_cpu_unasked(tmp_path: Path) -> None:
    assert pick_device(0, devices=tmp_path) == torch.device("cpu")
    (tmp_path / "neuron0").touch()
    with pytest.raises(UserError, match=r"this node has Neuron devices, but torch .* has no neuron device"):
        pick_device(0, devices=tmp_path)
    assert pick_device(0, DeviceChoice.CPU, devices=tmp_path) == torch.device("cpu")


def test_neuron_is_taken_where_it_is_and_each_process_has_a_core(neuron: SimpleNamespace) -> None:
    assert pick_device(3) == ("neuron", 3)
    with pytest.raises(UserError, match="process 4 of this node has no device, there are 4 Neuron cores"):
        pick_device(4)
    neuron.is_available = lambda: False
    with pytest.raises(UserError, match="TorchNeuron finds no core that it can use"):
        pick_device(0, DeviceChoice.NEURON)
