"""Train on text while it is tokenized: the rank's side of `lanes`, and notes of the tokens in each block.

The notes are beside the checkpoints, so that a resume need not count again. Each data-parallel rank appends to its
file, and all ranks read all of them.

Guarantees:
- The samples are the same for any number of processes.
- An error in a process is raised by the step that needs its rows, with its traceback.
- The notes are only a memory of a pure function: any of them may be lost, torn, doubled or from another size of the
  job.
- A record that is not whole is not believed.
- Nothing is written once they are closed, whichever thread closes them.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trainium_trainer.data.batches.broadcast import BatchGroup, BatchSender, Receiver
from trainium_trainer.data.batches.loader import BatchMaker, Loader, Passes, RankBatch, SampleMaker, Share
from trainium_trainer.data.batches.samples import TextSample
from trainium_trainer.data.online.lanes import BlockTokens, Rows, install_lanes, rows_of
from trainium_trainer.data.online.streams import Streams
from trainium_trainer.data.sources.documents import refuse_skipped, refuse_skipped_share
from trainium_trainer.data.workers.pool import Workers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from trainium_trainer.data.opening import Data


_log = logging.getLogger("trainium.data")
_RECORD = np.dtype([("source", "<u4"), ("block", "<u4"), ("count", "<u4"), ("check", "<u4")])
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)


class BlockCounts:
    """The notes of one run's data."""

    def __init__(self, folder: Path | None, identity: str, rank: int | None) -> None:
        """`rank` is None for a process that only reads; without a folder nothing is remembered."""
        self._folder = folder
        self._prefix = f"blocks-{identity[:16]}-"
        self._lock = threading.Lock()
        """A run closes them while the thread that prepares batches writes, and a number is soon another file's."""
        self._descriptor: int | None = None
        if folder is not None and rank is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / f"{self._prefix}{rank}.idx"
                self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                os.ftruncate(
                    self._descriptor, os.fstat(self._descriptor).st_size // _RECORD.itemsize * _RECORD.itemsize
                )
            except OSError as error:
                _log.warning("%s: block counts are not remembered (%s)", folder, error.strerror)

    def known(self, sources: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Blocks and their counts, for each source."""
        parts = [_read(path) for path in self._folder.glob(f"{self._prefix}*.idx")] if self._folder else []
        records = np.concatenate(parts) if parts else np.empty(0, _RECORD)
        return [
            (records["block"][chosen], records["count"][chosen])
            for chosen in (records["source"] == source for source in range(sources))
        ]

    def add(self, counts: Sequence[tuple[int, int, int]]) -> None:
        """Remember source, block and count; a store that does not take them is not asked twice."""
        if not counts:
            return
        records = np.zeros(len(counts), _RECORD)
        for name, column in zip(("source", "block", "count"), zip(*counts, strict=True), strict=True):
            records[name] = column
        records["check"] = _check(records)
        with self._lock:
            if self._descriptor is None:
                return
            try:
                os.write(self._descriptor, records.tobytes())
            except OSError as error:
                _log.warning("block counts are not remembered any more (%s)", error.strerror)
                self._close()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _read(path: Path) -> NDArray[Any]:
    try:
        data = path.read_bytes()
    except OSError:
        return np.empty(0, _RECORD)
    records = np.frombuffer(data[: len(data) // _RECORD.itemsize * _RECORD.itemsize], _RECORD)
    whole: NDArray[Any] = records[records["check"] == _check(records)]
    return whole


def _check(records: NDArray[Any]) -> NDArray[np.uint32]:
    mixed = np.zeros(len(records), np.uint64)
    for name, factor in zip(("source", "block", "count"), _FACTORS, strict=True):
        mixed += (records[name].astype(np.uint64) + 1) * np.uint64(factor)
    return (mixed & np.uint64(0xFFFFFFFF)).astype(np.uint32)


_CALLS_AHEAD = 2


@dataclass(slots=True)
class _Tally:
    """Numbers of what this rank has read of a source."""

    blocks: int = 0
    records: int = 0
    skipped: int = 0
    first: str = ""
    """About the first record that was skipped."""


class StreamMaker:
    """Batches of one rank's lanes, by its processes."""

    def __init__(self, streams: Streams, share: Share, counts: BlockCounts) -> None:
        assert share.global_size == streams.plan.lanes, "each row of the global batch is a lane"
        self._streams = streams
        self._share = share
        self._passes = Passes(streams.rules, share)
        self._counts = counts
        self._workers: Workers | None = None
        self._asked = 0  # the step that the processes are asked for next
        self._answered = 0
        self._skipped = 0
        self._tallies = [_Tally() for _ in streams.plan.sources]

    def make(self, position: int) -> RankBatch:
        """See `BatchMaker.make`. Raises UserError, StorageError, WorkerError."""
        step, rest = divmod(position, self._share.global_size)
        assert rest == 0, "a run with another global batch is another run"
        workers = self._started()
        if step != self._answered:
            for _ in range(self._answered, self._asked):
                workers.gather()
            self._asked = self._answered = step
        while self._asked < step + _CALLS_AHEAD:
            workers.broadcast(rows_of, self._asked)
            self._asked += 1
        answers: list[Rows] = workers.gather()
        self._answered = step + 1
        for answer in answers:
            self._counts.add(answer.counts)
            self._count_skipped(answer.used)
        rows = [row for answer in answers for row in answer.rows]
        first = position + self._share.offset
        checked = self._streams.rules.checked
        samples = [TextSample(first + number, checked(row, self._streams.name)) for number, row in enumerate(rows)]
        return RankBatch(self._passes.of(samples, first), tuple(sample.number for sample in samples))

    def _started(self) -> Workers:
        if self._workers is None:
            share, plan = self._share, self._streams.plan
            count = min(self._streams.workers, share.size)
            marks = [share.offset + number * share.size // max(1, count) for number in range(count + 1)]
            known = self._counts.known(len(plan.sources))
            self._workers = Workers(count)
            for number, (first, last) in enumerate(itertools.pairwise(marks)):
                self._workers.send(number, install_lanes, plan, range(first, last), known)
            self._workers.gather()
        return self._workers

    def _count_skipped(self, used: Sequence[tuple[int, BlockTokens]]) -> None:
        limit, share = self._streams.max_bad_lines, self._share.size / self._share.global_size
        for number, block in used:
            source, tally = self._streams.plan.sources[number], self._tallies[number]
            tally.blocks += 1
            tally.records += block.records
            if not block.skipped:
                continue
            if not self._skipped:
                _log.warning("data.source %s: skipped", block.skipped[0].sentence())
            tally.first = tally.first or block.skipped[0].sentence()
            tally.skipped += len(block.skipped)
            self._skipped += len(block.skipped)
            refuse_skipped(self._skipped, block.skipped[-1], limit)
            if tally.records:
                expected = tally.records / tally.blocks * source.blocks * share
                refuse_skipped_share(
                    source.spec.name, tally.skipped, tally.records, tally.first, limit, expected=expected
                )

    def close(self) -> None:
        """End the processes."""
        if self._workers is not None:
            self._workers.close()
        self._counts.close()


def open_loader(
    data: Data,
    share: Share,
    *,
    ahead: int = 1,
    notes: Path | None = None,
    writes: bool = True,
    batch_group: BatchGroup | None = None,
) -> Loader:
    """Return a loader of one rank's batches.

    What it learns of streams is remembered in the folder `notes`; of ranks with the same samples one `writes`. Of the
    `batch_group`, who train on the same samples, one makes the batches of streams and hands them to the others.
    """
    training = data.training
    maker: BatchMaker
    if not isinstance(training, Streams):
        maker = SampleMaker(training, share)
    elif batch_group is not None and batch_group.follows:
        maker = Receiver(batch_group)
    else:
        counts = BlockCounts(notes, training.identity, share.dp_rank if writes else None)
        maker = StreamMaker(training, share, counts)
        if batch_group is not None and batch_group.others:
            maker = BatchSender(maker, batch_group)
    return Loader(maker, global_size=share.global_size, ahead=ahead)
