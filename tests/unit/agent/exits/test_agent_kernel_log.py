from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainium_agent.exits.kernel_log import KernelEvents, KernelLog

if TYPE_CHECKING:
    from collections.abc import Callable

NOW = 1_800_000_000.0
SRAM = "NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR instance-id=i-0 nd-id=0 nc-id=0 action=TERMINATE_INSTANCE"
DISK = "EXT4-fs error (device nvme0n1p1): ext4_find_entry: reading directory lblock 0"


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture
def events() -> KernelEvents:
    return KernelEvents(lambda: None)


def test_lines_of_a_fault_are_numbered_and_the_others_ignored(events: KernelEvents) -> None:
    assert events.take(SRAM, NOW)
    assert not events.take("eth0: renamed from veth1", NOW)
    assert events.take(DISK, NOW)
    assert [(event.sequence, event.line) for event in events.newest] == [(0, SRAM), (1, DISK)]


def test_a_storm_of_one_kind_is_one_line_in_ten_seconds_and_drives_nothing_out(events: KernelEvents) -> None:
    events.take(SRAM, NOW)
    taken = sum(events.take(f"{DISK} {number}", NOW + number / 1000) for number in range(30_000))
    assert taken == 3
    assert events.newest[0].line == SRAM
    assert len(events.newest) == 2


def test_every_new_line_wakes_the_heartbeat() -> None:
    woken: list[int] = []
    events = KernelEvents(lambda: woken.append(1))
    events.take(SRAM, NOW)
    events.take(SRAM, NOW + 1)
    assert len(woken) == 1


def test_a_file_is_followed_from_its_end_on_and_through_a_replacement(tmp_path: Path, events: KernelEvents) -> None:
    path = tmp_path / "kmsg"
    path.write_text(f"{DISK}\n")
    log = KernelLog(path, events)
    log.start()
    time.sleep(0.3)
    with path.open("a") as file:
        file.write(f"6,339,5140900,-;{SRAM}\n SUBSYSTEM=pci\n")
    until(lambda: bool(events.newest))
    fresh = tmp_path / "fresh"
    fresh.write_text("nvme nvme0: controller is down; will reset: CSTS=0xffffffff\n")
    fresh.replace(path)
    until(lambda: len(events.newest) == 2)
    log.stop()
    assert [event.line.split()[0] for event in events.newest] == ["NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR", "nvme"]


def test_a_file_that_comes_later_is_read_from_its_beginning(tmp_path: Path, events: KernelEvents) -> None:
    path = tmp_path / "kmsg"
    log = KernelLog(path, events)
    log.start()
    time.sleep(0.05)
    path.write_text(f"{SRAM}\n")
    until(lambda: bool(events.newest))
    log.stop()


def test_a_fifo_is_followed_while_writers_come_and_go(tmp_path: Path, events: KernelEvents) -> None:
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    log = KernelLog(path, events)
    log.start()
    for line in (SRAM, DISK):
        with path.open("w") as fifo:
            fifo.write(f"{line}\n")
    until(lambda: len(events.newest) == 2)
    log.stop()


def test_a_pod_that_may_not_read_the_kernels_lines_goes_without(tmp_path: Path, events: KernelEvents) -> None:
    log = KernelLog(tmp_path, events)  # a folder cannot be read as a file
    log.start()
    time.sleep(0.05)
    log.stop()
    assert events.newest == ()


@given(st.lists(st.binary(max_size=300), max_size=30))
def test_no_bytes_break_the_follower(chunks: list[bytes]) -> None:
    events = KernelEvents(lambda: None)
    log = KernelLog(Path("/nonexistent"), events)
    for chunk in chunks:
        log._handle(chunk)
    log._handle(f"\n{SRAM}\n".encode())
    assert any(event.line == SRAM for event in events.newest)
