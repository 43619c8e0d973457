"""Hand snapshots to the thread that copies them to another node."""

import sys
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import pytest
import torch

from trainium_trainer.checkpoint.interfaces import Position
from trainium_trainer.checkpoint.memory.buddy import SnapshotCopier
from trainium_trainer.checkpoint.memory.snapshot import Header, ShardKey, SnapshotFile, StateVersion
from trainium_worker.snapshot import parse_page


@pytest.fixture
def threads_without_timeout() -> Iterator[None]:
    """Let a thread run until it waits."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(10)
    yield
    sys.setswitchinterval(before)


class Network:
    """Takes what is sent."""

    def __init__(self) -> None:
        self.pages: list[bytes] = []

    def send(self, page: bytes, _: torch.Tensor) -> bool:
        self.pages.append(page)
        return True

    def close(self) -> None:
        """Notify nobody."""


@pytest.mark.usefixtures("threads_without_timeout")
def test_a_snapshot_that_is_overwritten_before_the_copy_begins_goes_out_under_its_own_page(tmp_path: Path) -> None:
    """Else the page would be empty, which is the farewell: its keeper would leave, and there would be no copy more."""
    network = Network()
    copying = SnapshotCopier(network)
    slot = SnapshotFile.create(tmp_path / "a.snapshot", 4096)
    version = StateVersion(Position(step=7, samples=0, tokens=0), 1, "session")
    claim = slot.finalize(version, ShardKey(0, 1), "layout", "settings")
    copying.offer(slot, 7)
    slot.invalidate(slot.path)  # as its writer does when it has waited without effect for an earlier copy
    assert copying.wait(10)
    text = parse_page(network.pages[0], "sent")
    assert Header.from_text(text, "sent").claim == claim
    copying.close()


class SlowNetwork(Network):
    """Holds each snapshot until it is let through, with an answer or an error."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: Queue[bool | Exception] = Queue()
        self.farewells = 0

    def send(self, page: bytes, payload: torch.Tensor) -> bool:
        super().send(page, payload)
        answer = self.answers.get(timeout=10)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.farewells += 1


def offered(copying: SnapshotCopier, folder: Path, step: int) -> None:
    slot = SnapshotFile.create(folder / f"{step}.snapshot", 4096)
    slot.finalize(
        StateVersion(Position(step=step, samples=0, tokens=0), 1, "session"), ShardKey(0, 1), "layout", "settings"
    )
    copying.offer(slot, step)


def test_a_snapshot_that_comes_while_another_is_under_way_is_not_copied(tmp_path: Path) -> None:
    network = SlowNetwork()
    copying = SnapshotCopier(network)
    offered(copying, tmp_path, 1)
    offered(copying, tmp_path, 2)
    network.answers.put(True)
    assert copying.wait(10)
    assert (len(network.pages), copying.newest) == (1, 1)
    offered(copying, tmp_path, 3)
    network.answers.put(False)  # it did not arrive as it was sent
    assert copying.wait(10)
    assert copying.newest == 1
    copying.close()
    assert network.farewells == 1


def test_a_missing_buddy_ends_the_copying_without_a_closing_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network = SlowNetwork()
    copying = SnapshotCopier(network)
    offered(copying, tmp_path, 1)
    network.answers.put(RuntimeError("connection reset by peer"))
    assert copying.wait(10)
    offered(copying, tmp_path, 2)
    assert copying.wait(0), "nothing is under way any more"
    copying.close()
    assert (len(network.pages), network.farewells, copying.newest) == (1, 0, None)
    assert "no more copies of snapshots are made: connection reset by peer" in caplog.text
