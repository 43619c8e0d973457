"""Load from the memory of the nodes, or from storage: the storage reader."""

from __future__ import annotations

import io
import logging
import pickle
import re
from collections import ChainMap
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType, SavePlan
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

import trainium_worker
from trainium_worker import snapshot
from trainium_worker.dcp.parts import ALIGNMENT, newest_complete, read_parts, round_up
from trainium_worker.dcp.session import TAG, session_of
from trainium_worker.snapshot import DamagedSnapshotError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

    from trainium_worker.dcp.parts import Entry, Part, StrPath

_log = logging.getLogger(__name__)

_STEP_FIELD = "{step}"


class MemoryReader(StorageReader):
    """Reads the newest save that all ranks can read: from memory, of this node or another one, or from storage."""

    def __init__(self, durable: StrPath | None = None, *, directory: StrPath | None = None) -> None:
        """Find the save. Collective: create it on all ranks, after `init_process_group`.

        durable: folders of DCP checkpoints, with {step} in their name, for instance /checkpoints/run/step-{step}.
        directory: as for `MemoryWriter`.
        """
        super().__init__()
        self._session = session = session_of(directory)
        self._payloads = session.resumed_payloads
        self._holders: dict[int, list[str]] = {}
        self._entries: dict[Any, tuple[int, Entry]] = {}
        """The rank and entry of each item of the save."""
        stored = self._find_durable(durable)
        parts = self._agree(-1 if stored is None else stored[0])
        self.step: int | None = None
        """The step of the save; None if there is none."""
        self.source: str = ""
        """`memory`, or the folder of the checkpoint."""
        self._durable: FileSystemReader | None = None
        self._metadata: Metadata | None = None
        if parts:
            self.step, self.source = parts[0].step, trainium_worker.MEMORY
            session.resumed = parts[0].save
            self._metadata = self._gather_metadata(parts)
        elif stored is not None:
            self.step, self.source = stored[0], str(stored[1])
            self._durable = FileSystemReader(stored[1])

    # ---- which save -------------------------------------------------------------------------------------------------

    def _find_durable(self, folders: StrPath | None) -> tuple[int, Path] | None:
        """Return step and folder of the newest checkpoint found by rank 0. Raises its OSError on all ranks."""
        newest: tuple[int, Path] | OSError | None = None
        pattern = None if folders is None else _pattern_of(Path(folders))
        if folders is not None and pattern is not None and self._session.rank == 0:
            try:
                newest = find_durable(Path(folders), pattern)
            except OSError as error:
                newest = error
        newest = self._session.gather(newest)[0]
        if isinstance(newest, OSError):
            raise newest
        return newest

    def _agree(self, durable_step: int) -> tuple[Part, ...]:
        """Return the parts of the newest save whose parts all verify, unless storage has a newer step."""
        session = self._session
        if not session.keeps or session.directory is None:
            return ()
        files = {part: path for path, part in read_parts(session.directory).items()}
        own_parts = set(files) if session.neighbours[0] == session.rank else set()
        held_parts: set[tuple[str, Part]] = {
            (session.stores[rank], part) for rank, parts in enumerate(session.gather(own_parts)) for part in parts
        }
        while True:
            chosen = newest_complete(part for _, part in held_parts)
            if not chosen or chosen[0].step < durable_step:
                return ()
            local_parts = [part for part in chosen if (session.stores[session.rank], part) in held_parts]
            damaged = {bad for rank_damaged in session.gather(self._verify(local_parts, files)) for bad in rank_damaged}
            if not damaged:
                self._holders = {
                    part.rank: sorted({store for store, each in held_parts if each == part}) for part in chosen
                }
                return chosen
            held_parts -= damaged

    def _verify(self, parts: Sequence[Part], files: dict[Part, Path]) -> set[tuple[str, Part]]:
        """Map the parts in this node's store and return damaged ones; the ranks of the node divide the checksums."""
        session, damaged = self._session, set()
        self._payloads.clear()
        for number, part in enumerate(parts):
            is_own_share = session.neighbours[number % len(session.neighbours)] == session.rank
            try:
                self._payloads[part.rank] = snapshot.open_payload(
                    files[part], part.payload_bytes, part.checksum if is_own_share else None
                )
            except (DamagedSnapshotError, OSError, KeyError) as error:
                damaged.add((session.stores[session.rank], part))
                _log.warning("a snapshot in memory is not used: %s", error)
        return damaged

    def _gather_metadata(self, parts: Sequence[Part]) -> Metadata:
        """Return the description of the save from the indexes of its parts, each of which one rank has. Collective."""
        session = self._session
        own_indexes = {
            part.rank: self._payloads[part.rank][part.index_start :].numpy().tobytes()
            for part in parts
            if self._server_of(part.rank, 0) == session.rank
        }
        indexes = {rank: text for rank_texts in session.gather(own_indexes) for rank, text in rank_texts.items()}
        plans = []
        for part in parts:
            entries, planner_data = pickle.loads(indexes[part.rank])  # noqa: S301 - written by ranks of this job
            self._entries.update({entry.item.index: (part.rank, entry) for entry in entries})
            plans.append(SavePlan([entry.item for entry in entries], planner_data=planner_data))
        _, metadata = create_default_global_save_plan(plans, rewrite_index_hints=False)
        mappings = [plan.planner_data for plan in plans if plan.planner_data is not None]
        return replace(metadata, planner_data=dict(ChainMap(*mappings)) if mappings else None)

    def _server_of(self, part: int, requester: int) -> int:
        """Return the rank that sends a part to `requester`: the ranks of a node that has it take turns."""
        store = self._holders[part][0]
        ranks = [rank for rank, each in enumerate(self._session.stores) if each == store]
        return ranks[(part + requester) % len(ranks)]

    # ---- what DCP calls ---------------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Begin a load; a name of a checkpoint is not used."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the description of the save."""
        if self._durable is not None:
            return self._durable.read_metadata(*args, **kwargs)
        if self._metadata is None:
            raise ValueError("no save was found in memory or on storage: load only if the reader's step is not None")
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a load on this rank."""
        if self._durable is not None:
            self._durable.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the state from this node's parts and from those that other nodes send. Collective."""
        if self._durable is not None:
            return self._durable.read_data(plan, planner)
        fetched = self._fetch(plan)
        for read in plan.items:
            rank, entry = self._entries[read.storage_index]
            payload = fetched.get((rank, entry.start, entry.end))
            self._load(read, entry, self._payloads[rank][entry.start :] if payload is None else payload, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:  # noqa: ARG003 - DCP's interface
        """Return False: a save has no name."""
        return False

    @staticmethod
    def _load(read: ReadItem, entry: Entry, payload: torch.Tensor, planner: LoadPlanner) -> None:
        if read.type == LoadItemType.BYTE_IO:
            planner.load_bytes(read, io.BytesIO(payload[: entry.end - entry.start].numpy().tobytes()))
            return
        source = entry.tensor(payload)
        for dimension, (offset, length) in enumerate(zip(read.storage_offsets, read.lengths)):
            source = source.narrow(dimension, offset, length)
        target = planner.resolve_tensor(read).detach()
        target.copy_(source)
        planner.commit_tensor(read, target)

    def _fetch(self, plan: LoadPlan) -> dict[tuple[int, int, int], torch.Tensor]:
        """Return the entries that this node's store lacks, from ranks of other nodes. Collective."""
        session = self._session
        wanted: dict[int, dict[tuple[int, int, int], None]] = {}
        for read in plan.items:
            rank, entry = self._entries[read.storage_index]
            if rank not in self._payloads:
                wanted.setdefault(self._server_of(rank, session.rank), {})[(rank, entry.start, entry.end)] = None
        requests_by_rank = session.gather({server: list(places) for server, places in wanted.items()})
        if session.group is None:
            return {}
        transfers, receive_buffers = [], {}
        for server, places in wanted.items():
            receive_buffers[server] = torch.empty(sum(_aligned(place) for place in places), dtype=torch.uint8)
            transfers.append(partial(dist.irecv, receive_buffers[server], server))
        for requester, requests in enumerate(requests_by_rank):
            if places := requests.get(session.rank):
                transfers.append(partial(dist.isend, self._collect(places), requester))
        works = [transfer(group=session.group, tag=TAG) for transfer in transfers]
        for work in works:
            snapshot.wait_for(work)
        entries = {}
        for server, places in wanted.items():
            at = 0
            for place in places:
                entries[place] = receive_buffers[server][at:]
                at += _aligned(place)
        return entries

    def _collect(self, places: Iterable[tuple[int, int, int]]) -> torch.Tensor:
        """Concatenate entries of this node's parts."""
        return torch.cat([self._payloads[place[0]][place[1] : place[1] + _aligned(place)] for place in places])


def _aligned(place: tuple[int, int, int]) -> int:
    """Return the bytes of an entry up to the next one, so that every entry is aligned for its type."""
    return round_up(place[2] - place[1], ALIGNMENT)


def _pattern_of(template: Path) -> re.Pattern[str]:
    """Return the pattern of the folders of a template. Raises ValueError if {step} is not in its last part. Pure."""
    if template.name.count(_STEP_FIELD) != 1:
        raise ValueError(
            f"durable={str(template)!r} must name the folders of checkpoints with {_STEP_FIELD} in the last part, for "
            f"instance /checkpoints/run/step-{_STEP_FIELD}"
        )
    prefix, _, suffix = template.name.partition(_STEP_FIELD)
    return re.compile(f"{re.escape(prefix)}([0-9]+){re.escape(suffix)}")


def find_durable(template: Path, pattern: re.Pattern[str]) -> tuple[int, Path] | None:
    """Return step and folder of the newest complete DCP checkpoint."""
    checkpoints = []
    for path in template.parent.glob("*"):
        match = pattern.fullmatch(path.name)
        if match is not None and (path / ".metadata").is_file():
            checkpoints.append((int(match[1]), path))
    return max(checkpoints, default=None)
