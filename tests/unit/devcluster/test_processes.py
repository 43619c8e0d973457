"""Families of processes: found, frozen and killed whole, and never confused with strangers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from trainium_devcluster.processes.process_families import (
    ProcessId,
    freeze_family,
    identify,
    kill_family,
    marked,
    resident_bytes,
    spawn,
    thaw_family,
    trees,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VARIABLE = "TRAINIUM_TEST_MARK"


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "gone"


@pytest.fixture
def mark() -> Iterator[str]:
    value = f"/test/{os.getpid()}-{time.monotonic_ns()}"
    yield value
    kill_family(None, VARIABLE, value)


@pytest.fixture
def family(tmp_path: Path, mark: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a child, and a grandchild that left for its own session, as a daemon does."""
    command = ["sh", "-c", "sleep 300 & setsid sh -c 'sleep 300; :' & wait"]
    process = spawn(command, log=tmp_path / "log", environment={**os.environ, VARIABLE: mark}, folder=tmp_path)
    assert until(lambda: len(trees([process.pid])) == 4)
    yield process
    kill_family(process.pid, VARIABLE, mark)
    process.wait()


def test_a_family_includes_those_who_left_the_session(family: subprocess.Popen[bytes], mark: str) -> None:
    assert set(marked(VARIABLE, mark)) == set(trees([family.pid]))


def test_a_killed_family_has_ended_whole(family: subprocess.Popen[bytes], mark: str) -> None:
    members = trees([family.pid])
    kill_family(family.pid, VARIABLE, mark)
    assert all(state(pid) in {"Z", "gone"} for pid in members)


def test_orphans_are_found_by_their_mark(family: subprocess.Popen[bytes], mark: str) -> None:
    _, *below = trees([family.pid])
    family.kill()
    family.wait()
    kill_family(None, VARIABLE, mark)
    assert all(state(pid) in {"Z", "gone"} for pid in below)


def test_a_mark_is_matched_whole_unless_asked_for_its_beginning(family: subprocess.Popen[bytes], mark: str) -> None:
    assert marked(VARIABLE, mark[:-1]) == []
    assert family.pid in marked(VARIABLE, mark[:-1], prefix=True)


def test_a_frozen_family_stalls_and_goes_on(family: subprocess.Popen[bytes], mark: str) -> None:
    members = trees([family.pid])
    freeze_family(family.pid, VARIABLE, mark)
    assert until(lambda: all(state(pid) == "T" for pid in members))
    thaw_family(family.pid, VARIABLE, mark)
    assert until(lambda: all(state(pid) == "S" for pid in members))


def test_a_pid_file_of_an_earlier_process_with_the_same_number_is_not_believed(tmp_path: Path) -> None:
    mine = identify(os.getpid())
    assert mine is not None
    assert mine.is_alive()
    earlier = ProcessId(mine.pid, mine.started - 1)
    earlier.write(tmp_path / "pid.json")
    read = ProcessId.read(tmp_path / "pid.json")
    assert read == earlier
    assert not earlier.is_alive()
    assert earlier.signal(signal.SIGKILL) is False


def test_a_damaged_pid_file_is_no_process(tmp_path: Path) -> None:
    (tmp_path / "pid.json").write_text("{")
    assert ProcessId.read(tmp_path / "pid.json") is None
    assert ProcessId.read(tmp_path / "none.json") is None


def test_memory_is_that_of_the_process() -> None:
    assert resident_bytes(os.getpid()) > 5_000_000
    assert resident_bytes(2**22 + 1) == 0


def test_a_child_dies_with_its_supervisor(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys, time\n"
        "from trainium_devcluster.processes.process_families import spawn\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "child = spawn(['sleep', '300'], log=folder / 'log', environment=os.environ, folder=folder)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(300)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        child = int(supervisor.stdout.readline())
        assert state(child) in {"S", "R", "D"}
        supervisor.kill()
    assert until(lambda: state(child) in {"Z", "gone"})
