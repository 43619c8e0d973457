"""Open, keep and replace the snapshot files of one shard when memory is full or a peer's copy arrives altered."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoint.checkpoint_builders import SINGLE_RANK, State, position
from trainium_trainer.checkpoint.memory.memory_tier import _COPY_TIMEOUT_SECONDS, MemoryTier
from trainium_trainer.checkpoint.memory.snapshot import (
    BufferLayout,
    ShardKey,
    SnapshotFile,
    SnapshotRecord,
    SnapshotSlots,
    StateVersion,
    read_header,
)

KEY = ShardKey(0, 1)
BYTES = 4096


def finalize_next(slots: SnapshotSlots, step: int) -> SnapshotFile:
    slot = slots.next()
    slot.finalize(StateVersion(position(step), 1, "session"), KEY, "layout", "settings")
    return slot


def open_slots(folder: Path, count: int = 3) -> SnapshotSlots:
    slots = SnapshotSlots(folder, KEY, generation=1, count=count)
    reopen(slots, folder)
    return slots


def reopen(slots: SnapshotSlots, folder: Path) -> None:
    headers = {path: header for path in folder.glob("*.snapshot") if (header := read_header(path)) is not None}
    slots.open(layout="layout", payload_bytes=BYTES, headers=headers)


def limit_new_files(monkeypatch: pytest.MonkeyPatch, files: int) -> None:
    """Let only this number of files be reserved from now on."""
    remaining = iter(range(files))
    reserve = os.posix_fallocate

    def fallocate(*arguments: Any) -> None:
        if next(remaining, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)


def test_files_that_are_open_are_not_opened_again(tmp_path: Path) -> None:
    slots = open_slots(tmp_path)
    finalize_next(slots, 7)
    reopen(slots, tmp_path)
    headers = [read_header(path) for path in tmp_path.glob("*.snapshot")]
    assert len(headers) == 3
    assert [header.record.version.position.step for header in headers if header is not None] == [7]


def test_full_memory_keeps_finished_snapshots_and_no_unfinished_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old_slots = open_slots(tmp_path, count=1)
    kept = finalize_next(old_slots, 7)
    old_slots.close()
    slots = SnapshotSlots(tmp_path, KEY, generation=1, count=3)
    limit_new_files(monkeypatch, 1)
    with pytest.raises(OSError, match="No space left"):
        reopen(slots, tmp_path)
    with pytest.raises(ValueError, match="empty"):
        slots.next()
    assert list(tmp_path.glob("*.snapshot")) == [kept.path]
    assert read_header(kept.path) is not None


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[MemoryTier]:
    layout = BufferLayout.of(State(SINGLE_RANK).local_tensors())
    memory_tier = MemoryTier(tmp_path, key=KEY, layout=layout, generation=1, session="s", config_digest="c")
    yield memory_tier
    memory_tier.close()


def test_a_snapshot_that_arrives_altered_is_not_kept(tier: MemoryTier) -> None:
    assert tier.open_slots()
    slot = tier.receiving_slot()
    slot.payload.fill_(7)
    sent = SnapshotRecord(StateVersion(position(3), 1, "s"), KEY, tier.layout.digest, 12345)
    assert tier.finalize_received(slot, sent) is False
    assert tier.records() == frozenset()
    intact = slot.finalize(sent.version, KEY, tier.layout.digest, "c")
    assert tier.finalize_received(slot, intact) is True
    assert tier.records() == {intact}


class SlowCopy:
    """The copier of a tier; its copy arrives when the test sets `arrived`."""

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
    assert copy.waits == [_COPY_TIMEOUT_SECONDS, 0.0, 0.0]
    assert len(tier.warnings) == 1
    assert "has not arrived at its buddy" in tier.warnings[0]
    assert tier.buddy_step is None

    copy.arrived = True
    tier.wait_for_snapshot()
    assert tier.buddy_step == 3
    copy.arrived = False
    tier.wait_for_snapshot()
    assert copy.waits[-1] == _COPY_TIMEOUT_SECONDS, "the next copy has the full timeout again"
    assert len(tier.warnings) == 2
