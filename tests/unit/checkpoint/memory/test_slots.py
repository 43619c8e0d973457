"""The snapshot files of one shard, and what is kept of them when memory is full or a peer's copy arrives altered."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoint.checkpoint_builders import SOLO, State, position
from trainium_trainer.checkpoint.memory import memory_tier
from trainium_trainer.checkpoint.memory.memory_tier import MemoryTier
from trainium_trainer.checkpoint.memory.snapshot import (
    BufferLayout,
    Claim,
    ShardKey,
    SnapshotFile,
    SnapshotSlots,
    StateVersion,
    read_header,
)

KEY = ShardKey(0, 1)
BYTES = 4096


def slots(folder: Path, count: int = 3) -> SnapshotSlots:
    return SnapshotSlots(folder, KEY, generation=1, count=count)


def finalized(opened: SnapshotSlots, step: int) -> SnapshotFile:
    slot = opened.next()
    slot.finalize(StateVersion(position(step), 1, "session"), KEY, "layout", "settings")
    return slot


def open_all(opened: SnapshotSlots, folder: Path) -> None:
    headers = {path: header for path in folder.glob("*.snapshot") if (header := read_header(path)) is not None}
    opened.open(layout="layout", payload_bytes=BYTES, headers=headers)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets so many files more be reserved."""

    def after(files: int) -> None:
        left = iter(range(files))
        reserve = os.posix_fallocate

        def fallocate(*arguments: Any) -> None:
            if next(left, None) is None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            reserve(*arguments)

        monkeypatch.setattr(os, "posix_fallocate", fallocate)

    return after


def test_files_that_are_open_are_not_opened_again(tmp_path: Path) -> None:
    opened = slots(tmp_path)
    open_all(opened, tmp_path)
    finalized(opened, 7)
    open_all(opened, tmp_path)
    headers = [read_header(path) for path in tmp_path.glob("*.snapshot")]
    assert len(headers) == 3
    assert [header.claim.version.position.step for header in headers if header is not None] == [7]


def test_memory_that_is_full_takes_no_finished_snapshot_away_and_leaves_no_unfinished_file(
    tmp_path: Path, full: Callable[[int], None]
) -> None:
    before = slots(tmp_path, count=1)
    open_all(before, tmp_path)
    kept = finalized(before, 7)
    before.close()
    again = slots(tmp_path)
    full(1)
    with pytest.raises(OSError, match="No space left"):
        open_all(again, tmp_path)
    with pytest.raises(ValueError, match="empty"):
        again.next()
    assert list(tmp_path.glob("*.snapshot")) == [kept.path]
    assert read_header(kept.path) is not None


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[MemoryTier]:
    layout = BufferLayout.of(State(SOLO).local_tensors())
    made = MemoryTier(tmp_path, key=KEY, layout=layout, generation=1, session="s", config_digest="c")
    yield made
    made.close()


def test_a_snapshot_that_arrives_altered_is_not_kept(tier: MemoryTier) -> None:
    assert tier.open_slots()
    slot = tier.receiving_slot()
    slot.payload.fill_(7)
    sent = Claim(StateVersion(position(3), 1, "s"), KEY, tier.layout.digest, 12345)
    assert tier.finalize_received(slot, sent) is False
    assert tier.claims() == frozenset()
    whole = slot.finalize(sent.version, KEY, tier.layout.digest, "c")
    assert tier.finalize_received(slot, whole) is True
    assert tier.claims() == {whole}


class SlowCopy:
    """The sending side's thread, whose copy is under way."""

    def __init__(self) -> None:
        self.arrived = False
        self.newest: int | None = 3
        self.waits: list[float] = []

    def offer(self, slot: Any, step: int) -> None: ...

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        return self.arrived

    def close(self) -> None: ...


def test_a_copy_that_does_not_arrive_is_waited_for_once_and_reported_once(tier: MemoryTier) -> None:
    copy = SlowCopy()
    tier._copying = copy
    for _ in range(3):
        tier.wait_for_snapshot()
    assert copy.waits == [memory_tier._COPY_TIMEOUT_SECONDS, 0.0, 0.0]
    assert len(tier.warnings) == 1
    assert "has not arrived at its buddy" in tier.warnings[0]
    assert tier.buddy_step is None

    copy.arrived = True
    tier.wait_for_snapshot()
    assert tier.buddy_step == 3
    copy.arrived = False
    tier.wait_for_snapshot()
    assert copy.waits[-1] == memory_tier._COPY_TIMEOUT_SECONDS, "the next one gets its time again"
    assert len(tier.warnings) == 2
