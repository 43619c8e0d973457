"""Training on text while it is tokenised: the rank's side of `lanes`.

Invariants: the samples are the same for any number of processes; at most a few steps are made ahead; an error in a
process is raised by the step that needs its rows, with its traceback.
"""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING

from trainium_trainer.data.batches.broadcast import Fellows, Giver, Receiver
from trainium_trainer.data.batches.loader import BatchMaker, Loader, Passes, RankBatch, SampleMaker
from trainium_trainer.data.batches.samples import TextSample
from trainium_trainer.data.online.block_counts import BlockCounts
from trainium_trainer.data.online.lanes import Rows, install_lanes, rows_of
from trainium_trainer.data.online.streams import Streams
from trainium_trainer.data.sources.documents import refuse_skipped
from trainium_trainer.data.workers.pool import Workers

if TYPE_CHECKING:
    from pathlib import Path

    from trainium_trainer.data.batches.share import Share
    from trainium_trainer.data.opening import Data
    from trainium_trainer.data.sources.documents import Skipped

_log = logging.getLogger("trainium.data")
_CALLS_AHEAD = 2


class StreamMaker:
    """Batches of one rank's lanes, by processes of its own."""

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
            self._count_skipped(answer.skipped)
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

    def _count_skipped(self, skipped: tuple[Skipped, ...]) -> None:
        if not skipped:
            return
        if self._skipped == 0:
            _log.warning("data.source %s: skipped", skipped[0].sentence())
        self._skipped += len(skipped)
        refuse_skipped(self._skipped, skipped[-1], self._streams.max_bad_lines)

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
    fellows: Fellows | None = None,
) -> Loader:
    """A loader of one rank's batches.

    What it learns of streams is remembered in the folder `notes`; of ranks with the same samples one `writes`. Of the
    `fellows`, who train on the same samples, one makes the batches of streams and hands them to the others.
    """
    training = data.training
    maker: BatchMaker
    if not isinstance(training, Streams):
        maker = SampleMaker(training, share)
    elif fellows is not None and fellows.follows:
        maker = Receiver(fellows)
    else:
        counts = BlockCounts(notes, training.identity, share.dp_rank if writes else None)
        maker = StreamMaker(training, share, counts)
        if fellows is not None and fellows.others:
            maker = Giver(maker, fellows)
    return Loader(maker, global_size=share.global_size, ahead=ahead)
