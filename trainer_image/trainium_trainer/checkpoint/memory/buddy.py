"""Copies of snapshots on another node: a rank sends its snapshots to its buddy and keeps copies for others.

A shard that only one node holds would be lost with the node. So its writer sends each finalized snapshot to a rank of
another node (`agreement.choose_buddies`) over the process group of checkpoints: a header page, then the payload. The
buddy acknowledges once the copy is finalized in its memory with the same checksum.

Guarantees:
- One copy per shard is in progress at a time.
- A snapshot is not overwritten while it is sent: its writer waits for the copy before the next snapshot but one, and
  warns when the copy does not arrive. If it is overwritten anyway, it does not match the checksum of its page, which is
  computed when the snapshot is offered.
- A failed peer ends only the copying: the training step detects the failure.
"""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trainium_trainer.checkpoint.errors import StaleGenerationError
from trainium_trainer.checkpoint.memory.snapshot import Header, SnapshotFile
from trainium_worker.snapshot import HEADER_BYTES, DamagedSnapshotError, receive_copy, send_copy, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup


_log = logging.getLogger(__name__)

_FIRST_TAG = 1 << 16
"""Above the tags of the exchange at resume."""
_CLOSING_SECONDS = 5.0
_ANY_TIME = timedelta(days=3650)
"""No time limit, because the next snapshot arrives when the next step ends."""


class SnapshotSender:
    """Sends the snapshots of one shard; `send` is called from one thread at a time."""

    def __init__(self, group: ProcessGroup, target: int, number: int) -> None:
        """Prepare to send to a rank; `number` identifies the copy for its sender and its keeper."""
        self._group = group
        self._target = target
        self._tag = _FIRST_TAG + 3 * number
        self._closing = False

    def send(self, header: bytes, payload: torch.Tensor) -> bool:
        """Send a finalized snapshot; return whether the buddy has stored it. Raises RuntimeError if the buddy left."""
        return send_copy(self._group, self._target, self._tag, header, payload)

    def close(self) -> None:
        """Notify the keeper of the end."""
        farewell = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
        thread = threading.Thread(target=self._send_page, args=(farewell,), name="buddy-farewell", daemon=True)
        thread.start()
        thread.join(_CLOSING_SECONDS)

    def _send_page(self, page: torch.Tensor) -> None:
        try:
            wait_for(dist.isend(page, self._target, group=self._group, tag=self._tag))
        except RuntimeError:
            _log.debug("the buddy on rank %d left first", self._target)


class SnapshotCopier:
    """The thread of the sending side: sends the newest offered snapshot when no copy is in progress."""

    def __init__(self, sender: SnapshotSender) -> None:
        self._sender = sender
        self._changed = threading.Condition()
        self._offered: tuple[bytes, torch.Tensor, int] | None = None
        """The finalized header page, the payload, the step."""
        self._idle = True
        self._ended = False
        self.newest: int | None = None
        """The newest step that the buddy has."""
        threading.Thread(target=self._run, name="buddy-copy", daemon=True).start()

    def offer(self, slot: SnapshotFile, step: int) -> None:
        """Copy a finalized snapshot, unless an earlier copy is still in progress; then this snapshot gets none."""
        with self._changed:
            if self._idle and not self._ended:
                self._offered = (slot.header_page(), slot.payload, step)
                self._idle = False
                self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` and return whether no copy is in progress."""
        with self._changed:
            return self._changed.wait_for(lambda: self._idle or self._ended, seconds)

    def close(self) -> None:
        """End the thread after the copy in progress and notify the keeper."""
        if self.wait(_CLOSING_SECONDS) and not self._ended:
            self._sender.close()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._offered is not None or self._ended)
                if self._offered is None:
                    return
                page, payload, step = self._offered
                self._offered = None
            try:
                arrived = self._sender.send(page, payload)
            except RuntimeError as error:
                _log.warning("no more copies of snapshots are made: %s", error)
                with self._changed:
                    self._ended = True
                    self._changed.notify_all()
                return
            with self._changed:
                if arrived:
                    self.newest = step
                self._idle = True
                self._changed.notify_all()


class SnapshotReceiver:
    """Receives the snapshots of one shard of another node, on a separate thread."""

    def __init__(
        self,
        group: ProcessGroup,
        source: int,
        number: int,
        *,
        slot: Callable[[], SnapshotFile],
        finalize: Callable[[SnapshotFile, Header], bool],
    ) -> None:
        self._group = group
        self._source = source
        self._tag = _FIRST_TAG + 3 * number
        self._slot = slot
        self._finalize = finalize
        self._thread = threading.Thread(target=self._run, name=f"buddy-of-{source}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait briefly for the sender's notification of the end."""
        self._thread.join(_CLOSING_SECONDS)

    def _run(self) -> None:
        try:
            while self._receive():
                pass
        except (RuntimeError, OSError, DamagedSnapshotError, StaleGenerationError) as error:
            _log.warning("copies of rank %d's snapshots are not kept any more: %s", self._source, error)

    def _receive(self) -> bool:
        """Receive one snapshot; return False after the notification of the end."""
        arriving: list[tuple[SnapshotFile, Header]] = []

        def slot(text: bytes) -> torch.Tensor:
            arriving.append((self._slot(), Header.decode(text, f"from rank {self._source}")))
            return arriving[0][0].payload

        def finish() -> bool:
            return self._finalize(*arriving[0])

        return receive_copy(self._group, self._source, self._tag, slot, finish, _ANY_TIME)
