"""Do the slow imports and preparations of a training process that do not depend on its rank.

A standby process calls `warm` before its role is known, and is forked when a rank must start.

Guarantees:
- No environment of a rank is read, no accelerator is used, no thread remains, and only the cache of tokenized data is
  written, so that it is ready when a spare takes over.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_contract.trainer.parallelism import TorchCompile
from trainium_trainer.exits import TrainerError, UserError
from trainium_trainer.reverse_lookups import stop_reverse_lookups

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.trainer.config import TrainingConfig

_ALWAYS = (
    "trainium_trainer.cli",
    "trainium_trainer.loop.train",
    "trainium_trainer.checkpoint.manager",
    "trainium_trainer.backends.native",
    "trainium_trainer.data.dataset",
    "trainium_trainer.data.sources.python_docs",
)
_DIVIDED = (
    "torch._dynamo",  # DTensor and FSDP would import it at their first use
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "trainium_trainer.models.parallel_plan",
)
_ACCELERATORS = ("nvidia[0-9]*", "neuron[0-9]*", "kfd")
_COMPILED = ("torch._dynamo", "torch._inductor.compile_fx")
_BEGINNING = ("trainium_trainer.weights.base", "trainium_trainer.weights.adapter")
_PIPELINE = ("trainium_trainer.backends.pipeline",)
_SHARDED = ("torch.distributed.fsdp", "trainium_trainer.backends.sharded_store")


def warm(config_path: str | None = None) -> None:
    """Import the modules that a rank needs; all of them if the configuration is unknown or invalid."""
    for name in _ALWAYS:
        importlib.import_module(name)
    stop_reverse_lookups()  # all ranks inherit it
    sys.modules["trainium_trainer.cli"].build_parser()
    config = _read_configuration(config_path)
    if config is None or config.parallelism.tensor > 1:
        _import(_DIVIDED)
    if config is None or config.parallelism.pipeline > 1:
        _import((*_DIVIDED, *_PIPELINE))
    if config is None or config.data_parallel.is_sharded:
        _import(_DIVIDED + _SHARDED)
    if config is not None and config.torch_compile is not TorchCompile.NONE:
        _import(_COMPILED)
    _run_first_step()
    if config is not None:
        if config.model.weights is not None:
            _import(_BEGINNING)
        _prepare_data(config)


def _read_configuration(path: str | None) -> TrainingConfig | None:
    from trainium_trainer.configuration.config import load  # noqa: PLC0415 - this function is the place for slow imports

    try:
        return load(Path(path)) if path else None
    except UserError:
        return None


def _prepare_data(config: TrainingConfig) -> None:
    """Tokenize data that are not cached; data of the hub and S3, whose libraries start threads, wait for a rank."""
    from trainium_trainer.data.dataset import open_run_data  # noqa: PLC0415
    from trainium_trainer.data.sources.files import is_in_store  # noqa: PLC0415
    from trainium_trainer.data.sources.resolve import list_locations  # noqa: PLC0415 - as above

    if any(map(is_in_store, list_locations(config.data))):
        return

    def prepare() -> None:
        with contextlib.suppress(TrainerError):  # the rank reports it
            open_run_data(config)

    _import(_run_in_child(prepare))


def _run_in_child(work: Callable[[], None]) -> tuple[str, ...]:
    """Run some work in a child process, so that its threads (Arrow's, for instance) end with it; return its imports."""
    read_end, write_end = os.pipe()
    imported = set(sys.modules)
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read_end)
            work()
            new = [name for name in sys.modules if name not in imported and "." not in name]
            os.write(write_end, "\n".join(new).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, encoding="utf-8") as pipe:
        names = tuple(pipe.read().split())
    os.waitpid(pid, 0)
    return names


def _import(names: tuple[str, ...]) -> None:
    for name in names:
        with contextlib.suppress(ImportError):  # dynamic or missing: a rank that needs it reports it
            importlib.import_module(name)


def _run_first_step() -> None:
    """Run forward and backward of a small model, so that kernels are selected and memory is mapped.

    It is skipped if there is an accelerator: autograd would start a thread for each, and a driver does not survive a
    fork.
    """
    if any(any(Path("/dev").glob(pattern)) for pattern in _ACCELERATORS):
        return
    import torch  # noqa: PLC0415 - as above

    from trainium_contract.trainer.model import ModelConfig  # noqa: PLC0415
    from trainium_trainer.configuration.model_shape import resolve_shape  # noqa: PLC0415
    from trainium_trainer.models.llama import Llama  # noqa: PLC0415
    from trainium_trainer.models.loss import compute_loss_sum  # noqa: PLC0415

    state = torch.random.get_rng_state()
    model = Llama(resolve_shape(ModelConfig(), 2048))
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    tokens = torch.zeros(1, 64, dtype=torch.int64)
    compute_loss_sum(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]
    torch.random.set_rng_state(state)
