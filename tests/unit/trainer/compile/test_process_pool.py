"""Run processes in parallel: their number, their memory, and their end after a failure."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.testing.suite.timeouts import until
from trainium_trainer.compile.process_pool import ProcessPool, count_parallel, read_memory

GIB = 2**30


@pytest.mark.parametrize(
    ("remaining", "max_processes", "available", "process_bytes", "count"),
    [
        (31, 128, 512 * GIB, 10 * GIB, 31),
        (31, 32, 200 * GIB, 10 * GIB, 16),
        (31, 8, 512 * GIB, 10 * GIB, 8),
        (31, 32, 5 * GIB, 10 * GIB, 1),
        (31, 32, None, 10 * GIB, 1),
        (31, 32, 512 * GIB, 0, 1),
    ],
)
def test_memory_limits_the_parallel_processes_to_at_least_one(
    remaining: int, max_processes: int, available: int | None, process_bytes: int, count: int
) -> None:
    assert count_parallel(remaining, max_processes, available, process_bytes) == count


WAIT_FOR_OTHERS = """
import pathlib, sys, time
folder, name, others, number = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.stdin.read())
(folder / name).touch()
deadline = time.monotonic() + 60
while sum(1 for _ in folder.iterdir()) < others:
    if time.monotonic() > deadline:
        sys.exit("alone")
    time.sleep(0.01)
time.sleep(0.5)
"""


def test_the_first_process_runs_alone_and_the_others_in_separate_slots(tmp_path: Path) -> None:
    pool = ProcessPool(3, lambda: 64 * GIB)
    slots: list[tuple[int, int]] = []

    def work(number: int, slot: int) -> None:
        slots.append((number, slot))
        others = 1 if number == 0 else 4  # none of the last three ends before all have started
        completed = pool.run(
            [sys.executable, "-c", WAIT_FOR_OTHERS, str(tmp_path), f"at-{number}", str(others)], "7", os.environ
        )
        assert (completed.returncode, completed.stderr) == (0, "")

    pool.call_for_each(range(4), work)
    assert slots[0] == (0, 0)
    assert sorted(slots[1:]) == [(1, slots[1][1]), (2, slots[2][1]), (3, slots[3][1])]
    assert sorted(slot for _, slot in slots[1:]) == [0, 1, 2]
    assert pool.parallel_processes == 3


USE_MEMORY = """
import subprocess, sys
sys.exit(subprocess.call([sys.executable, "-c", "import time; data = b'x' * (300 << 20); time.sleep(2)"]))
"""


def test_the_memory_of_a_process_includes_its_children(tmp_path: Path) -> None:
    pool = ProcessPool(8, lambda: 500 << 20)
    order: list[tuple[int, int]] = []

    def work(number: int, slot: int) -> None:
        order.append((number, slot))
        assert pool.run([sys.executable, "-c", USE_MEMORY if number == 0 else ""], "", os.environ).returncode == 0

    pool.call_for_each(range(3), work)
    assert pool.peak_bytes > 300 << 20
    assert pool.parallel_processes == 1, "400 MiB of 500 are assigned, of which one takes more than 300"
    assert order == [(0, 0), (1, 0), (2, 0)]


START_CHILD = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(600)
"""


def test_the_error_of_one_process_ends_the_others_with_their_children(tmp_path: Path) -> None:
    pool = ProcessPool(2, lambda: 64 * GIB)
    pid_file = tmp_path / "pid"

    def work(number: int, _: int) -> None:
        if number == 0:
            pool.run([sys.executable, "-c", "import time; time.sleep(0.5)"], "", os.environ)
        elif number == 1:
            pool.run([sys.executable, "-c", START_CHILD, str(pid_file)], "", os.environ)
        else:
            while not (pid_file.exists() and pid_file.read_text()):
                time.sleep(0.01)
            raise ValueError("compiling rank 2: no room")

    with pytest.raises(ValueError, match="rank 2: no room"):
        pool.call_for_each([0, 1, 2, 3, 4], work)
    wait_for_end(int(pid_file.read_text()))


def test_a_signal_to_the_process_group_ends_all_processes(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    program = (
        "import os, sys\n"
        "from trainium_trainer.compile.process_pool import ProcessPool\n"
        "pool = ProcessPool(1)\n"
        f"command = [sys.executable, '-c', {START_CHILD!r}, sys.argv[1]]\n"
        "pool.call_for_each([0], lambda *_: pool.run(command, '', os.environ))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(pid_file)], start_new_session=True)
    try:
        until(lambda: pid_file.exists() and pid_file.read_text(), "a child has started", pause=0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    wait_for_end(int(pid_file.read_text()))


def wait_for_end(pid: int) -> None:
    stat = Path(f"/proc/{pid}/stat")
    until(lambda: not stat.exists() or " Z " in stat.read_text(), f"process {pid} has not ended", pause=0.01)


def test_the_memory_of_an_ended_process_is_zero() -> None:
    code = "import sys; data = b'x' * (100 << 20); print('ready', flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        assert 100 << 20 < read_memory(process.pid) < 400 << 20
    finally:
        process.kill()
        process.communicate()
    assert read_memory(process.pid) == 0
