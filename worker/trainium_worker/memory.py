"""Keep the state of a training loop in the memory of the nodes after each step, and resume from it.

    step, _ = memory.load(model, optimizer, durable="/checkpoints/run/step-{step}")
    while step < last:
        train(step)
        step += 1
        memory.save(step, model, optimizer)

The state is every parameter that is trained, the buffers, the optimizer's state, and other values that can be pickled.
Parameters may be plain tensors or DTensors (DDP, FSDP2, tensor parallelism). Saves are those of `trainium_worker.dcp`,
with its guarantees; the next step computes while a save is copied to another node. Later saves of the same tensors cost
one copy of them. A step at which only some ranks have a new tensor is not saved.
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
from trainium_worker.dcp.commit import Outcome
from trainium_worker.dcp.repeated import RepeatedSave, describe_layout

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

    from trainium_worker.dcp.parts import StrPath
    from trainium_worker.dcp.repeated import Layout

_MIN_VALUES_BYTES = 4096
_FULL_FRACTION = 0.75
"""The filled fraction of the tensor with the values at which the next save gets a larger one."""
_WRAPPERS = re.compile(r"^module\.|_orig_mod\.")
"""Prefixes that DistributedDataParallel and torch.compile add to names."""


class _Saver:
    """The saves of this process, one at a time in a separate thread."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._saving: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memory-save")
        self._layout: Layout = []
        self._repeated: RepeatedSave | None = None
        """The last save, if a state of `_layout` can repeat it."""
        self._values_bytes = _MIN_VALUES_BYTES
        """The size of the tensor with the values."""
        self._is_nearly_full = False
        self._walked: list[object] = []
        """Result of the last walk of `model_tensors` over the model."""
        self._modules: list[torch.nn.Module] = []
        self._model: dict[str, torch.Tensor] = {}

    def model_tensors(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return `_model_tensors`; walks a model only if a module, parameter or buffer was added or replaced."""
        if not self._modules or self._modules[0] is not model or self._walked != _list_members(self._modules):
            self._modules = [*model.modules()]
            self._walked, self._model = _list_members(self._modules), _model_tensors(model)
        return self._model

    def pack(self, values: Any) -> torch.Tensor:
        """Return values as a tensor of bytes, whose size seldom changes."""
        packed = pickle.dumps(values)
        fraction = 1 if self._repeated is not None else _FULL_FRACTION  # a rank alone should not change the layout
        while self._values_bytes * fraction < len(packed):
            self._values_bytes *= 2
        self._is_nearly_full = len(packed) > self._values_bytes * _FULL_FRACTION
        return torch.frombuffer(bytearray(packed.ljust(self._values_bytes, b"\0")), dtype=torch.uint8)

    def save(self, writer: MemoryWriter, state: dict[str, torch.Tensor]) -> None:
        """Copy the state, and save it in the background."""
        layout, repeated = describe_layout(state), self._repeated
        if repeated is None or layout != self._layout:
            outcome, state = Outcome.PLAN, writer.stage(_detach(state))
        else:
            outcome = repeated.stage(state)
            if outcome == Outcome.OK and self._is_nearly_full:
                outcome = Outcome.LAST
        self._layout = layout
        self._saving = self._thread.submit(self._write, writer, state, outcome)

    def _write(self, writer: MemoryWriter, state: dict[str, torch.Tensor], outcome: Outcome) -> None:
        """Write a state, with a plan if it has another layout than the last one. Collective."""
        repeated, session = self._repeated, writer.session
        if repeated is not None:
            outcomes = repeated.write(writer.step, outcome)
            if any(rank_outcome & (Outcome.LAST | Outcome.PLAN) for rank_outcome in outcomes):
                self._repeated = None
            if set(outcomes) != {Outcome.PLAN}:
                return
        dcp.save(state, storage_writer=writer, process_group=session.group)
        if session.is_enabled:
            self._repeated = RepeatedSave.of_newest_save(session, state)
            session.free_copy()

    def wait(self) -> None:
        """Wait for the save in progress. Raises its error."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()


_saver: _Saver | None = None


def _get_saver() -> _Saver:
    """Return the saver of this process."""
    global _saver  # noqa: PLW0603 - one process has one
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
    state = {**saver.model_tensors(model), **tensors, f"values.{_rank()}": saver.pack((rest, values))}
    writer = MemoryWriter(step, directory=directory)
    if writer.is_enabled:
        saver.save(writer, state)
    if durable is not None:
        folder = os.fspath(durable).format(step=step)
        trainium_worker.stage("save")
        saver.wait()  # its collectives are of the same group
        dcp.save(_detach(state), checkpoint_id=folder, process_group=writer.session.group)
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
    trainium_worker.stage("load")
    reader = MemoryReader(durable, directory=directory)
    values = [] if reader.step is None else read(reader, model, optimizer)
    trainium_worker.stage("compile")  # until the first step
    return (reader.step or 0), values


def read(reader: MemoryReader, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Load the save of a reader, and return the values of the ranks that saved. Collective."""
    metadata = reader.read_metadata().state_dict_metadata
    parameters, states = _detach(_model_tensors(model)), _create_optimizer_tensors(metadata, optimizer)
    saved = {name for name in metadata if name.startswith("model.")}
    if different := saved ^ parameters.keys():
        name, place = min(different), "now" if min(different) in saved else "then"
        raise ValueError(
            f"the state of step {reader.step} from {reader.source} is of another model: {name} is not trained {place}; "
            "create the model as when the run started, or start a new run"
        )
    dcp.load({**parameters, **states}, storage_reader=reader, process_group=reader.session.group)
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
    metadata: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    names = sorted((name for name in metadata if name.startswith("values.")), key=_number)
    loaded: dict[str, Any] = {name: torch.empty(metadata[name].size, dtype=torch.uint8) for name in names}
    dcp.load(loaded, storage_reader=reader, process_group=reader.session.group)
    return [pickle.loads(packed.numpy().tobytes()) for packed in loaded.values()]  # noqa: S301 - written by this job


def wait() -> None:
    """Wait until the last save is complete. Raises its error."""
    _get_saver().wait()


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _number(name: str) -> int:
    return int(name.rpartition(".")[2])


def _list_members(modules: list[torch.nn.Module]) -> list[object]:
    """Return the identities of the members of modules, and which parameters are trained."""
    members: list[object] = []
    for module in modules:
        for parameter in module._parameters.values():  # noqa: SLF001 - the public methods walk the whole model
            members += (id(parameter), parameter is not None and parameter.requires_grad)
        members += map(id, module._buffers.values())  # noqa: SLF001 - as above
        members += map(id, module._modules.values())  # noqa: SLF001 - as above
    return members


def _model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the trained parameters and the buffers of a model by name, without the prefixes of its wrappers."""
    parameters = model.named_parameters()
    tensors: dict[str, torch.Tensor] = {name: parameter for name, parameter in parameters if parameter.requires_grad}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:  # noqa: SLF001 - it has no public name
                tensors[f"{prefix}.{name}"] = buffer
    return {f"model.{_WRAPPERS.sub('', name)}": tensor for name, tensor in tensors.items()}


def _detach(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in tensors.items()}


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
