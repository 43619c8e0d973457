"""Copy snapshots to another node in a thread."""

import sys
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import pytest
import torch

from trainium_trainer.checkpoint.interfaces import Position
from trainium_trainer.checkpoint.memory.buddy import SnapshotCopier
from trainium_trainer.checkpoint.memory.snapshot import Header, ShardKey, SnapshotFile, SnapshotRecord, StateVersion
from trainium_worker.snapshot import parse_header_page


def offer_snapshot(copier: SnapshotCopier, folder: Path, step: int) -> tuple[SnapshotFile, SnapshotRecord]:
    slot = SnapshotFile.create(folder / f"{step}.snapshot", 4096)
    version = StateVersion(Position(step=step, samples=0, tokens=0), 1, "session")
    record = slot.finalize(version, ShardKey(0, 1), "layout", "settings")
    copier.offer(slot, step)
    return slot, record


@pytest.fixture
def no_thread_switches() -> Iterator[None]:
    """Let a thread run until it blocks."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(10)
    yield
    sys.setswitchinterval(before)


class FakeNetwork:
    """Record the pages that are sent."""

    def __init__(self) -> None:
        self.pages: list[bytes] = []

    def send(self, page: bytes, _: torch.Tensor) -> bool:
        self.pages.append(page)
        return True

    def close(self) -> None:
        """Send no closing message."""


@pytest.mark.usefixtures("no_thread_switches")
def test_a_snapshot_that_is_overwritten_before_its_copy_starts_is_sent_with_its_header(tmp_path: Path) -> None:
    """An empty page is the closing message: after it, the buddy would receive no more copies."""
    network = FakeNetwork()
    copier = SnapshotCopier(network)
    slot, record = offer_snapshot(copier, tmp_path, 7)
    slot.invalidate(slot.path)  # as its writer does after the timeout of an earlier copy
    assert copier.wait(10)
    text = parse_header_page(network.pages[0], "sent")
    assert Header.decode(text, "sent").record == record
    copier.close()


class SlowNetwork(FakeNetwork):
    """Block each transfer until the test puts its result or error into `answers`."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: Queue[bool | Exception] = Queue()
        self.closing_messages = 0

    def send(self, page: bytes, payload: torch.Tensor) -> bool:
        super().send(page, payload)
        answer = self.answers.get(timeout=10)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.closing_messages += 1


def test_a_snapshot_that_is_offered_during_another_copy_is_not_copied(tmp_path: Path) -> None:
    network = SlowNetwork()
    copier = SnapshotCopier(network)
    offer_snapshot(copier, tmp_path, 1)
    offer_snapshot(copier, tmp_path, 2)
    network.answers.put(True)
    assert copier.wait(10)
    assert (len(network.pages), copier.newest) == (1, 1)
    offer_snapshot(copier, tmp_path, 3)
    network.answers.put(False)  # it arrived altered
    assert copier.wait(10)
    assert copier.newest == 1
    copier.close()
    assert network.closing_messages == 1


def test_a_missing_buddy_ends_the_copies_without_a_closing_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network = SlowNetwork()
    copier = SnapshotCopier(network)
    offer_snapshot(copier, tmp_path, 1)
    network.answers.put(RuntimeError("connection reset by peer"))
    assert copier.wait(10)
    offer_snapshot(copier, tmp_path, 2)
    assert copier.wait(0), "no copy is in progress"
    copier.close()
    assert (len(network.pages), network.closing_messages, copier.newest) == (1, 0, None)
    assert "no more copies of snapshots are made: connection reset by peer" in caplog.text
