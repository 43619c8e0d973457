"""Everything slow that a training process needs and that does not depend on its rank.

A standby process calls `warm` before it knows what it will be, and is forked when a rank must start. Invariants: no
environment of a rank is read, no accelerator is touched, no thread is left behind, and nothing is written but the
cache of tokenised data, so that a spare that steps in finds it ready.
"""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path

from trainium_contract.trainer import DataConfig, DataParallelMode, TrainingConfig
from trainium_trainer.exits import TrainerError, UserError

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
_ACCELERATORS = ("nvidia[0-9]*", "neuron[0-9]*", "kfd")
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
    if config is not None:
        _prepare_data(config.data)


def _configuration(path: str | None) -> TrainingConfig | None:
    from trainium_trainer.config import load  # noqa: PLC0415 - as above

    try:
        return load(Path(path)) if path else None
    except UserError:
        return None


def _prepare_data(config: DataConfig) -> None:
    """Tokenise what is not in the cache yet; a data set from the hub waits for a rank, since its library is heavy."""
    from trainium_trainer.data.documents import HubDataset, open_source  # noqa: PLC0415 - as above
    from trainium_trainer.data.packing import open_tokens  # noqa: PLC0415

    with contextlib.suppress(TrainerError):  # the rank will say so
        if not isinstance(open_source(config.source, config.text_field), HubDataset):
            open_tokens(config)


def _import(names: tuple[str, ...]) -> None:
    for name in names:
        importlib.import_module(name)


def _first_step() -> None:
    """One forward and backward pass of a small model, so that kernels are chosen and memory is mapped.

    Not where there is an accelerator: autograd would start a thread for each, and a driver does not survive a fork.
    """
    if any(any(Path("/dev").glob(pattern)) for pattern in _ACCELERATORS):
        return
    import torch  # noqa: PLC0415 - as above

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
