"""Send batches from the rank that prepares them to the other ranks that train on the same samples.

So text that is tokenized during training is tokenized once per data-parallel rank, not by each of its tensor-parallel
and pipeline ranks.

Guarantees:
- All ranks request the same positions in the same order.
- Messages are sent point to point on the host, with separate tags, by the thread that prepares batches.
- An error of the preparing rank is raised on all of them.
- A preparing rank that exits notifies the others, and one that fails closes the connection, so no rank waits for it.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from trainium_trainer.data.batches.micro_batches import BatchBuilder, RankBatch
from trainium_trainer.exits import PeerLostError, StorageError, UserError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_TAG = 1 << 20
"""Above the tags of the exchange and the copies of snapshots."""
_FAREWELL = -1


@dataclass(frozen=True, slots=True)
class BatchGroup:
    """The ranks that train on the same samples as this one."""

    leader: int = 0
    """The rank that prepares the batches."""
    rank: int = 0
    others: tuple[int, ...] = ()
    """All ranks but the leader."""
    group: ProcessGroup | None = None
    """The process group of all ranks on the host."""

    @property
    def follows(self) -> bool:
        """Whether this rank receives its batches."""
        return self.rank != self.leader


class BatchSender:
    """Prepares batches and sends each to the other ranks before it is used here."""

    def __init__(self, builder: BatchBuilder, batch_group: BatchGroup) -> None:
        self._builder = builder
        self._batch_group = batch_group
        self._farewell_sent = False

    def build(self, position: int) -> RankBatch:
        """See `BatchBuilder.build`; an error is sent to the other ranks and raised."""
        try:
            batch = self._builder.build(position)
        except Exception as error:
            self._send(position, error if isinstance(error, UserError | StorageError) else RuntimeError(str(error)))
            raise
        self._send(position, batch)
        return batch

    def _send(self, position: int, content: RankBatch | Exception) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)
        header = torch.tensor([position, len(data)])
        for rank in self._batch_group.others:
            dist.send(header, rank, group=self._batch_group.group, tag=_TAG)
            dist.send(data, rank, group=self._batch_group.group, tag=_TAG + 1)

    def close(self) -> None:
        """Close the builder and notify the other ranks of the end."""
        self._builder.close()
        if not self._farewell_sent:
            self._farewell_sent = True
            # Nothing waits for these threads: a rank that does not receive is exiting too, and one that receives
            # detects the end of the connection.
            for rank in self._batch_group.others:
                threading.Thread(target=self._send_farewell, args=(rank,), name="loader-farewell", daemon=True).start()

    def _send_farewell(self, rank: int) -> None:
        with contextlib.suppress(RuntimeError):  # it exited first
            dist.send(torch.tensor([_FAREWELL, 0]), rank, group=self._batch_group.group, tag=_TAG)


class BatchReceiver:
    """Receives the batches that another rank prepares."""

    def __init__(self, batch_group: BatchGroup) -> None:
        self._batch_group = batch_group

    def build(self, position: int) -> RankBatch:
        """See `BatchBuilder.build`. Raises the sender's error; PeerLostError if the sender exited or is out of step."""
        leader, group = self._batch_group.leader, self._batch_group.group
        header = torch.zeros(2, dtype=torch.int64)
        dist.recv(header, leader, group=group, tag=_TAG)
        sent, length = header.tolist()
        if sent == _FAREWELL:
            raise PeerLostError(f"rank {leader}, which makes this rank's batches, has left")
        data = torch.empty(length, dtype=torch.uint8)
        dist.recv(data, leader, group=group, tag=_TAG + 1)
        content = pickle.loads(data.numpy().tobytes())  # noqa: S301 - our own ranks
        if isinstance(content, Exception):
            raise content
        if sent != position or not isinstance(content, RankBatch):
            raise PeerLostError(f"rank {leader} makes the batch at sample {sent:,}, this rank is at {position:,}")
        return content

    def close(self) -> None:
        """Do nothing: the sender's notification ends a waiting thread."""
