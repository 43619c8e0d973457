"""Repeat the save of a state whose tensors have the names, shapes and types of the last save, without a plan.

The files of the last save have the layout. Tensors are copied into the files of the next one, which is the only copy.
Where a rank keeps the copy of a part whose tensors it has too, as with DDP, it copies its own; only the rest is sent.
"""

from __future__ import annotations

import pickle
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch

import trainium_worker
from trainium_worker.dcp.commit import Outcome, commit, describe_no_space
from trainium_worker.snapshots.files import Part, Version

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_worker.dcp.parts import Entry
    from trainium_worker.dcp.session import Session
    from trainium_worker.snapshots.copies import Spans
    from trainium_worker.snapshots.files import SnapshotFile

    Layout = list[tuple[str, torch.Size, torch.dtype]]


class Staged(IntEnum):
    """The state of a rank before its ranks agree how to write a save."""

    PLAN = 0
    """The save has another layout than the last one, and needs a plan."""
    REPEATED = 1
    """The save is in the files."""
    REPEATED_ONCE = 2
    """The save is in the files; the next one needs a plan."""
    NO_SPACE = 3


def describe_layout(state: Mapping[str, torch.Tensor]) -> Layout:
    """Return the names, shapes and types of the tensors of a state."""
    return [(name, tensor.shape, tensor.dtype) for name, tensor in state.items()]


class _RepeatedPart:
    """A part of the last save, of which this rank has some tensors."""

    def __init__(self, file: SnapshotFile, state: Mapping[str, torch.Tensor], *, is_own: bool) -> None:
        assert file.part is not None, "the save is complete"
        self.name, self.layout, self.payload_bytes = file.part.name, file.part.layout, file.part.payload_bytes
        self._index_start = int(self.layout)
        self._index = file.payload[self._index_start : self.payload_bytes].clone()
        entries, _ = pickle.loads(self._index.numpy().tobytes())  # noqa: S301 - written by ranks of this job
        self._entries: list[Entry] = []
        self.lacking: Spans = []
        """The bytes of the payload that this rank does not have."""
        for entry in entries:
            if entry.span.size and _has_item(state, entry, is_own=is_own):
                self._entries.append(entry)
            elif entry.span.size:
                self.lacking.append((entry.span.start, entry.span.end))
        self._names = [entry.item.index.fqn for entry in self._entries]
        self._is_divided = any(_is_divided(state[name]) for name in self._names)
        self._views: dict[SnapshotFile, list[torch.Tensor]] = {}

    @property
    def spans(self) -> Spans | None:
        """The bytes that another rank sends; None for all, which needs no copy of them."""
        return self.lacking if self._entries else None

    @torch.no_grad()
    def copy_to(self, file: SnapshotFile, state: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors of this rank, and the index, to a file."""
        views = self._views.get(file)
        if views is None:
            file.payload[self._index_start : self.payload_bytes] = self._index
            views = [entry.tensor(file.payload[entry.span.start :]) for entry in self._entries]
            self._views[file] = views
        if views:
            tensors = [state[name] for name in self._names]
            torch._foreach_copy_(views, [*map(_to_local, tensors)] if self._is_divided else tensors)


class RepeatedSave:
    """The layout of a save, which later saves repeat."""

    def __init__(self, session: Session, parts: dict[int, _RepeatedPart], spans: dict[int, Spans | None]) -> None:
        self._session, self._parts, self._spans = session, parts, spans
        self._files: dict[int, SnapshotFile] = {}
        self._problem = ""

    @classmethod
    def of_newest_save(cls, session: Session, state: Mapping[str, torch.Tensor]) -> RepeatedSave | None:
        """Return the layout of the newest save, which has this state; None if it cannot be repeated. Collective."""
        parts = {
            rank: _RepeatedPart(file, state, is_own=rank == session.rank) for rank, file in session.newest_files.items()
        }
        is_complete = session.rank in parts and not parts[session.rank].lacking
        spans = {rank: part.spans for rank, part in parts.items() if rank != session.rank}
        rank_spans = session.all_gather(spans if is_complete else None)
        if None in rank_spans:
            return None
        if session.copy_target is not None:
            spans[session.rank] = rank_spans[session.copy_target][session.rank]
        return cls(session, parts, spans)

    def stage(self, state: Mapping[str, torch.Tensor]) -> Staged:
        """Copy the state to the files of the next save, in the training thread."""
        self._session.remove_leftovers()
        sizes = {rank: part.payload_bytes for rank, part in self._parts.items()}
        try:
            self._files = self._session.reserve(sizes)
        except OSError as error:
            self._problem = describe_no_space(self._session, error, list(sizes.values()))
            return Staged.NO_SPACE
        for rank, part in self._parts.items():
            part.copy_to(self._files[rank], state)
        return Staged.REPEATED

    def write(self, step: int, staged: list[int]) -> bool:
        """Write the staged save of a step, and return whether it is kept. Collective. `staged`: of each rank."""
        session, part = self._session, self._parts[self._session.rank]
        if Staged.NO_SPACE in staged:
            return commit(session, self._files, None, Outcome.NO_SPACE, problem=self._problem)
        version = Version(step, trainium_worker.generation, session.id, str(session.world_size))
        written = self._files[session.rank].finish(Part(version, part.name, part.layout, part.payload_bytes))
        return commit(session, self._files, written, Outcome.OK, spans=self._spans)

    def discard(self) -> None:
        """Discard the staged save."""
        for file in self._files.values():
            file.invalidate()


def _has_item(state: Mapping[str, torch.Tensor], entry: Entry, *, is_own: bool) -> bool:
    """Return whether an item is a tensor of this rank's state; of another rank's part, only if it is not divided."""
    data, tensor = entry.item.tensor_data, state.get(entry.item.index.fqn)
    if data is None or tensor is None or tensor.dtype != data.properties.dtype:
        return False
    sizes = (data.chunk.sizes,) if is_own else (data.chunk.sizes, data.size, tensor.shape)
    return all(size == _to_local(tensor).shape for size in sizes)


def _to_local(tensor: Any) -> torch.Tensor:
    """Return the part of a tensor that this rank has."""
    local: torch.Tensor = tensor.to_local() if _is_divided(tensor) else tensor
    return local


def _is_divided(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    return hasattr(tensor, "to_local")
