"""Kernel lines of faults: which are kept, and how a file or FIFO of them is followed."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.testing.suite.timeouts import until
from trainium_agent.exits import kernel_log
from trainium_agent.exits.kernel_log import KernelEvents, KernelLog

NOW = 1_800_000_000.0
SRAM = "NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR instance-id=i-0 nd-id=0 nc-id=0 action=TERMINATE_INSTANCE"
LONGEST = b"x" * kernel_log._MAX_PARTIAL_BYTES
DISK = "EXT4-fs error (device nvme0n1p1): ext4_find_entry: reading directory lblock 0"


@pytest.fixture
def events() -> KernelEvents:
    return KernelEvents(lambda: None)


def test_lines_of_faults_are_numbered_and_other_lines_ignored(events: KernelEvents) -> None:
    assert events.add(SRAM, NOW)
    assert not events.add("eth0: renamed from veth1", NOW)
    assert events.add(DISK, NOW)
    assert [(event.sequence, event.line) for event in events.newest] == [(0, SRAM), (1, DISK)]


def test_one_kind_of_line_is_limited_to_one_in_ten_seconds_and_evicts_no_other(events: KernelEvents) -> None:
    events.add(SRAM, NOW)
    accepted_count = sum(events.add(f"{DISK} {number}", NOW + number / 1000) for number in range(30_000))
    assert accepted_count == 3
    assert events.newest[0].line == SRAM
    assert len(events.newest) == 2


def test_every_new_line_wakes_the_heartbeat() -> None:
    woken: list[int] = []
    events = KernelEvents(lambda: woken.append(1))
    events.add(SRAM, NOW)
    events.add(SRAM, NOW + 1)
    assert len(woken) == 1


def test_a_file_is_followed_from_its_end_and_after_its_replacement(tmp_path: Path, events: KernelEvents) -> None:
    path = tmp_path / "kmsg"
    path.write_text(f"{DISK}\n")
    log = KernelLog(path, events)
    log.start()
    time.sleep(0.3)
    with path.open("a") as file:
        file.write(f"6,339,5140900,-;{SRAM}\n SUBSYSTEM=pci\n")
    until(lambda: events.newest, "the line is read", pause=0.01)
    fresh = tmp_path / "fresh"
    fresh.write_text("nvme nvme0: controller is down; will reset: CSTS=0xffffffff\n")
    fresh.replace(path)
    until(lambda: len(events.newest) == 2, "both lines are read", pause=0.01)
    log.stop()
    assert [event.line.split()[0] for event in events.newest] == ["NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR", "nvme"]


def test_a_file_that_is_created_later_is_read_from_its_start(tmp_path: Path, events: KernelEvents) -> None:
    path = tmp_path / "kmsg"
    log = KernelLog(path, events)
    log.start()
    time.sleep(0.05)
    path.write_text(f"{SRAM}\n")
    until(lambda: events.newest, "the line is read", pause=0.01)
    log.stop()


def test_a_fifo_is_followed_across_its_writers(tmp_path: Path, events: KernelEvents) -> None:
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    log = KernelLog(path, events)
    log.start()
    for line in (SRAM, DISK):
        with path.open("w") as fifo:
            fifo.write(f"{line}\n")
    until(lambda: len(events.newest) == 2, "both lines are read", pause=0.01)
    log.stop()


@given(st.lists(st.binary(max_size=300), max_size=30))
def test_a_line_after_any_bytes_is_still_read(chunks: list[bytes]) -> None:
    events = KernelEvents(lambda: None)
    log = KernelLog(Path("/nonexistent"), events)
    for chunk in chunks:
        log._handle(chunk)
    log._handle(f"\n{SRAM}\n".encode())
    assert any(event.line == SRAM for event in events.newest)


@pytest.fixture
def accepted_lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(KernelEvents, "add", lambda _, line, __: lines.append(line))
    return lines


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        pytest.param(
            [b"6,1,2,-;one\n SUBSYSTEM=pci\n\ntw", b"o\nthree"], ["one", "two"], id="whole lines without their prefix"
        ),
        pytest.param([LONGEST, b"y", b"z\n"], [f"{LONGEST.decode()}y", "z"], id="a line that never ends, in pieces"),
    ],
)
def test_chunks_become_lines(chunks: list[bytes], lines: list[str], accepted_lines: list[str]) -> None:
    log = KernelLog(Path("/nonexistent"), KernelEvents(lambda: None))
    for chunk in chunks:
        log._handle(chunk)
    assert accepted_lines == lines


def test_the_least_specific_kind_is_evicted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_log, "_KEPT", 1)
    events = KernelEvents(lambda: None)
    assert events.add(DISK, 0.0)
    assert events.add(SRAM, 1.0)
    assert [event.line for event in events.newest] == [SRAM]
    assert events.add(DISK, 100.0)
    assert [event.line for event in events.newest] == [SRAM]


def test_a_burst_of_lines_and_a_truncated_file_are_followed(
    tmp_path: Path, accepted_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_log, "_LINES_PER_POLL", 2)
    monkeypatch.setattr(kernel_log, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(kernel_log, "_CHUNK", 64)
    path = tmp_path / "kmsg"
    path.write_bytes(b"old\n")
    log = KernelLog(path, KernelEvents(lambda: None))
    log.start()
    until(lambda: not log._skips, "the old lines are skipped", pause=0.01)
    with path.open("ab") as file:
        file.write(b"".join(b"line %d\n" % number for number in range(200)))
    until(lambda: len(accepted_lines) == 200, "all lines are read", pause=0.01)
    with path.open("r+b") as file:
        file.truncate(0)
        file.write(b"after\n")
    until(lambda: accepted_lines[-1] == "after", "the new line is read", pause=0.01)
    log.stop()
    assert accepted_lines[0] == "line 0"


def test_a_file_without_read_permission_ends_the_follower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kmsg"
    path.write_bytes(b"")

    def refuse(*_: Any, **__: Any) -> int:
        raise PermissionError(1, "Operation not permitted")

    log = KernelLog(path, KernelEvents(lambda: None))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        log._follow()  # returns, and does not retry forever
    assert log._refused
