"""Calls of the kernel, waits for a processor, and the commands that print ranks."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainium_agent import show_ranks, show_stacks
from trainium_agent.linux import kernel
from trainium_agent.linux.kernel import CpuWaitSampler
from trainium_contract.worker_process.process_tree import list_descendants
from trainium_trainer.monitor.progress import ProgressWriter
from trainium_worker.progress_record import ProgressPhase


def test_a_refused_call_raises_with_the_kernels_reason() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        kernel._call_prctl(-1, 0)


def test_an_unknown_architecture_keeps_its_io_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="riscv64"))
    priorities: list[int] = []

    def work() -> None:
        kernel.lower_thread_priority()
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert priorities == [kernel._LOW_NICE]


@pytest.mark.parametrize("reported", [b"", b"1 (x) " + b"S " + b"0 " * 49])
def test_a_process_title_that_does_not_fit_changes_only_the_name(
    monkeypatch: pytest.MonkeyPatch, reported: bytes
) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda _: reported)
    before = list_descendants(os.getpid())
    names: list[tuple[Any, ...]] = []
    monkeypatch.setattr(kernel, "_libc", SimpleNamespace(prctl=lambda *arguments: names.append(arguments)))
    kernel.set_process_title("a title that is longer than fifteen letters")
    assert [arguments[1][:15] for arguments in names] == ([b"a title that is"] if reported else [])
    assert list_descendants(os.getpid()) == before


def test_an_ended_process_has_no_state() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert kernel.read_process_state(ended.pid) == kernel.ProcessState("", 0.0)
    assert not kernel.has_signal_handler(ended.pid, 10)
    assert kernel.read_kernel_location(ended.pid) == ""


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
    assert kernel.has_signal_handler(1, number) is handled


def test_show_stacks_prints_the_newest_generation_as_json_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "progress"
    folder.mkdir()
    monkeypatch.setenv("TRAINIUM_MEMORY_DIR", str(tmp_path))
    show_stacks.main()
    assert capsys.readouterr().out == ""
    for name in ("g1-r0", "g2-r1", "g2-r0"):
        ProgressWriter(folder / name).publish(phase=ProgressPhase.TRAINING)
    (folder / "g2-r7").write_bytes(b"nothing")
    (folder / "g2-of-others").write_bytes(b"nothing")
    show_stacks.main()
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [rank["localRank"] for rank in shown] == [0, 1]
    assert {rank["pid"] for rank in shown} == {os.getpid()}


def test_show_ranks_prints_reported_steps_before_steps_found_in_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "progress"
    folder.mkdir()
    monkeypatch.setenv("TRAINIUM_MEMORY_DIR", str(tmp_path))
    for name, step in (("g1-r0", 90), ("g2-r0.output", 7), ("g2-r1", 5), ("g2-r1.output", 4)):
        ProgressWriter(folder / name).publish(step=step)
    show_ranks.main()
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(rank["localRank"], rank["step"]) for rank in shown] == [(0, 7), (1, 5)]
    show_stacks.main()
    (stack,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert stack["localRank"] == 1, "the process that wrote the other record is the agent"


def write_schedstat(root: Path, pid: int, *threads: tuple[int, int]) -> None:
    for number, (ran, waited) in enumerate(threads):
        folder = root / str(pid) / "task" / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(f"{ran} {waited} 7\n")


def test_the_share_is_computed_from_the_newest_sample_of_all_threads(tmp_path: Path) -> None:
    waits = CpuWaitSampler(tmp_path)
    write_schedstat(tmp_path, 5, (10**9, 10**9), (0, 0))
    assert waits.share(5, 100.0) is None
    write_schedstat(tmp_path, 5, (3 * 10**9, 2 * 10**9), (10**9, 0))
    assert waits.share(5, 101.0) is None, "a sample takes some seconds"
    assert waits.share(5, 106.0) == 0.25
    assert waits.share(5, 107.0) == 0.25
    assert waits.share(5, 112.0) is None, "it was idle"
    waits.keep_only(frozenset({6}))
    assert waits.share(5, 112.1) is None


def test_a_process_without_schedstat_has_no_share(tmp_path: Path) -> None:
    waits = CpuWaitSampler(tmp_path)
    (tmp_path / "5" / "task" / "5").mkdir(parents=True)
    (tmp_path / "5" / "task" / "5" / "schedstat").write_text("\n")
    assert [waits.share(pid, now) for pid in (5, 6) for now in (0.0, 10.0)] == [None] * 4


def test_two_processes_that_share_one_processor_wait_for_each_other() -> None:
    schedstat_file = Path("/proc/self/schedstat")
    if not schedstat_file.exists() or not schedstat_file.read_text().strip():
        pytest.skip("this kernel does not report it")
    processor = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, {{{processor}}})\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2)]
    try:
        waits, deadline = CpuWaitSampler(), time.monotonic() + 60
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
