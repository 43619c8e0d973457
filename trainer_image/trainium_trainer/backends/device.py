"""Select this rank's device and join the process group: CPU (gloo), CUDA (nccl) or Neuron (TorchNeuron).

Guarantees:
- No device is initialized before the choice is known to be possible.
- Small agreements always use gloo, in addition to the device's library.
- An unusable Neuron device is an error, never a slow run on the CPU.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.distributed import HashStore

from trainium_contract.trainer.parallelism import DeviceChoice
from trainium_trainer.exits import UserError
from trainium_trainer.network_interface import use_interface
from trainium_trainer.neuron_environment import DEVICE_FILES

if TYPE_CHECKING:
    from torch.distributed import Store

    from trainium_trainer.configuration.config import Launch

_TIMEOUT = timedelta(minutes=30)
"""Also bounds how long ranks wait for one that is still tokenizing; the operator detects hangs much earlier."""
_GROUP_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "neuron": "cpu:gloo,neuron:neuron"}
ENV_LAZY_CONNECTIONS = "TORCH_GLOO_LAZY_INIT"
"""Torch's switch; without it every gloo group connects all pairs of ranks when it is created (docs/measurements.md)."""
WHERE_NEURON = "https://awsdocs-neuron.readthedocs-hosted.com (setup for PyTorch)"


def pick_device(
    local_rank: int, choice: DeviceChoice = DeviceChoice.AUTO, *, devices: Path = Path("/dev")
) -> torch.device:
    """Return the device of this node's process number `local_rank`.

    By default Neuron, CUDA, else the CPU; otherwise the configured one. Raises UserError if the device is not
    available, or if the node has Neuron devices that the installed packages do not support. `devices` is the folder of
    device files.
    """
    neuron: Any = getattr(torch, "neuron", None)  # TorchNeuron registers it when torch is imported
    if choice is DeviceChoice.CPU:
        return torch.device("cpu")
    if choice in (DeviceChoice.AUTO, DeviceChoice.NEURON) and neuron is not None and neuron.is_available():
        _refuse_more_ranks_than(neuron.device_count(), local_rank, "Neuron cores")
        return torch.device("neuron", local_rank)
    if choice is DeviceChoice.NEURON:
        raise UserError(_is_neuron_missing("device is Neuron", installed=neuron is not None))
    if torch.cuda.is_available():
        _refuse_more_ranks_than(torch.cuda.device_count(), local_rank, "CUDA devices")
        return torch.device("cuda", local_rank)
    if choice is DeviceChoice.CUDA:
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        raise UserError(
            f"device is Cuda, but no CUDA device can be used (torch {torch.__version__} {built}): give the worker a "
            "GPU and its driver, install a CUDA build of torch (https://pytorch.org/get-started), or set device to Cpu"
        )
    if any(devices.glob(DEVICE_FILES)):
        raise UserError(_is_neuron_missing("this node has Neuron devices", installed=neuron is not None))
    return torch.device("cpu")


def _is_neuron_missing(premise: str, *, installed: bool) -> str:
    if installed:
        return (
            f"{premise}, but TorchNeuron finds no core that it can use: look at neuron-ls, give the worker "
            "aws.amazon.com/neuron devices, or set device to Cpu"
        )
    return (
        f"{premise}, but torch {torch.__version__} has no neuron device: on Trainium 2 and 3 install TorchNeuron "
        f"(torch-neuronx 2.13 or newer), on Trainium 1 the packages of backend Nxd, both from {WHERE_NEURON}; "
        "or set device to Cpu"
    )


def _refuse_more_ranks_than(count: int, local_rank: int, what: str) -> None:
    if local_rank >= count:
        raise UserError(
            f"process {local_rank} of this node has no device, there are {count} {what}: start at most "
            f"{count} processes per node (workers.accelerator.coresPerNode), or set device to Cpu"
        )


def group_backend(device: torch.device) -> str:
    """Return the communication backends of a device, in torch's notation."""
    return _GROUP_BACKENDS[device.type]


def set_current_device(device: torch.device) -> None:
    """Set the current device of this process, with deterministic kernels."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    if device.type == "cuda":  # https://docs.pytorch.org/docs/stable/notes/randomness.html
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(mode=True)  # with `warn_only`, attention keeps its kernel
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def join_process_group(device: torch.device, launch: Launch) -> None:
    """Join the process group over gloo and the device's library."""
    if launch.is_dry_run:
        _join_alone(device, launch)
    else:
        init_default_group(group_backend(device), launch)


def init_default_group(backend: str, launch: Launch) -> None:
    """Create the default process group from torchrun's variables; without them, of one rank."""
    use_interface(os.environ.get("MASTER_ADDR", "localhost"))
    # Torch reads it when the first group is created: two ranks then connect when they first communicate.
    os.environ.setdefault(ENV_LAZY_CONNECTIONS, "1")
    if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=_TIMEOUT)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=launch.rank, world_size=launch.world_size)


def open_store(launch: Launch) -> Store | None:
    """Open a store for all ranks before the process group exists; None for a single rank.

    Rank 0 must keep it until the group exists: if no agent serves the store, rank 0 serves it for both uses.
    """
    if launch.is_dry_run or launch.world_size == 1 or "MASTER_ADDR" not in os.environ:
        return None
    store: Store = next(dist.rendezvous("env://", timeout=_TIMEOUT))[0]
    return store


def _join_alone(device: torch.device, launch: Launch) -> None:
    """Join a process group whose other ranks do not exist: torch's fake group, which transfers nothing."""
    # The import registers the backend `fake`; torchtitan's dry runs use the same private name.
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    # Before its first micro-batch a pipeline exchanges messages on whether shapes are known: the fake peers agree.
    dist.recv = _agree
    backend = "fake" if device.type in {"cpu", "cuda"} else f"cpu:fake,{device.type}:fake"
    dist.init_process_group(backend, store=FakeStore(), rank=launch.rank, world_size=launch.world_size)


def _agree(tensor: torch.Tensor, *_: Any, **__: Any) -> int:
    """Return the message of a peer that agrees."""
    tensor.fill_(1)
    return 0
