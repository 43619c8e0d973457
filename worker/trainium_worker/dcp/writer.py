"""Save to the memory of the nodes: the storage writer."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

import trainium_worker
from trainium_worker.dcp.commit import Outcome, commit, describe_no_space
from trainium_worker.dcp.parts import lay_out
from trainium_worker.dcp.session import open_session
from trainium_worker.snapshots.files import ALIGNMENT_BYTES, BLOCK_BYTES, Part, Version, round_up

if TYPE_CHECKING:
    import io

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlanner

    from trainium_worker.dcp.parts import Entry, StrPath
    from trainium_worker.snapshots.files import SnapshotFile

_NO_SIZE = -1


class MemoryWriter(StorageWriter, AsyncStager):
    """Keeps the save of one step in the memory of this node and of another one."""

    _synchronize_after_execute = False  # staging is complete when `stage` returns

    def __init__(self, step: int, *, directory: StrPath | None = None) -> None:
        """Create the writer of a step on all ranks, in the training thread.

        directory: a folder in memory that outlives the processes, one for the ranks of a node; unset: the agent's.
        """
        super().__init__()
        self.step = step
        self.session = open_session(directory)

    @property
    def is_enabled(self) -> bool:
        """Whether saves are kept, which is the same on all ranks."""
        return self.session.is_enabled

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state, so that training can change it."""
        session = self.session
        copied: dict[str, Any] = session.copy_state(state_dict, self) if session.is_enabled else state_dict
        return copied

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` is complete when it returns."""

    def close(self) -> None:
        """Do nothing: later saves reuse the memory of the copy."""

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Do nothing: a save has no name."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `write_data` prepares the save."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans unchanged. Raises ValueError if not all ranks save together."""
        ranks = self.session.world_size
        if len(plans) != ranks:
            raise ValueError(
                f"{len(plans)} of {ranks} ranks save together: save to memory with all ranks of the job in one process "
                "group, and with use_collectives=True"
            )
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part and its copies."""
        session = self.session
        try:
            written_bytes = self._write(plan, planner) if session.is_enabled else 0
        finally:
            if session.pending_writer is self:
                session.pending_writer = None
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, written_bytes, None) for item in plan.items[:1]])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: a save is complete when its parts are complete."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:  # noqa: ARG003 - DCP's interface
        """Return False: a save has no name."""
        return False

    def _write(self, plan: SavePlan, planner: SavePlanner) -> int:
        """Write the part and return its bytes; all ranks succeed, fail or run out of space together."""
        session = self.session
        session.remove_leftovers()
        failure: BaseException | None = None
        size, draft, problem = _NO_SIZE, None, ""
        try:
            draft = Draft.from_plan(plan, planner, session.rank)
            size = draft.payload_bytes
        except Exception as error:  # noqa: BLE001 - raised below: the other ranks wait for this one
            failure = error
        sizes = session.all_gather_integers(size)
        outcome, part, files = Outcome.FAILED, None, {}
        if draft is not None and _NO_SIZE not in sizes:
            try:
                files = session.reserve(sizes)
                part = self._write_part(files[session.rank], draft, planner)
                outcome = Outcome.OK
            except OSError as error:
                kept = [sizes[rank] for rank in (session.rank, *session.copy_sources)]
                outcome, problem = Outcome.NO_SPACE, describe_no_space(session, error, kept)
            except Exception as error:  # noqa: BLE001 - as above
                failure = error
        return size if commit(session, files, part, outcome, problem=problem, failure=failure) else 0

    def _write_part(self, file: SnapshotFile, draft: Draft, planner: SavePlanner) -> Part:
        """Copy the state into a file and finish it."""
        session = self.session
        draft.copy_to(file.payload, planner)
        version = Version(self.step, trainium_worker.generation, session.id, str(session.world_size))
        return file.finish(Part(version, str(session.rank), str(draft.index_start), draft.payload_bytes))


@dataclass(frozen=True)
class Draft:
    """A part before it is written to a file."""

    entries: list[Entry]
    serialized: dict[int, io.BytesIO]
    """The items other than tensors, by index."""
    index: bytes

    @staticmethod
    def from_plan(plan: SavePlan, planner: SavePlanner, rank: int) -> Draft:
        """Serialize the items other than tensors, and lay out the payload of a rank."""
        serialized = {
            number: planner.resolve_data(item)
            for number, item in enumerate(plan.items)
            if item.type == WriteItemType.BYTE_IO
        }
        entries = lay_out(plan.items, serialized, rank)  # type: ignore[arg-type]
        return Draft(entries, serialized, pickle.dumps((entries, plan.planner_data)))  # type: ignore[arg-type]

    @property
    def index_start(self) -> int:
        """The offset of the index."""
        return round_up(self.entries[-1].span.end, ALIGNMENT_BYTES) if self.entries else 0

    @property
    def payload_bytes(self) -> int:
        """The size of the payload, a multiple of the checksum's block."""
        return round_up(self.index_start + len(self.index), BLOCK_BYTES)

    @torch.no_grad()
    def copy_to(self, payload: torch.Tensor, planner: SavePlanner) -> None:
        """Copy the state and the index; zero the bytes after the index, so that equal states have equal checksums."""
        targets, sources = [], []
        for number, entry in enumerate(self.entries):
            if number in self.serialized:
                _copy_bytes(payload, entry.span.start, self.serialized[number].getbuffer())
            elif entry.span.size:
                tensor = planner.resolve_data(entry.item)
                assert isinstance(tensor, torch.Tensor), "items of tensors resolve to tensors"
                targets.append(entry.tensor(payload[entry.span.start :]))
                sources.append(tensor.detach())
        if targets:
            torch._foreach_copy_(targets, sources)
        end = self.index_start + len(self.index)
        _copy_bytes(payload, self.index_start, self.index)
        payload[end : self.payload_bytes].zero_()


def _copy_bytes(payload: torch.Tensor, start: int, data: bytes | memoryview) -> None:
    if len(data):
        payload[start : start + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
