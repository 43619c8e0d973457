"""Repeat the save of a state whose tensors have the names, shapes and types of the last save, without a plan.

The files of the last save have the layout. Tensors are copied into the files of the next one, which is the only copy.
Where a rank keeps the copy of a part whose tensors it has too, as with DDP, it copies its own; only the rest is sent.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import torch

import trainium_worker
from trainium_worker.dcp.commit import Outcome, conclude, describe_no_space, replicate, unite
from trainium_worker.dcp.session import TAG
from trainium_worker.snapshots.copies import transfer
from trainium_worker.snapshots.files import HEADER_BYTES, DamagedSnapshotError, Part, Version

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_worker.dcp.parts import Entry
    from trainium_worker.dcp.session import Session
    from trainium_worker.snapshots.files import SnapshotFile

    Layout = list[tuple[str, torch.Size, torch.dtype]]
    Spans = list[tuple[int, int]]
    """Starts and ends of bytes of a payload."""


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

    def complete(self, file: SnapshotFile, message: torch.Tensor) -> bool:
        """Complete a copy of the part with what its rank sent; return whether it is intact."""
        page, lacking = message.tensor_split([HEADER_BYTES])
        part = Part.from_page(page.numpy().tobytes(), f"from rank {self.name}")
        if part is None or (part.name, part.layout, part.payload_bytes) != (self.name, self.layout, self.payload_bytes):
            return False
        targets = [file.payload[start:end] for start, end in self.lacking]
        if targets:
            torch._foreach_copy_(targets, torch.split(lacking, [*map(len, targets)]))
        return file.finish_received(part)

    @property
    def has_tensors(self) -> bool:
        """Whether this rank has some of its tensors."""
        return bool(self._entries)


class RepeatedSave:
    """The layout of a save, which later saves repeat."""

    def __init__(self, session: Session, parts: dict[int, _RepeatedPart], sent: Spans | None) -> None:
        """`sent`: the bytes of this rank's part that the rank with its copy lacks; None if it needs the whole part."""
        self._session, self._parts, self._sent = session, parts, sent or []
        self._whole = {rank for rank in session.copy_sources if not parts[rank].has_tensors}
        """The ranks whose parts this rank sends or receives as a whole."""
        if session.copy_target is not None and sent is None:
            self._whole.add(session.rank)
        self._files: dict[int, SnapshotFile] = {}
        """The files of the save that this rank has staged."""
        self._differing: list[int] = []
        self._problem = ""

    @classmethod
    def of_newest_save(cls, session: Session, state: Mapping[str, torch.Tensor]) -> RepeatedSave | None:
        """Return the layout of the newest save, which has this state; None if it cannot be repeated. Collective."""
        parts = {
            rank: _RepeatedPart(file, state, is_own=rank == session.rank) for rank, file in session.newest_files.items()
        }
        is_complete = session.rank in parts and not parts[session.rank].lacking
        lacking = {rank: part.lacking if part.has_tensors else None for rank, part in parts.items()}
        lacking_by_rank = session.all_gather(lacking if is_complete else None)
        if None in lacking_by_rank:
            return None
        target = session.copy_target
        return cls(session, parts, None if target is None else lacking_by_rank[target][session.rank])

    def stage(self, state: Mapping[str, torch.Tensor]) -> Outcome:
        """Copy the state to the files of the next save, in the training thread."""
        self._session.remove_leftovers()
        sizes = {rank: part.payload_bytes for rank, part in self._parts.items()}
        try:
            self._files = self._session.reserve(sizes)
        except OSError as error:
            self._problem = describe_no_space(self._session, error, list(sizes.values()))
            return Outcome.NO_SPACE
        for rank, part in self._parts.items():
            if rank == self._session.rank or rank not in self._whole:
                part.copy_to(self._files[rank], state)
        return Outcome.OK

    def write(self, step: int, outcome: int) -> list[int]:
        """Write the save of a step, and return the outcomes of all ranks. Collective.

        outcome: that of `stage`, with LAST if the state will change its layout; PLAN if it has changed. If it has on
        some ranks, the save is discarded. Raises as `conclude`.
        """
        session, files, self._files = self._session, self._files, {}
        part: Part | None = None
        failure: BaseException | None = None
        try:
            if files:
                version = Version(step, trainium_worker.generation, session.id, str(session.world_size))
                own = self._parts[session.rank]
                part = files[session.rank].finish(Part(version, own.name, own.layout, own.payload_bytes))
            outcome |= self._exchange(files)
        except (RuntimeError, DamagedSnapshotError) as error:
            outcome, failure = Outcome.FAILED, error
        outcomes = session.all_gather_integers(outcome)
        common = unite(outcomes)
        if common & Outcome.PLAN:
            for file in files.values():
                file.invalidate()
            return outcomes
        is_written = not common & (Outcome.FAILED | Outcome.NO_SPACE)
        if is_written and common & Outcome.DIFFERENT:
            differing = set().union(*session.all_gather(self._differing))
            self._whole |= differing & self._parts.keys()
        if is_written and part is not None and common & (Outcome.WHOLE | Outcome.DIFFERENT):
            common, failure = replicate(session, files, part, self._whole)
        conclude(session, files, part, common, problem=self._problem, failure=failure)
        return outcomes

    def _exchange(self, files: Mapping[int, SnapshotFile]) -> int:
        """Exchange what other ranks lack to complete their copies; return what is not complete. Collective.

        A rank that has staged nothing takes part in it, because the others do not know that.
        """
        session, group = self._session, self._session.group
        if group is None:
            return Outcome.OK
        sends, received = [], {}
        if session.copy_target is not None and session.rank not in self._whole:
            message = torch.zeros(HEADER_BYTES + _count_bytes(self._sent), dtype=torch.uint8)
            if files:
                own = files[session.rank]
                torch.cat([own.page, *(own.payload[start:end] for start, end in self._sent)], out=message)
            sends.append((session.copy_target, message))
        for source in session.copy_sources:
            if source not in self._whole:
                size = HEADER_BYTES + _count_bytes(self._parts[source].lacking)
                received[source] = torch.empty(size, dtype=torch.uint8)
        transfer(group, TAG, sends=sends, into=received.items())
        if not files:
            return Outcome.OK
        self._differing = [
            source for source, message in received.items() if not self._parts[source].complete(files[source], message)
        ]
        return (Outcome.DIFFERENT if self._differing else 0) | (Outcome.WHOLE if self._whole else 0)


def _count_bytes(spans: Spans) -> int:
    return sum(end - start for start, end in spans)


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
