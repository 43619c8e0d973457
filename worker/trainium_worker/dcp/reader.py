"""Load from the memory of the nodes, or from storage: the storage reader."""

from __future__ import annotations

import io
import logging
import pickle
import re
from collections import ChainMap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType, SavePlan
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

import trainium_worker
from trainium_worker.dcp.parts import newest_complete
from trainium_worker.dcp.session import TAG, open_session
from trainium_worker.snapshots.copies import transfer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

    from trainium_worker.dcp.parts import Entry, Span, StrPath
    from trainium_worker.snapshots.files import Part
    from trainium_worker.snapshots.store import SnapshotStore

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
        self.session = session = open_session(directory)
        self._payloads = session.resumed_payloads
        self._stores: dict[int, str] = {}
        """The store from which each part is read, by the part's rank."""
        self._entries: dict[Any, Entry] = {}
        """The items of the save, by their index."""
        durable_step, folder = self._find_durable(durable) or (-1, None)
        parts = self._choose_parts(durable_step)
        self.step: int | None = None
        """The step of the save; None if there is none."""
        self.source: str = ""
        """`memory`, or the folder of the checkpoint."""
        self._durable: FileSystemReader | None = None
        self._metadata: Metadata | None = None
        if parts:
            self.step, self.source = parts[0].version.step, trainium_worker.MEMORY
            session.resumed = parts[0].version
            self._metadata = self._gather_metadata(parts)
        elif folder is not None:
            self.step, self.source = durable_step, str(folder)
            self._durable = FileSystemReader(folder)

    # ---- choice of the save ------------------------------------------------------------------------------------------

    def _find_durable(self, folders: StrPath | None) -> tuple[int, Path] | None:
        """Return step and folder of the newest checkpoint found by rank 0. Raises its OSError on all ranks."""
        newest: tuple[int, Path] | OSError | None = None
        if folders is not None:
            pattern = _compile_folder_pattern(Path(folders))
            try:
                newest = find_durable(Path(folders), pattern) if self.session.rank == 0 else None
            except OSError as error:
                newest = error
        newest = self.session.all_gather(newest)[0]
        if isinstance(newest, OSError):
            raise newest
        return newest

    def _choose_parts(self, durable_step: int) -> tuple[Part, ...]:
        """Return the parts of the newest save whose parts all verify, unless storage has a newer step. Collective."""
        session = self.session
        if not session.is_enabled or session.snapshots is None:
            return ()
        files = {part: path for path, part in session.snapshots.parts().items()}
        stores_by_part: dict[Part, set[str]] = {}
        for rank, parts in enumerate(session.all_gather(list(files) if session.store_ranks[0] == session.rank else [])):
            for part in parts:
                stores_by_part.setdefault(part, set()).add(session.stores[rank])
        while True:
            chosen = newest_complete(part for part, stores in stores_by_part.items() if stores)
            if not chosen or chosen[0].version.step < durable_step:
                return ()
            local_parts = [part for part in chosen if session.store in stores_by_part[part]]
            damaged_parts = session.all_gather(self._verify(session.snapshots, local_parts, files))
            if not any(damaged_parts):
                self._stores = {rank: min(stores_by_part[part]) for rank, part in enumerate(chosen)}
                return chosen
            for rank, parts in enumerate(damaged_parts):
                for part in parts:
                    stores_by_part[part].discard(session.stores[rank])

    def _verify(self, store: SnapshotStore, parts: Sequence[Part], files: dict[Part, Path]) -> list[Part]:
        """Map the parts in this node's store and return damaged ones; the ranks of the node divide the checksums."""
        session, damaged = self.session, []
        self._payloads.clear()
        for number, part in enumerate(parts):
            verifies = session.store_ranks[number % len(session.store_ranks)] == session.rank
            payload = store.open(files[part], part, verifies=verifies) if part in files else None
            if payload is None:
                damaged.append(part)
            else:
                self._payloads[int(part.name)] = payload
        return damaged

    def _gather_metadata(self, parts: Sequence[Part]) -> Metadata:
        """Return the description of the save from the indexes of its parts, each of which one rank has. Collective."""
        session = self.session
        own_indexes = {
            rank: self._payloads[rank][int(part.layout) :].numpy().tobytes()
            for rank, part in enumerate(parts)
            if self._select_sender(rank, 0) == session.rank
        }
        indexes = ChainMap(*session.all_gather(own_indexes))
        plans = []
        for rank in range(len(parts)):
            entries, planner_data = pickle.loads(indexes[rank])  # noqa: S301 - written by ranks of this job
            self._entries.update({entry.item.index: entry for entry in entries})
            plans.append(SavePlan([entry.item for entry in entries], planner_data=planner_data))
        _, metadata = create_default_global_save_plan(plans, rewrite_index_hints=False)
        mappings = [plan.planner_data for plan in plans if plan.planner_data is not None]
        return replace(metadata, planner_data=dict(ChainMap(*mappings)) if mappings else None)

    def _select_sender(self, part: int, requester: int) -> int:
        """Return the rank that sends a part to `requester`: the ranks of a node that has it take turns."""
        ranks = [rank for rank, store in enumerate(self.session.stores) if store == self._stores[part]]
        return ranks[(part + requester) % len(ranks)]

    # ---- interface of DCP --------------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Do nothing: the save was selected when the reader was created."""

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
            entry = self._entries[read.storage_index]
            payload = fetched.get(entry.span)
            if payload is None:
                payload = self._payloads[entry.span.rank][entry.span.start :]
            self._load(read, entry, payload, planner)
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
            planner.load_bytes(read, io.BytesIO(payload[: entry.span.size].numpy().tobytes()))
            return
        source = entry.tensor(payload)
        for dimension, (offset, length) in enumerate(zip(read.storage_offsets, read.lengths)):
            source = source.narrow(dimension, offset, length)
        target = planner.resolve_tensor(read).detach()
        target.copy_(source)
        planner.commit_tensor(read, target)

    def _fetch(self, plan: LoadPlan) -> dict[Span, torch.Tensor]:
        """Return the items that this node's store lacks, from ranks of other nodes. Collective."""
        session = self.session
        missing: dict[int, list[Span]] = {}
        for span in dict.fromkeys(self._entries[read.storage_index].span for read in plan.items):
            if span.rank not in self._payloads:
                missing.setdefault(self._select_sender(span.rank, session.rank), []).append(span)
        requests_by_rank = session.all_gather(missing)
        if session.group is None:
            return {}
        fetched: dict[Span, torch.Tensor] = {}
        into: list[tuple[int, torch.Tensor]] = []
        for sender, spans in missing.items():
            buffer = torch.empty(sum(span.aligned_size for span in spans), dtype=torch.uint8)
            into.append((sender, buffer))
            fetched.update(zip(spans, torch.split(buffer, [span.aligned_size for span in spans])))
        sends = (
            (requester, self._concatenate(spans))
            for requester, requests in enumerate(requests_by_rank)
            if (spans := requests.get(session.rank))
        )
        transfer(session.group, TAG, sends=sends, into=into)
        return fetched

    def _concatenate(self, spans: Iterable[Span]) -> torch.Tensor:
        """Return items of this node's parts, each with the bytes up to the next one."""
        return torch.cat([self._payloads[span.rank][span.start :][: span.aligned_size] for span in spans])


def _compile_folder_pattern(template: Path) -> re.Pattern[str]:
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
