"""Copies of snapshots on another node: a rank sends to its buddy, and keeps copies for others.

A shard that only one node holds would be lost with the node. So its writer sends each finalized snapshot to a rank of
another node (`agreement.choose_buddies`), over the process group of checkpoints: a header page, the payload, and back
an acknowledgement once the copy is finalized in the other node's memory with the same checksum.

Guarantees:
- One copy per shard is under way at a time.
- What is being sent is not overwritten: its writer waits for the copy before the next snapshot but one, and warns when
  the copy does not arrive. What is overwritten all the same does not have the checksum of its page, which is taken when
  the snapshot is offered.
- A peer that fails ends the copying and nothing else: the training step notices the loss.
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
"""Above those that the exchange at resume uses."""
_CLOSING_SECONDS = 5.0
_ANY_TIME = timedelta(days=3650)
"""The next snapshot comes when the next step ends, whenever that is."""


class Sender:
    """Passes one shard's snapshots on; `send` is called from one thread at a time."""

    def __init__(self, group: ProcessGroup, target: int, number: int) -> None:
        """Send to a rank; `number` is that of the copy, the same for its sender and its keeper."""
        self._group = group
        self._target = target
        self._tag = _FIRST_TAG + 3 * number
        self._closing = False

    def send(self, header: bytes, payload: torch.Tensor) -> bool:
        """Copy a finalized snapshot; whether the buddy has it, whole. RuntimeError when the buddy is gone."""
        return send_copy(self._group, self._target, self._tag, header, payload)

    def close(self) -> None:
        """Notify the keeper that nothing more comes."""
        farewell = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
        thread = threading.Thread(target=self._send_page, args=(farewell,), name="buddy-farewell", daemon=True)
        thread.start()
        thread.join(_CLOSING_SECONDS)

    def _send_page(self, page: torch.Tensor) -> None:
        try:
            wait_for(dist.isend(page, self._target, group=self._group, tag=self._tag))
        except RuntimeError:
            _log.debug("the buddy on rank %d left first", self._target)


class Copying:
    """The sending side's thread: takes the newest snapshot that is offered while none is under way."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._changed = threading.Condition()
        self._offered: tuple[bytes, torch.Tensor, int] | None = None
        """The header page as it was finalized, the payload, the step."""
        self._idle = True
        self._ended = False
        self.newest: int | None = None
        """Newest step that the buddy has."""
        threading.Thread(target=self._run, name="buddy-copy", daemon=True).start()

    def offer(self, slot: SnapshotFile, step: int) -> None:
        """Copy a finalized snapshot, unless an earlier one is still under way: then this one has no copy."""
        with self._changed:
            if self._idle and not self._ended:
                self._offered = (slot.page(), slot.payload, step)
                self._idle = False
                self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Return whether nothing is under way, at the latest after `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._idle or self._ended, seconds)

    def close(self) -> None:
        """End the thread, after what is under way and a farewell."""
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


class Keeper:
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
        """Wait a moment for the sender's farewell."""
        self._thread.join(_CLOSING_SECONDS)

    def _run(self) -> None:
        try:
            while self._receive():
                pass
        except (RuntimeError, OSError, DamagedSnapshotError, StaleGenerationError) as error:
            _log.warning("copies of rank %d's snapshots are not kept any more: %s", self._source, error)

    def _receive(self) -> bool:
        """One snapshot; False after the farewell."""
        arriving: list[tuple[SnapshotFile, Header]] = []

        def slot(text: bytes) -> torch.Tensor:
            arriving.append((self._slot(), Header.from_text(text, f"from rank {self._source}")))
            return arriving[0][0].payload

        def finish() -> bool:
            return self._finalize(*arriving[0])

        return receive_copy(self._group, self._source, self._tag, slot, finish, _ANY_TIME)
