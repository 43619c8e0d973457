"""Waits for a processor, of real processes that share one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainium_agent.linux.kernel import CpuWait


def schedstat(root: Path, pid: int, *threads: tuple[int, int]) -> None:
    for number, (ran, waited) in enumerate(threads):
        folder = root / str(pid) / "task" / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(f"{ran} {waited} 7\n")


def test_the_share_is_that_of_the_newest_sample_over_all_threads(tmp_path: Path) -> None:
    waits = CpuWait(tmp_path)
    schedstat(tmp_path, 5, (10**9, 10**9), (0, 0))
    assert waits.share(5, 100.0) is None
    schedstat(tmp_path, 5, (3 * 10**9, 2 * 10**9), (10**9, 0))
    assert waits.share(5, 101.0) is None, "a sample takes some seconds"
    assert waits.share(5, 106.0) == 0.25
    assert waits.share(5, 107.0) == 0.25
    assert waits.share(5, 112.0) is None, "it wanted nothing"
    waits.forget_others(frozenset({6}))
    assert waits.share(5, 112.1) is None


def test_an_ended_process_or_a_kernel_without_the_file_is_no_error(tmp_path: Path) -> None:
    waits = CpuWait(tmp_path)
    (tmp_path / "5" / "task" / "5").mkdir(parents=True)
    (tmp_path / "5" / "task" / "5" / "schedstat").write_text("\n")
    assert [waits.share(pid, at) for pid in (5, 6) for at in (0.0, 10.0)] == [None] * 4


def test_two_processes_that_share_one_processor_wait_for_each_other() -> None:
    reported = Path("/proc/self/schedstat")
    if not reported.exists() or not reported.read_text().strip():
        pytest.skip("the kernel does not tell")
    one = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, {{{one}}})\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2)]
    try:
        waits, deadline = CpuWait(), time.monotonic() + 60
        for process in processes:
            waits.share(process.pid, 0.0)
        shares: list[float | None] = [None]
        now = 0.0
        while any(share is None or share < 0.2 for share in shares):
            assert time.monotonic() < deadline, shares
            time.sleep(0.1)
            now += 10.0
            shares = [waits.share(process.pid, now) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
