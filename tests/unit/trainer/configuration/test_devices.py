"""Choose the backend and the device of a run, and report a missing one."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainium_contract.trainer.parallelism import BackendChoice, DeviceChoice
from trainium_trainer.backends.choose import choose_backend
from trainium_trainer.backends.device import pick_device
from trainium_trainer.backends.nxd.requirements import PACKAGES
from trainium_trainer.exits import UserError

without_nxd = pytest.mark.skipif(
    all(importlib.util.find_spec(name) for name in PACKAGES), reason="the packages of backend Nxd are installed"
)
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.fixture
def fake_neuron(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Register a fake TorchNeuron: the library runs only on its hardware."""
    module = SimpleNamespace(is_available=lambda: True, device_count=lambda: 4)
    monkeypatch.setattr(torch, "neuron", module, raising=False)
    # Torch calls the device of plug-ins "privateuseone" until a plug-in names it.
    monkeypatch.setattr(torch, "device", lambda *arguments: arguments)
    return module


@without_nxd
def test_auto_is_native_where_nxd_is_not_installed() -> None:
    assert choose_backend(BackendChoice.AUTO) is BackendChoice.NATIVE


@without_cuda
@pytest.mark.parametrize(
    ("device", "message"),
    [
        (DeviceChoice.CUDA, "device is Cuda, but no CUDA device can be used"),
        (DeviceChoice.NEURON, "install TorchNeuron"),
    ],
)
def test_a_missing_device_is_refused_with_what_to_install(device: DeviceChoice, message: str) -> None:
    with pytest.raises(UserError, match=f"{message}.*set device to Cpu"):
        pick_device(0, device)


@without_cuda
def test_a_node_with_unusable_neuron_devices_trains_on_its_cpu_only_on_request(tmp_path: Path) -> None:
    assert pick_device(0, devices=tmp_path) == torch.device("cpu")
    (tmp_path / "neuron0").touch()
    with pytest.raises(UserError, match=r"this node has Neuron devices, but torch .* has no neuron device"):
        pick_device(0, devices=tmp_path)
    assert pick_device(0, DeviceChoice.CPU, devices=tmp_path) == torch.device("cpu")


def test_an_available_neuron_device_is_chosen_and_each_process_has_a_core(fake_neuron: SimpleNamespace) -> None:
    assert pick_device(3) == ("neuron", 3)
    with pytest.raises(UserError, match="process 4 of this node has no device, there are 4 Neuron cores"):
        pick_device(4)
    fake_neuron.is_available = lambda: False
    with pytest.raises(UserError, match="TorchNeuron finds no core that it can use"):
        pick_device(0, DeviceChoice.NEURON)
