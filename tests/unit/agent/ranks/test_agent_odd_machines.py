"""The agent on unusual machines: calls that fail, an empty /proc, small volumes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from trainium_agent import show_ranks, show_stacks
from trainium_agent.checks import preflight
from trainium_agent.exits import kernel_log
from trainium_agent.exits.diagnosis import Signs
from trainium_agent.exits.kernel_log import KernelEvents, KernelLog
from trainium_agent.linux import kernel
from trainium_contract.exit_codes import ExitCode
from trainium_trainer.monitor.progress import ProgressWriter
from trainium_worker import ProgressPhase

if TYPE_CHECKING:
    from collections.abc import Callable

Usage = namedtuple("Usage", "total used free")  # noqa: PYI024 - as shutil's


# ---- Linux --------------------------------------------------------------------------------------------------------


def test_a_call_that_the_kernel_refuses_is_an_error_with_its_reason() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        kernel._prctl(-1, 0)


def test_on_a_processor_whose_calls_are_not_known_only_the_io_priority_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="riscv64"))
    found: list[int] = []

    def work() -> None:
        kernel.lower_thread_priority()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [kernel._LOW]


@pytest.mark.parametrize("reported", [b"", b"1 (x) " + b"S " + b"0 " * 49])
def test_a_title_without_space_changes_the_name_of_the_process_at_most(
    monkeypatch: pytest.MonkeyPatch, reported: bytes
) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda _: reported)
    before = kernel.descendants(os.getpid())
    names: list[tuple[Any, ...]] = []
    monkeypatch.setattr(kernel, "_libc", SimpleNamespace(prctl=lambda *arguments: names.append(arguments)))
    kernel.set_process_title("a title that is longer than fifteen letters")
    assert [arguments[1][:15] for arguments in names] == ([b"a title that is"] if reported else [])
    assert kernel.descendants(os.getpid()) == before


def test_of_a_process_that_has_ended_nothing_is_known() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert kernel.state_of(ended.pid) == kernel.ProcessState("", 0.0)
    assert not kernel.handles(ended.pid, 10)
    assert kernel.kernel_place(ended.pid) == ""


@pytest.mark.parametrize(
    ("text", "number", "handled"),
    [
        ("Name:\tx\nSigCgt:\t0000000000000200\n", 10, True),
        ("Name:\tx\nSigCgt:\t0000000000000200\n", 9, False),
        ("Name:\tx\n", 10, False),
        ("SigCgt:\n", 10, False),
    ],
)
def test_a_handler_is_read_from_the_mask_of_caught_signals(
    monkeypatch: pytest.MonkeyPatch, text: str, number: int, handled: bool
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: text)
    assert kernel.handles(1, number) is handled


# ---- children ------------------------------------------------------------------------------------------------------

REAPING = """
import os, time
from trainium_agent.ranks import processes
from trainium_agent.ranks.processes import Reaper

def child(code):
    pid = os.fork()
    if pid == 0:
        os._exit(code)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid

reaper, seen = Reaper(), []
early, late = child(3), child(4)
reaper.watch(late, seen.append)
reaper.reap()
assert seen == [4], seen
reaper.watch(early, seen.append)
assert seen == [4, 3], "it had ended before anybody asked"
stranger = child(5)
reaper.reap()
reaper.forget_unclaimed()
reaper.watch(stranger, seen.append)
assert seen == [4, 3], "its number may be another's by now"

processes._UNCLAIMED = 2
first, second, third = child(6), child(7), child(8)
reaper.reap()
kept = []
for pid in (first, second, third):
    reaper.watch(pid, kept.append)
assert kept == [8], "of strangers only some are remembered"
reaper.reap()

group = os.fork()
if group == 0:
    os.setpgid(0, 0)
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.waitid(os.P_PID, group, os.WEXITED | os.WNOWAIT)
reaper.watch(group, seen.append)
reaper.reap()
assert seen == [4, 3, 0]
running = os.fork()
if running == 0:
    time.sleep(600)
reaper.reap()
assert processes.kill_descendants(20.0) == []
print("done")
"""


def test_each_end_of_a_child_is_reported_once_and_what_it_started_ends_with_it() -> None:
    done = subprocess.run([sys.executable, "-c", REAPING], check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


# ---- the kernel's lines --------------------------------------------------------------------------------------------


def follower(folder: Path, events: KernelEvents) -> KernelLog:
    return KernelLog(folder / "kmsg", events)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(KernelEvents, "take", lambda _, line, __: lines.append(line))
    return lines


def read(folder: Path, *pieces: bytes) -> None:
    log = follower(folder, KernelEvents(lambda: None))
    for piece in pieces:
        log._handle(piece)


def test_lines_are_put_together_and_freed_of_what_the_kernel_writes_before_them(
    tmp_path: Path, taken: list[str]
) -> None:
    read(tmp_path, b"6,1,2,-;one\n SUBSYSTEM=pci\n\ntw", b"o\nthree")
    assert taken == ["one", "two"]


def test_a_line_that_never_ends_is_taken_as_it_is(tmp_path: Path, taken: list[str]) -> None:
    read(tmp_path, b"x" * kernel_log._LONGEST_PARTIAL, b"y", b"z\n")
    assert [len(line) for line in taken] == [kernel_log._LONGEST_PARTIAL + 1, 1]


def test_of_more_kinds_than_are_kept_the_least_specific_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_log, "_KEPT", 1)
    events = KernelEvents(lambda: None)
    hardware = "NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR instance-id=i-0 nd-id=0 nc-id=0 action=TERMINATE_INSTANCE"
    disk = "EXT4-fs error (device nvme0n1p1): ext4_find_entry: reading directory lblock 0"
    assert events.take(disk, 0.0)
    assert events.take(hardware, 1.0)
    assert [event.line for event in events.newest] == [hardware]
    assert events.take(disk, 100.0)
    assert [event.line for event in events.newest] == [hardware]


def until(condition: Callable[[], object]) -> None:
    ended = threading.Event()
    for _ in range(3000):
        if condition():
            return
        ended.wait(0.01)
    pytest.fail("it did not happen in time")


def test_a_storm_of_lines_and_a_file_that_is_cut_off_end_nothing(
    tmp_path: Path, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_log, "_LINES_PER_POLL", 2)
    monkeypatch.setattr(kernel_log, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(kernel_log, "_CHUNK", 64)
    path = tmp_path / "kmsg"
    path.write_bytes(b"old\n")
    log = follower(tmp_path, KernelEvents(lambda: None))
    log.start()
    until(lambda: not log._skips)
    with path.open("ab") as file:
        file.write(b"".join(b"line %d\n" % number for number in range(200)))
    until(lambda: len(taken) == 200)
    with path.open("r+b") as file:
        file.truncate(0)
        file.write(b"after\n")
    until(lambda: taken[-1] == "after")
    log.stop()
    assert taken[0] == "line 0"


def test_lines_that_may_not_be_read_end_the_follower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kmsg"
    path.write_bytes(b"")

    def refuse(*_: Any, **__: Any) -> int:
        raise PermissionError(1, "Operation not permitted")

    log = follower(tmp_path, KernelEvents(lambda: None))
    with monkeypatch.context() as patch:
        patch.setattr(kernel_log.os, "open", refuse)
        log._follow()  # returns, and does not try for ever
    assert log._refused


def test_rules_that_cannot_be_read_are_complained_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rules.json"
    signs = Signs(path, lambda: None)
    assert signs._rules() == ()
    assert Signs(None, lambda: None)._rules() == ()
    path.write_text("no JSON")
    assert signs._rules() == ()
    assert signs._rules() == ()
    assert caplog.text.count("cannot be read") == 1


# ---- volumes --------------------------------------------------------------------------------------------------------


def test_a_memory_volume_that_is_nearly_full_is_the_users_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_file_system_of", lambda _: "tmpfs")
    assert list(preflight._memory_directory(tmp_path)) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 30, 1 << 30, 100))
    (finding,) = preflight._memory_directory(tmp_path)
    assert finding.code is ExitCode.USER_ERROR
    assert "has 100 bytes left" in finding.sentence


def test_snapshots_on_a_disk_are_reported_and_stop_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_file_system_of", lambda _: "ext4")
    (finding,) = preflight._memory_directory(tmp_path)
    assert finding.code is None
    assert "is on a disk" in finding.sentence


def test_a_scratch_volume_that_is_nearly_full_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(preflight._disk(None)) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 1 << 40, 3 << 20))
    (finding,) = preflight._disk(tmp_path)
    assert finding.code is None
    assert "has 3 MiB left" in finding.sentence


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_stacks_of_the_newest_generation_are_printed_as_lines_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "progress"
    folder.mkdir()
    monkeypatch.setenv("TRAINIUM_MEMORY_DIR", str(tmp_path))
    show_stacks.main()
    assert capsys.readouterr().out == ""
    for name in ("g1-r0", "g2-r1", "g2-r0"):
        ProgressWriter(folder / name).phase(ProgressPhase.TRAINING)
    (folder / "g2-r7").write_bytes(b"nothing")
    (folder / "g2-of-others").write_bytes(b"nothing")
    show_stacks.main()
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["localRank"] for each in shown] == [0, 1]
    assert {each["pid"] for each in shown} == {os.getpid()}


def test_the_steps_of_ranks_are_those_that_they_report_or_that_were_found_in_their_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "progress"
    folder.mkdir()
    monkeypatch.setenv("TRAINIUM_MEMORY_DIR", str(tmp_path))
    for name, step in (("g1-r0", 90), ("g2-r0.output", 7), ("g2-r1", 5), ("g2-r1.output", 4)):
        ProgressWriter(folder / name).publish(step=step)
    show_ranks.main()
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["localRank"], each["step"]) for each in shown] == [(0, 7), (1, 5)]
    show_stacks.main()
    (stack,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert stack["localRank"] == 1, "the process that wrote the other record is the agent"
