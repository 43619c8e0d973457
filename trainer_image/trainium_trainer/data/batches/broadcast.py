"""Send batches from the rank that makes them to the other ranks that train on the same samples.

Text that is tokenised while training is so tokenised once per data-parallel rank, not by every tensor-parallel and
pipeline rank of it.

Guarantees:
- Every rank asks for the same positions in the same order.
- Messages go from rank to rank on the host, with a separate tag, from the thread that prepares batches.
- An error of the maker is raised by all of them.
- A maker that leaves sends a farewell, one that fails ends the connection, so no rank waits for it.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from trainium_trainer.data.batches.loader import BatchMaker, RankBatch
from trainium_trainer.exits import PeerLostError, StorageError, UserError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_TAG = 1 << 20
"""Above those of the exchange of snapshots and of their copies."""
_FAREWELL = -1


@dataclass(frozen=True, slots=True)
class BatchGroup:
    """The ranks that train on the same samples as this one."""

    leader: int = 0
    """The rank that makes the batches."""
    rank: int = 0
    others: tuple[int, ...] = ()
    """All but the leader."""
    group: ProcessGroup | None = None
    """All ranks, on the host."""

    @property
    def follows(self) -> bool:
        """Whether this rank receives."""
        return self.rank != self.leader


class BatchSender:
    """Makes batches and hands each on before it is used here."""

    def __init__(self, maker: BatchMaker, batch_group: BatchGroup) -> None:
        self._maker = maker
        self._batch_group = batch_group
        self._farewell_sent = False

    def make(self, position: int) -> RankBatch:
        """See `BatchMaker.make`; an error is handed on and raised."""
        try:
            batch = self._maker.make(position)
        except Exception as error:
            self._give(position, error if isinstance(error, UserError | StorageError) else RuntimeError(str(error)))
            raise
        self._give(position, batch)
        return batch

    def _give(self, position: int, content: RankBatch | Exception) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)
        header = torch.tensor([position, len(data)])
        for rank in self._batch_group.others:
            dist.send(header, rank, group=self._batch_group.group, tag=_TAG)
            dist.send(data, rank, group=self._batch_group.group, tag=_TAG + 1)

    def close(self) -> None:
        """Let go of what makes batches, and send the others a farewell."""
        self._maker.close()
        if not self._farewell_sent:
            self._farewell_sent = True
            # Not waited for: who does not listen leaves as well, and who listens sees the connection end.
            for rank in self._batch_group.others:
                threading.Thread(target=self._send_farewell, args=(rank,), name="loader-farewell", daemon=True).start()

    def _send_farewell(self, rank: int) -> None:
        with contextlib.suppress(RuntimeError):  # it left first
            dist.send(torch.tensor([_FAREWELL, 0]), rank, group=self._batch_group.group, tag=_TAG)


class Receiver:
    """The batches that another rank makes."""

    def __init__(self, batch_group: BatchGroup) -> None:
        self._batch_group = batch_group

    def make(self, position: int) -> RankBatch:
        """See `BatchMaker.make`. Raises what the maker raised, PeerLostError when it is gone or makes other batches."""
        leader, group = self._batch_group.leader, self._batch_group.group
        header = torch.zeros(2, dtype=torch.int64)
        dist.recv(header, leader, group=group, tag=_TAG)
        found, length = header.tolist()
        if found == _FAREWELL:
            raise PeerLostError(f"rank {leader}, which makes this rank's batches, has left")
        data = torch.empty(length, dtype=torch.uint8)
        dist.recv(data, leader, group=group, tag=_TAG + 1)
        content = pickle.loads(data.numpy().tobytes())  # noqa: S301 - our own ranks
        if isinstance(content, Exception):
            raise content
        if found != position or not isinstance(content, RankBatch):
            raise PeerLostError(f"rank {leader} makes the batch at sample {found:,}, this rank is at {position:,}")
        return content

    def close(self) -> None:
        """Nothing to do: the maker's farewell ends a thread that waits."""
