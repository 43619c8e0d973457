"""What is handed to the thread that copies snapshots to another node."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from trainium_trainer.checkpoint.interfaces import Position
from trainium_trainer.checkpoint.memory.buddy import Copying
from trainium_trainer.checkpoint.memory.claims import Moment, ShardKey
from trainium_trainer.checkpoint.memory.snapshot import SnapshotFile, parse_header

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch


@pytest.fixture
def patient_threads() -> Iterator[None]:
    """A thread goes on until it waits for something."""
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
        """Nobody is told."""


@pytest.mark.usefixtures("patient_threads")
def test_a_snapshot_that_is_overwritten_before_the_copy_begins_goes_out_under_its_own_page(tmp_path: Path) -> None:
    """Else the page would be empty, which is the farewell: its keeper would leave, and there would be no copy more."""
    network = Network()
    copying = Copying(network)
    slot = SnapshotFile.create(tmp_path / "a.snapshot", 4096)
    moment = Moment(Position(step=7, samples=0, tokens=0), 1, "session")
    claim = slot.seal(moment, ShardKey(0, 1), "layout", "settings")
    copying.offer(slot, 7)
    slot.invalidate(slot.path)  # as its writer does when it has waited in vain for an earlier copy
    assert copying.wait(10)
    header = parse_header(network.pages[0], "sent")
    assert header is not None
    assert header.claim == claim
    copying.close()
