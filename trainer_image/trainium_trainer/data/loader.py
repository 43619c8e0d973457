"""Prepare the batches of one rank ahead of the step, also from text that is tokenized during training.

Guarantees:
- The samples do not depend on the number of processes.
- The step that needs the rows of a process raises its errors, with the traceback.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_trainer.data.batches.broadcast import BatchGroup, BatchReceiver, BatchSender
from trainium_trainer.data.batches.micro_batches import BatchBuilder, MicroBatchBuilder, RankBatch, Share
from trainium_trainer.data.batches.samples import Samples, TextSample
from trainium_trainer.data.online.lanes import BlockTokens, LaneSamples, initialize_lanes, read_lane_samples
from trainium_trainer.data.online.streams import BlockCounts, Streams
from trainium_trainer.data.sources.documents import refuse_skipped, refuse_skipped_share
from trainium_trainer.data.workers.pool import Workers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trainium_trainer.data.dataset import Dataset

_log = logging.getLogger("trainium.data")


class Loader:
    """Endless batches of one data-parallel rank; the next ones are prepared in the background."""

    def __init__(self, builder: BatchBuilder, *, global_size: int, ahead: int = 1) -> None:
        self._builder = builder
        self._global = global_size
        self._ahead = ahead
        self._thread: ThreadPoolExecutor | None = None
        self._ready: deque[tuple[int, Future[RankBatch]]] = deque()

    def batch_at(self, position: int) -> RankBatch:
        """Return this rank's share of the step that starts at global sample `position`. Raises UserError."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader")
        if not self._ready or self._ready[0][0] != position:
            for _, waiting in self._ready:
                waiting.cancel()
            self._ready.clear()
            self._ready.append((position, self._thread.submit(self._builder.build, position)))
        _, batch = self._ready.popleft()
        while len(self._ready) < self._ahead:
            following = (self._ready[-1][0] if self._ready else position) + self._global
            self._ready.append((following, self._thread.submit(self._builder.build, following)))
        return batch.result()

    def close(self) -> None:
        """Stop the background thread and close the builder."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._builder.close()  # wakes a thread that waits for the builder
            self._thread.shutdown(wait=True)
        self._builder.close()  # the thread may have started work after the first call


class SampleBatchBuilder:
    """Prepares batches from tokens that exist before training."""

    def __init__(self, samples: Samples, share: Share) -> None:
        self._samples = samples
        self._share = share
        self._micro_batches = MicroBatchBuilder(samples.rules, share)

    def build(self, position: int) -> RankBatch:
        """Read the samples. Raises UserError."""
        mine = self._share.at(position)
        samples = self._samples.at(mine.start, len(mine))
        return RankBatch(
            self._micro_batches.build(samples, mine.start),
            tuple(sample.number for sample in samples if sample is not None),
        )

    def close(self) -> None:
        """Do nothing."""


_CALLS_AHEAD = 2


@dataclass(slots=True)
class _Tally:
    """The counts of this rank's reads of a source."""

    blocks: int = 0
    records: int = 0
    skipped: int = 0
    first: str = ""
    """The message about the first skipped record."""


class StreamBatchBuilder:
    """Prepares batches of one rank's lanes with worker processes."""

    def __init__(self, streams: Streams, share: Share, counts: BlockCounts) -> None:
        assert share.global_size == streams.plan.lanes, "each row of the global batch is a lane"
        self._streams = streams
        self._share = share
        self._micro_batches = MicroBatchBuilder(streams.rules, share)
        self._counts = counts
        self._workers: Workers | None = None
        self._requested = 0  # the next step to request from the processes
        self._received = 0
        self._skipped = 0
        self._tallies = [_Tally() for _ in streams.plan.sources]

    def build(self, position: int) -> RankBatch:
        """See `BatchBuilder.build`. Raises UserError, StorageError, WorkerError."""
        step, rest = divmod(position, self._share.global_size)
        assert rest == 0, "a run with another global batch is another run"
        workers = self._start_workers()
        if step != self._received:
            for _ in range(self._received, self._requested):
                workers.gather()
            self._requested = self._received = step
        while self._requested < step + _CALLS_AHEAD:
            workers.broadcast(read_lane_samples, self._requested)
            self._requested += 1
        results: list[LaneSamples] = workers.gather()
        self._received = step + 1
        for result in results:
            self._counts.add(result.counts)
            self._count_skipped(result.used)
        rows = [row for result in results for row in result.rows]
        first = position + self._share.offset
        check_tokens = self._streams.rules.check_tokens
        samples = [TextSample(first + number, check_tokens(row, self._streams.name)) for number, row in enumerate(rows)]
        return RankBatch(self._micro_batches.build(samples, first), tuple(sample.number for sample in samples))

    def _start_workers(self) -> Workers:
        if self._workers is None:
            share, plan = self._share, self._streams.plan
            count = min(self._streams.workers, share.size)
            marks = [share.offset + number * share.size // max(1, count) for number in range(count + 1)]
            known = self._counts.known(len(plan.sources))
            self._workers = Workers(count)
            for number, (first, last) in enumerate(itertools.pairwise(marks)):
                self._workers.send(number, initialize_lanes, plan, range(first, last), known)
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
                _log.warning("data.source %s: skipped", block.skipped[0].message())
            tally.first = tally.first or block.skipped[0].message()
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
    data: Dataset,
    share: Share,
    *,
    ahead: int = 1,
    counts_folder: Path | None = None,
    writes: bool = True,
    batch_group: BatchGroup | None = None,
) -> Loader:
    """Return a loader of one rank's batches.

    The block counts of streams are recorded in `counts_folder`; one of the ranks with the same samples `writes` them.
    One rank of the `batch_group`, which trains on the same samples, prepares the batches of streams and sends them to
    the others.
    """
    training = data.training
    builder: BatchBuilder
    if not isinstance(training, Streams):
        builder = SampleBatchBuilder(training, share)
    elif batch_group is not None and batch_group.follows:
        builder = BatchReceiver(batch_group)
    else:
        counts = BlockCounts(counts_folder, training.identity, share.dp_rank if writes else None)
        builder = StreamBatchBuilder(training, share, counts)
        if batch_group is not None and batch_group.others:
            builder = BatchSender(builder, batch_group)
    return Loader(builder, global_size=share.global_size, ahead=ahead)
