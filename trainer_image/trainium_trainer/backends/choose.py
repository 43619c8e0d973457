"""The backend of a run, from the configuration and from what is installed; all that names more than one.

Guarantees:
- No backend's library is imported before it is chosen, and only the chosen one is.
- The needs and limits of a backend are in its folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainium_contract.trainer.parallelism import BackendChoice, DeviceChoice
from trainium_trainer.backends.nxd import limits, presence
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from trainium_trainer.backends.base import Backend
    from trainium_trainer.configuration.config import Settings
    from trainium_worker import Pulse


def choose(choice: BackendChoice, device: DeviceChoice = DeviceChoice.AUTO) -> BackendChoice:
    """Native or Nxd; Auto takes Nxd where its packages are, TorchNeuron is not, and no other device is asked for.

    Raises UserError.
    """
    missing = presence.missing_packages()
    if choice is BackendChoice.NXD and missing:
        raise UserError(presence.cannot_be_imported(" and ".join(missing)))
    if choice is BackendChoice.AUTO:
        elsewhere = device in (DeviceChoice.CPU, DeviceChoice.CUDA)
        return BackendChoice.NATIVE if missing or elsewhere or _has_torch_neuron() else BackendChoice.NXD
    return choice


def refuse_what_it_cannot(settings: Settings) -> None:
    """Raise UserError for what a backend that is asked for cannot do, from the configuration alone.

    Nothing is imported or touched for it, so `trainium-trainer check` refuses what a run would refuse.
    """
    if settings.config.backend is BackendChoice.NXD:
        limits.check_model(settings.shape)
        limits.check_limits(settings.config, settings.dp_size)


def find_backend(settings: Settings, *, devices: Path = Path("/dev")) -> BackendChoice:
    """Return the backend of this run, once it is sure that its packages and its device are there. Raises UserError.

    `devices` is the folder of device files.
    """
    choice = choose(settings.config.backend, settings.config.device)
    if choice is BackendChoice.NXD:
        presence.check_node(settings, devices)
    else:
        from trainium_trainer.backends.compiled import check_compiler  # noqa: PLC0415 - imports torch
        from trainium_trainer.backends.device import pick_device  # noqa: PLC0415

        device = pick_device(settings.launch.local_rank, settings.config.device)
        check_compiler(settings.config.torch_compile, device.type)
        if settings.config.parallelism.pipeline > 1:
            from trainium_trainer.backends.pipeline import check_torch  # noqa: PLC0415 - slow to import

            check_torch()
    return choice


def make_backend(choice: BackendChoice, settings: Settings, pulse: Pulse | None = None) -> Backend:
    """Return the backend that `find_backend` has found, with its process group joined. Collective.

    Raises UserError where a package of it cannot be imported.
    """
    if choice is BackendChoice.NXD:
        presence.require_packages()
        from trainium_trainer.backends.nxd.backend import NxdBackend  # noqa: PLC0415 - only where its packages are

        return NxdBackend(settings, pulse)
    from trainium_trainer.backends.native import NativeBackend  # noqa: PLC0415 - only what is chosen is imported

    return NativeBackend(settings, pulse)


def _has_torch_neuron() -> bool:
    import torch  # noqa: PLC0415 - only a machine with both libraries asks

    return hasattr(torch, "neuron")
