"""Keep the state of a training loop in the memory of the nodes after each step, and resume from it.

    step, _ = memory.load(model, optimizer, durable="/checkpoints/run/step-{step}")
    while step < last:
        train(step)
        memory.wait()
        optimizer.step()
        step += 1
        memory.save(step, model, optimizer)

Only a step of the optimizer may change the weights between two calls of `save`. The state is every parameter that is
trained, the buffers, the optimizer's state, and other values that can be pickled. Parameters may be plain tensors or
DTensors (DDP, FSDP2, tensor parallelism). Saves are those of `trainium_worker.dcp`, with its guarantees; the next step
computes while a save is copied to another node. Later saves of the same tensors cost one copy of them. A step at which
only some ranks have a new tensor is not saved.

With data parallelism (DDP) of processors on two or more nodes, most steps are not copied: when a rank fails, another
writes the newest step for all (`dcp.just_in_time`). A failure of all ranks at once then costs the steps since the last
copy. Copies take 1 % of the time, and are at most 300 s apart.
"""

from __future__ import annotations

import copy
import functools
import os
import pickle
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import trainium_worker
from trainium_worker.dcp import MemoryReader, MemoryWriter
from trainium_worker.dcp.saver import VALUES_PREFIX, Saver
from trainium_worker.model_state import (
    ModelTensors,
    create_optimizer_tensors,
    detach,
    list_model_tensors,
    split_optimizer,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_worker.dcp.parts import StrPath

_model_tensors = ModelTensors()
_saver: Saver | None = None


def _get_saver() -> Saver:
    """Return the saver of this process."""
    global _saver  # noqa: PLW0603 - one process has one
    if _saver is None or _saver.pid != os.getpid():
        _saver = Saver()
    return _saver


def save(
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    values: Any = None,
    *,
    same_values: bool = False,
    is_last: bool = False,
    durable: StrPath | None = None,
    directory: StrPath | None = None,
) -> None:
    """Save the state after a step on all ranks; returns once it is copied or held. Raises the error of the last save.

    values: any other object that can be pickled, or a function that returns it, as it is at this call. Each rank may
    have its own. same_values: they are the same on all ranks, so one rank can save for all. is_last: copy the step,
    because no other one follows; that is known if `trainium_worker.step` has the total. durable: also write the state
    as a checkpoint of torch.distributed.checkpoint to this folder, with {step} in its name, and wait for it.
    directory: as for `MemoryWriter`; unset, nothing is kept in memory without an agent.
    """
    saver, is_same = _get_saver(), same_values or values is None
    saver.finish()
    saver.end_step()
    writer = MemoryWriter(step, directory=directory)
    if writer.is_enabled:
        hold(step, model, optimizer, values, same_values=is_same)
        if saver.is_due(step, is_held=is_same, is_last=is_last):
            state = _collect(model, optimizer, values, is_same=is_same)
            saver.save(writer, state, is_replicated=is_same and not _model_tensors.has_buffers)
    if durable is not None:
        folder = os.fspath(durable).format(step=step)
        trainium_worker.stage("save")
        saver.finish()  # its collectives are of the same group
        state = detach(_collect(model, optimizer, values, is_same=False))
        dcp.save(state, checkpoint_id=folder, process_group=writer.session.group)
        trainium_worker.saved(step, folder)


def hold(
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    values: Any = None,
    *,
    same_values: bool = False,
) -> None:
    """Hold the state after a step in place, if a surviving rank can write it. Arguments are those of `save`.

    `save` does it too. Call it in addition where much is done between a step of the optimizer and `save`.
    """
    held, is_same = _get_saver().just_in_time, same_values or values is None
    if held is None or not is_same:
        return
    get_values = values if callable(values) else functools.partial(pickle.loads, pickle.dumps(values))
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    options = copy.deepcopy(groups)  # a schedule may change them before the next step

    def collect() -> dict[str, torch.Tensor]:
        tensors, rest = _collect_tensors(model, optimizer)
        saved_groups = [{**group, **saved} for group, saved in zip(rest["param_groups"], options)]
        values_now = ({**rest, "param_groups": saved_groups}, get_values(), True)
        return {**tensors, f"{VALUES_PREFIX}0": _to_tensor(pickle.dumps(values_now))}

    inner: Any = optimizer
    while isinstance(getattr(inner, "optimizer", None), torch.optim.Optimizer):
        inner = inner.optimizer  # of accelerate's wrapper, whose own hooks are never called
    held.hold(step, collect, _model_tensors.list(model).values(), inner)


def write_held() -> None:
    """Write the state that is held in place, because this process ends with an error."""
    held = _get_saver().just_in_time
    if held is not None:
        held.write()


def _collect(model: torch.nn.Module, optimizer: torch.optim.Optimizer, values: Any, *, is_same: bool) -> dict[str, Any]:
    """Return the state of this rank by name; values that are the same on all ranks are those of the first one."""
    tensors, rest = _collect_tensors(model, optimizer)
    rank = _rank()
    own = None if is_same and rank else values() if callable(values) else values
    return {**tensors, f"{VALUES_PREFIX}{rank}": _get_saver().pack(pickle.dumps((rest, own, is_same)))}


def _collect_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of a model and of its optimizer by name, and the rest of the optimizer's state."""
    tensors, rest = split_optimizer(optimizer)
    return {**_model_tensors.list(model), **tensors}, rest


def load(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    durable: StrPath | None = None,
    directory: StrPath | None = None,
) -> tuple[int, list[Any]]:
    """Load the newest state that all ranks can read; return its step, 0 for none, and the values of the ranks saved.

    Values that are the same on all ranks are one. Collective. Arguments are those of `save`. Raises ValueError if model
    or optimizer have other parameters.
    """
    trainium_worker.stage("load")
    reader = MemoryReader(durable, directory=directory)
    values = [] if reader.step is None else read(reader, model, optimizer)
    trainium_worker.stage("compile")  # until the first step
    return (reader.step or 0), values


def read(reader: MemoryReader, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Load the save of a reader, and return the values as `read_values`. Collective."""
    metadata = reader.read_metadata().state_dict_metadata
    parameters, states = detach(list_model_tensors(model)), create_optimizer_tensors(metadata, optimizer)
    saved = {name for name in metadata if name.startswith("model.")}
    if different := saved ^ parameters.keys():
        name, place = min(different), "now" if min(different) in saved else "then"
        raise ValueError(
            f"the state of step {reader.step} from {reader.source} is of another model: {name} is not trained {place}; "
            "create the model as when the run started, or start a new run"
        )
    dcp.load({**parameters, **states}, storage_reader=reader, process_group=reader.session.group)
    packed = _read_packed(reader)
    optimizer_state = packed[0][0]
    for name, tensor in states.items():
        _, number, key = name.split(".", 2)
        optimizer_state["state"].setdefault(int(number), {})[key] = tensor
    optimizer.load_state_dict(optimizer_state)
    return _select_values(packed)


def read_values(reader: MemoryReader) -> list[Any]:
    """Return the values of the ranks that saved, or the one value if they are the same. Collective."""
    return _select_values(_read_packed(reader))


def _select_values(packed: list[tuple[dict[str, Any], Any, bool]]) -> list[Any]:
    return [values for _, values, _ in (packed[:1] if packed[0][2] else packed)]


def _read_packed(reader: MemoryReader) -> list[tuple[dict[str, Any], Any, bool]]:
    """Return the rest of the optimizer's state, the values, and whether they are the same, of each rank that saved."""
    metadata: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    names = sorted((name for name in metadata if name.startswith(VALUES_PREFIX)), key=_number)
    loaded: dict[str, Any] = {name: torch.empty(metadata[name].size, dtype=torch.uint8) for name in names}
    dcp.load(loaded, storage_reader=reader, process_group=reader.session.group)
    return [pickle.loads(packed.numpy().tobytes()) for packed in loaded.values()]  # noqa: S301 - written by this job


def finish() -> None:
    """Wait until the last save is complete. Raises its error."""
    _get_saver().finish()


def wait() -> None:
    """Wait until the last save is complete, before the state changes. Raises its error."""
    _get_saver().wait()


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _number(name: str) -> int:
    return int(name.rpartition(".")[2])
