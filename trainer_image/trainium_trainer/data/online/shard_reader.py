"""Read one rank's samples of text that is tokenized during training, and send them to the ranks that train on them too.

So text is tokenized once per data-parallel rank, not by each of its tensor-parallel and pipeline ranks.

Guarantees:
- The samples do not depend on the number of processes.
- The step that needs the rows of a process raises its errors, with the traceback.
- All ranks request the same positions in the same order.
- Messages are sent point to point on the host, with separate tags, by the thread that prepares batches.
- An error of the reading rank is raised on all of them.
- A reading rank that exits notifies the others, and one that fails closes the connection, so no rank waits for it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import pickle
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from trainium_trainer.data.batches.samples import Sample, SampleReader, Share, TextSample
from trainium_trainer.data.online.stream_shards import (
    ShardSamples,
    StreamedBlock,
    initialize_shards,
    read_shard_samples,
)
from trainium_trainer.data.sources.documents import refuse_skipped, refuse_skipped_share
from trainium_trainer.data.workers.pool import Workers
from trainium_trainer.exits import PeerLostError, StorageError, UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from trainium_trainer.data.online.streams import BlockCounts, Streams

_log = logging.getLogger("trainium.data")

_CALLS_AHEAD = 2


@dataclass(slots=True)
class _SourceCounts:
    """The counts of this rank's reads of a source."""

    blocks: int = 0
    records: int = 0
    skipped: int = 0
    first_skipped: str = ""
    """The message about the first skipped record."""


class ShardReader:
    """Reads the samples of one rank's shards with worker processes."""

    def __init__(self, streams: Streams, share: Share, counts: BlockCounts) -> None:
        assert share.global_size == streams.plan.shards, "each row of the global batch is a shard"
        self._streams = streams
        self._share = share
        self._counts = counts
        self._workers: Workers | None = None
        self._requested = 0  # the next step to request from the processes
        self._received = 0
        self._skipped = 0
        self._source_counts = [_SourceCounts() for _ in streams.plan.sources]

    def read(self, position: int) -> list[Sample | None]:
        """See `SampleReader.read`. Raises UserError, StorageError, WorkerError."""
        step, rest = divmod(position, self._share.global_size)
        assert rest == 0, "a run with another global batch is another run"
        workers = self._start_workers()
        if step != self._received:
            for _ in range(self._received, self._requested):
                workers.gather()
            self._requested = self._received = step
        while self._requested < step + _CALLS_AHEAD:
            workers.broadcast(read_shard_samples, self._requested)
            self._requested += 1
        results: list[ShardSamples] = workers.gather()
        self._received = step + 1
        for result in results:
            self._counts.add(result.counts)
            self._count_skipped(result.consumed)
        rows = [row for result in results for row in result.rows]
        first = position + self._share.offset
        check_tokens = self._streams.rules.check_tokens
        return [TextSample(number, check_tokens(row, self._streams.name)) for number, row in enumerate(rows, first)]

    def _start_workers(self) -> Workers:
        if self._workers is None:
            share, plan = self._share, self._streams.plan
            count = min(self._streams.workers, share.size)
            marks = [share.offset + number * share.size // max(1, count) for number in range(count + 1)]
            counts = self._counts.group_by_source(len(plan.sources))
            self._workers = Workers(count)
            for number, (first, last) in enumerate(itertools.pairwise(marks)):
                self._workers.send(number, initialize_shards, plan, range(first, last), counts)
            self._workers.gather()
        return self._workers

    def _count_skipped(self, consumed: Sequence[tuple[int, StreamedBlock]]) -> None:
        limit, fraction = self._streams.max_bad_lines, self._share.size / self._share.global_size
        for number, block in consumed:
            source, counts = self._streams.plan.sources[number], self._source_counts[number]
            counts.blocks += 1
            counts.records += block.records
            if not block.skipped:
                continue
            if not self._skipped:
                _log.warning("data.source %s: skipped", block.skipped[0].format_message())
            counts.first_skipped = counts.first_skipped or block.skipped[0].format_message()
            counts.skipped += len(block.skipped)
            self._skipped += len(block.skipped)
            refuse_skipped(self._skipped, block.skipped[-1], limit)
            if counts.records:
                expected = counts.records / counts.blocks * source.blocks * fraction
                refuse_skipped_share(
                    source.spec.name, counts.skipped, counts.records, counts.first_skipped, limit, expected=expected
                )

    def close(self) -> None:
        """End the processes."""
        if self._workers is not None:
            self._workers.close()
        self._counts.close()


_TAG = 1 << 20
"""Above the tags of the exchange and the copies of snapshots."""
_END = -1


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """The ranks that train on the same samples as this one."""

    leader: int
    """The rank that reads the samples."""
    rank: int
    others: tuple[int, ...]
    """All ranks but the leader."""
    group: ProcessGroup
    """The process group of all ranks on the host."""

    @property
    def is_follower(self) -> bool:
        """Whether this rank receives its samples."""
        return self.rank != self.leader


class SampleSender:
    """Reads samples and sends them to the other ranks before they are used here."""

    def __init__(self, reader: SampleReader, sample_group: SampleGroup) -> None:
        self._reader = reader
        self._sample_group = sample_group
        self._end_sent = False

    def read(self, position: int) -> list[Sample | None]:
        """See `SampleReader.read`; an error is sent to the other ranks and raised."""
        try:
            samples = self._reader.read(position)
        except Exception as error:
            self._send(position, error if isinstance(error, UserError | StorageError) else RuntimeError(str(error)))
            raise
        self._send(position, samples)
        return samples

    def _send(self, position: int, content: list[Sample | None] | Exception) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)
        header = torch.tensor([position, len(data)])
        for rank in self._sample_group.others:
            dist.send(header, rank, group=self._sample_group.group, tag=_TAG)
            dist.send(data, rank, group=self._sample_group.group, tag=_TAG + 1)

    def close(self) -> None:
        """Close the reader and notify the other ranks of the end."""
        self._reader.close()
        if not self._end_sent:
            self._end_sent = True
            # Nothing waits for these threads: a rank that does not receive is exiting too, and one that receives
            # detects the end of the connection.
            for rank in self._sample_group.others:
                threading.Thread(target=self._send_end, args=(rank,), name="loader-end", daemon=True).start()

    def _send_end(self, rank: int) -> None:
        with contextlib.suppress(RuntimeError):  # it exited first
            dist.send(torch.tensor([_END, 0]), rank, group=self._sample_group.group, tag=_TAG)


class SampleReceiver:
    """Receives the samples that another rank reads."""

    def __init__(self, sample_group: SampleGroup) -> None:
        self._sample_group = sample_group

    def read(self, position: int) -> list[Sample | None]:
        """See `SampleReader.read`. Raises the sender's error; PeerLostError if the sender exited or is out of step."""
        leader, group = self._sample_group.leader, self._sample_group.group
        header = torch.zeros(2, dtype=torch.int64)
        dist.recv(header, leader, group=group, tag=_TAG)
        sent, length = header.tolist()
        if sent == _END:
            raise PeerLostError(f"rank {leader}, which makes this rank's batches, has left")
        data = torch.empty(length, dtype=torch.uint8)
        dist.recv(data, leader, group=group, tag=_TAG + 1)
        content = pickle.loads(data.numpy().tobytes())  # noqa: S301 - our own ranks
        if isinstance(content, Exception):
            raise content
        if sent != position or not isinstance(content, list):
            raise PeerLostError(f"rank {leader} makes the batch at sample {sent:,}, this rank is at {position:,}")
        return content

    def close(self) -> None:
        """Do nothing: the sender's notification ends a waiting thread."""
