"""Copies of snapshots on other nodes, over a process group of the ranks.

A part that only one node holds would be lost with the node, so its writer sends each finished snapshot to a rank of
another node: the header page, then the payload. The receiver acknowledges once the copy is finished in its memory with
the same checksum.

Guarantees:
- A part is stored only if its receiver expects it, and only if it fits into the file that is reserved for it.
- One copy per part is in progress at a time.
- A failed peer ends only the copying: the training step detects the failure.
"""

from __future__ import annotations

import itertools
import logging
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trainium_worker.snapshots.files import HEADER_BYTES, DamagedSnapshotError, Part, SnapshotFile

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    from torch.distributed import ProcessGroup


_log = logging.getLogger(__name__)

TAGS_PER_PART = 3
_CLOSING_SECONDS = 5.0
_ANY_TIME = timedelta(days=3650)
"""No time limit, because the next snapshot arrives when the next step ends."""


def choose_buddies(parts: Sequence[tuple[str, str]], usable: Container[str] | None = None) -> dict[int, int]:
    """Return the rank that keeps the copies of each rank whose part only one store holds. Pure.

    parts: the store of each rank's node, and the name of its part, which the first of the ranks that share it writes.
    usable: the stores that may keep or have copies; None for all.

    Stores are paired, so that the loss of two stores loses a part only if they are partners (2 in N-1 cases for a
    ring, 1 for pairs: Gemini, SOSP 2023). Partners are far apart in the order, because neighbours fail together (one
    switch, one power supply). With an odd number, three stores form a ring.
    """
    ranks: dict[str, list[int]] = {}
    holders: dict[str, set[str]] = {}
    writers: dict[str, int] = {}
    for rank, (store, name) in enumerate(parts):
        ranks.setdefault(store, []).append(rank)
        holders.setdefault(name, set()).add(store)
        writers.setdefault(name, rank)
    stores = [store for store in ranks if usable is None or store in usable]
    half = len(stores) // 2
    groups = [[stores[number], stores[number + half]] for number in range(half)]
    if groups and len(stores) % 2:
        groups[-1].append(stores[-1])
    partners = {store: group[(number + 1) % len(group)] for group in groups for number, store in enumerate(group)}
    keepers = {store: itertools.cycle(ranks[partner]) for store, partner in partners.items()}
    single = [rank for name, rank in writers.items() if len(holders[name]) == 1 and parts[rank][0] in partners]
    return {rank: next(keepers[parts[rank][0]]) for rank in single}


def send_part(group: ProcessGroup, target: int, tag: int, page: bytes, payload: torch.Tensor) -> bool:
    """Send a finished snapshot to a rank; return whether it was stored. Uses three tags. Raises RuntimeError."""
    answer = torch.zeros(1, dtype=torch.uint8)
    reply = dist.irecv(answer, target, group=group, tag=tag + 2)
    _send_page(group, target, tag, page)
    _wait(dist.isend(payload, target, group=group, tag=tag + 1))
    _wait(reply)
    return bool(answer[0])


def receive_part(
    group: ProcessGroup,
    source: int,
    tag: int,
    choose_file: Callable[[Part], SnapshotFile],
    timeout: timedelta | None = None,
) -> bool | None:
    """Receive what `send_part` sends; return whether it arrived intact, None after the last part.

    choose_file: returns the file for a part, or raises DamagedSnapshotError for an unexpected one. timeout: the time
    limit of the page. Raises RuntimeError if the sender failed, and DamagedSnapshotError for a damaged page.
    """
    page = torch.empty(HEADER_BYTES, dtype=torch.uint8)
    _wait(dist.irecv(page, source, group=group, tag=tag), timeout)
    part = Part.from_page(page.numpy().tobytes(), f"from rank {source}")
    if part is None:
        return None
    file = choose_file(part)
    if part.payload_bytes > file.capacity:
        raise DamagedSnapshotError(f"from rank {source}: {part.payload_bytes} bytes do not fit into {file.capacity}")
    _wait(dist.irecv(file.payload[: part.payload_bytes], source, group=group, tag=tag + 1))
    is_intact = file.finish_received(part)
    _wait(dist.isend(torch.tensor([is_intact], dtype=torch.uint8), source, group=group, tag=tag + 2))
    return is_intact


def transfer(
    group: ProcessGroup,
    tag: int,
    *,
    sends: Iterable[tuple[int, torch.Tensor]],
    into: Iterable[tuple[int, torch.Tensor]],
) -> None:
    """Send bytes to ranks and receive others, by rank, all at once. The ranks on both sides call it."""
    works = [dist.irecv(buffer, source, group=group, tag=tag) for source, buffer in into]
    works += [dist.isend(data, target, group=group, tag=tag) for target, data in sends]
    for work in works:
        _wait(work)


class CopySender:
    """Sends the newest offered snapshot of one part to a rank, in a separate thread, when no copy is in progress.

    A snapshot that is overwritten while it is sent does not match the checksum of its page.
    """

    def __init__(self, group: ProcessGroup, target: int, tag: int) -> None:
        self._group, self._target, self._tag = group, target, tag
        self._changed = threading.Condition()
        self._offered: tuple[Part, torch.Tensor] | None = None
        self._idle = True
        self._ended = False
        self.newest: int | None = None
        """The newest step that the receiver has."""
        threading.Thread(target=self._run, name="snapshot-copy", daemon=True).start()

    def offer(self, file: SnapshotFile, part: Part) -> None:
        """Copy a finished snapshot, unless an earlier copy is still in progress; then this snapshot gets none."""
        with self._changed:
            if self._idle and not self._ended:
                self._offered = (part, file.payload[: part.payload_bytes])
                self._idle = False
                self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` and return whether no copy is in progress."""
        with self._changed:
            return self._changed.wait_for(lambda: self._idle or self._ended, seconds)

    def close(self) -> None:
        """End the thread after the copy in progress and notify the receiver."""
        if self.wait(_CLOSING_SECONDS) and not self._ended:
            thread = threading.Thread(target=self._send_end, name="snapshot-copy-end", daemon=True)
            thread.start()
            thread.join(_CLOSING_SECONDS)
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _send_end(self) -> None:
        try:
            _send_page(self._group, self._target, self._tag, b"")
        except RuntimeError:
            _log.debug("rank %d, which keeps copies, left first", self._target)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._offered is not None or self._ended)
                if self._offered is None:
                    return
                (part, payload), self._offered = self._offered, None
            try:
                arrived = send_part(self._group, self._target, self._tag, part.to_page(), payload)
            except RuntimeError as error:
                _log.warning("no more copies of snapshots are made: %s", error)
                with self._changed:
                    self._ended = True
                    self._changed.notify_all()
                return
            with self._changed:
                if arrived:
                    self.newest = part.version.step
                self._idle = True
                self._changed.notify_all()


class CopyReceiver:
    """Receives the snapshots of one part from another node, in a separate thread."""

    def __init__(self, group: ProcessGroup, source: int, tag: int, choose_file: Callable[[Part], SnapshotFile]) -> None:
        """`choose_file`: as of `receive_part`; any exception of it ends the copying."""
        self._group, self._source, self._tag = group, source, tag
        self._choose_file = choose_file
        self._thread = threading.Thread(target=self._run, name=f"copies-of-{source}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait briefly for the sender's notification of the end."""
        self._thread.join(_CLOSING_SECONDS)

    def _run(self) -> None:
        try:
            while receive_part(self._group, self._source, self._tag, self._choose_file, _ANY_TIME) is not None:
                pass
        except Exception as error:  # noqa: BLE001 - training continues without copies
            _log.warning("copies of rank %d's snapshots are not kept any more: %s", self._source, error)


def _send_page(group: ProcessGroup, target: int, tag: int, page: bytes) -> None:
    whole = torch.frombuffer(bytearray(page.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)
    _wait(dist.isend(whole, target, group=group, tag=tag))


def _wait(work: dist.Work | None, limit: timedelta | None = None) -> None:
    """Wait for a transfer, at most for `limit`; None: the timeout of its group."""
    if work is not None:
        work.wait(*(() if limit is None else (limit,)))
