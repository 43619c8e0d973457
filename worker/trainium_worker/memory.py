"""Keep the state of a training loop in the memory of the nodes after each step, and resume from it.

    step = memory.load(model, optimizer, durable="/checkpoints/run/step-{step}") or 0
    while step < last:
        train(step)
        step += 1
        memory.save(step, model, optimizer)

The state is every parameter that is trained, the buffers, the optimizer's state, and other values that can be pickled.
Parameters may be plain tensors or DTensors (DDP, FSDP2, tensor parallelism). Saves are those of `trainium_worker.dcp`,
with its guarantees; the next step computes while a save is copied to another node.
"""

from __future__ import annotations

import os
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import trainium_worker
from trainium_worker.dcp import MemoryReader, MemoryWriter

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

    from torch.distributed import ProcessGroup

    from trainium_worker.dcp.parts import StrPath

_WRAPPERS = re.compile(r"^module\.|_orig_mod\.")
"""Prefixes that DistributedDataParallel and torch.compile add to names."""


class _Saver:
    """The saves of this process, one at a time in a separate thread."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        distributed = dist.is_available() and dist.is_initialized()
        self.group: ProcessGroup | None = dist.new_group(backend="gloo") if distributed else None
        self._saving: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memory-save")
        self._planner = dcp.DefaultSavePlanner()
        self._planned: list[object] = []
        """The names, shapes and types of the state for which the planner has a plan."""

    def save(self, writer: MemoryWriter, state: dict[str, Any]) -> None:
        """Copy the state, and save it in the background."""
        layout: list[object] = [
            (name, value.shape, value.dtype) if isinstance(value, torch.Tensor) else name
            for name, value in state.items()
        ]
        self._saving = self._thread.submit(self._write, writer, writer.stage(state), layout)

    def _write(self, writer: MemoryWriter, state: dict[str, Any], layout: list[object]) -> None:
        """Write a state; ranks agree on a plan only where one of them has a state of another layout than before."""
        if writer.agree(layout == self._planned):
            self._planner.set_up_planner(state)
            writer.write_data(self._planner.plan, self._planner)
            return
        self._planner, self._planned = dcp.DefaultSavePlanner(), []
        dcp.save(state, storage_writer=writer, planner=self._planner, process_group=self.group)
        self._planned = layout

    def wait(self) -> None:
        """Wait for the save in progress. Raises its error."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()


_saver: _Saver | None = None


def _get_saver() -> _Saver:
    """Return the saver of this process; the first call of each rank is collective."""
    global _saver  # noqa: PLW0603 - one process has one group
    if _saver is None or _saver.pid != os.getpid():
        _saver = _Saver()
    return _saver


def save(
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    values: Any = None,
    *,
    durable: StrPath | None = None,
    directory: StrPath | None = None,
) -> None:
    """Save the state after a step on all ranks; returns once the state is copied. Raises the error of the last save.

    values: any other object that can be pickled; each rank may have its own. durable: also write the state as a
    checkpoint of torch.distributed.checkpoint to this folder, with {step} in its name, and wait for it. directory: as
    for `MemoryWriter`; unset, nothing is kept in memory without an agent.
    """
    saver = _get_saver()
    saver.wait()
    tensors, rest = _split_optimizer(optimizer)
    state: dict[str, Any] = {**_model_tensors(model), **tensors, f"values.{_rank()}": pickle.dumps((rest, values))}
    writer = MemoryWriter(step, directory=directory)
    if writer.is_enabled:
        saver.save(writer, state)
    if durable is not None:
        folder = os.fspath(durable).format(step=step)
        trainium_worker.stage("save")
        dcp.save(state, checkpoint_id=folder, process_group=saver.group)
        trainium_worker.saved(step, folder)


def load(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    durable: StrPath | None = None,
    directory: StrPath | None = None,
) -> tuple[int, list[Any]]:
    """Load the newest state that all ranks can read; return its step, 0 for none, and the values of the ranks saved.

    Collective. Arguments are those of `save`. Raises ValueError if model or optimizer have other parameters.
    """
    reader = MemoryReader(durable, directory=directory)
    return (reader.step or 0), ([] if reader.step is None else read(reader, model, optimizer))


def read(reader: MemoryReader, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Load the save of a reader, and return the values of the ranks that saved. Collective."""
    metadata = reader.read_metadata().state_dict_metadata
    parameters, states = _model_tensors(model), _create_optimizer_tensors(metadata, optimizer)
    saved = {name for name in metadata if name.startswith("model.")}
    if different := saved ^ parameters.keys():
        name, place = min(different), "now" if min(different) in saved else "then"
        raise ValueError(
            f"the state of step {reader.step} from {reader.source} is of another model: {name} is not trained {place}; "
            "create the model as when the run started, or start a new run"
        )
    dcp.load({**parameters, **states}, storage_reader=reader, process_group=_get_saver().group)
    packed = _read_values(reader)
    optimizer_state = packed[0][0]
    for name, tensor in states.items():
        _, number, key = name.split(".", 2)
        optimizer_state["state"].setdefault(int(number), {})[key] = tensor
    optimizer.load_state_dict(optimizer_state)
    return [value for _, value in packed]


def read_values(reader: MemoryReader) -> list[Any]:
    """Return the values of the ranks that saved. Collective."""
    return [values for _, values in _read_values(reader)]


def _read_values(reader: MemoryReader) -> list[tuple[dict[str, Any], Any]]:
    names = [name for name in reader.read_metadata().state_dict_metadata if name.startswith("values.")]
    loaded: dict[str, Any] = dict.fromkeys(sorted(names, key=_number), b"")
    dcp.load(loaded, storage_reader=reader, process_group=_get_saver().group)
    return [pickle.loads(packed) for packed in loaded.values()]  # noqa: S301 - written by ranks of this job


def wait() -> None:
    """Wait until the last save is complete. Raises its error."""
    _get_saver().wait()


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _number(name: str) -> int:
    return int(name.rpartition(".")[2])


def _model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the trained parameters and the buffers of a model by name, without the prefixes of its wrappers."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:  # noqa: SLF001 - it has no public name
                tensors[f"{prefix}.{name}"] = buffer.detach()
    return {f"model.{_WRAPPERS.sub('', name)}": tensor for name, tensor in tensors.items()}


def _split_optimizer(optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of the state of an optimizer by name, and the rest of its state."""
    tensors: dict[str, torch.Tensor] = {}
    state = optimizer.state_dict()
    rest: dict[int, dict[str, Any]] = {}
    for number, values in state["state"].items():
        rest[number] = {}
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{number}.{key}"] = value
            else:
                rest[number][key] = value
    return tensors, {**state, "state": rest}


def _create_optimizer_tensors(metadata: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return empty tensors for the saved state of an optimizer, divided as its parameters are."""
    parameters = [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]
    tensors = {}
    for name, saved in metadata.items():
        if not name.startswith("optimizer."):
            continue
        parameter = parameters[int(name.split(".")[1])]
        if saved.size == parameter.size():
            tensors[name] = torch.empty_like(parameter, dtype=saved.properties.dtype)
        else:
            tensors[name] = torch.empty(saved.size, dtype=saved.properties.dtype)
    return tensors
