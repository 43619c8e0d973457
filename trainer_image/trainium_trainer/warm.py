"""Everything slow that a training process needs and that does not depend on its rank.

A standby process calls `warm` before it knows what it will be, and is forked when a rank must start. Invariants: no
environment of a rank is read, no accelerator is touched, no thread is left behind, nothing is written.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from trainium_contract.trainer import DataParallelMode, TrainingConfig
from trainium_trainer.exits import UserError

_ALWAYS = (
    "trainium_trainer.cli",
    "trainium_trainer.train",
    "trainium_trainer.data.packing",
    "trainium_trainer.data.python_docs",
)
_DIVIDED = (
    "torch._dynamo",  # DTensor and FSDP import it at their first use
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "trainium_trainer.models.parallel_plan",
)
_SHARDED = ("torch.distributed.fsdp", "trainium_trainer.backends.sharded")


def warm(config_path: str | None = None) -> None:
    """Import what a rank needs, all of it when the configuration is not known or not valid (the rank will say so)."""
    for name in _ALWAYS:
        importlib.import_module(name)
    config = _configuration(config_path)
    if config is None or config.parallelism.tensor > 1:
        _import(_DIVIDED)
    if config is None or config.data_parallel is DataParallelMode.FULLY_SHARDED:
        _import(_DIVIDED + _SHARDED)
    from trainium_trainer.checkpoint import manager  # noqa: PLC0415 - this function is the place for slow imports

    manager.warm()
    _first_step()


def _configuration(path: str | None) -> TrainingConfig | None:
    from trainium_trainer.config import load  # noqa: PLC0415 - as above

    try:
        return load(Path(path)) if path else None
    except UserError:
        return None


def _import(names: tuple[str, ...]) -> None:
    for name in names:
        importlib.import_module(name)


def _first_step() -> None:
    """One forward and backward pass of a small model, so that kernels are chosen and memory is mapped.

    Only with a build of torch that knows no accelerator: autograd would start a thread for each device.
    """
    import torch  # noqa: PLC0415 - as above

    if torch.version.cuda is not None or torch.version.hip is not None or hasattr(torch, "neuron"):
        return
    from trainium_contract.trainer import ModelConfig  # noqa: PLC0415
    from trainium_trainer.models.llama import Llama, loss_sum  # noqa: PLC0415
    from trainium_trainer.models.shapes import resolve_shape  # noqa: PLC0415

    state = torch.random.get_rng_state()
    model = Llama(resolve_shape(ModelConfig(), 2048))
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    tokens = torch.zeros(1, 64, dtype=torch.int64)
    loss_sum(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]
    torch.random.set_rng_state(state)
