"""Request the stacks of a training process by a signal; the process writes them itself.

A rank registers Python's fault handler for `DUMP_SIGNAL` before anything else; the signal runs its handler, so it
answers even while the main thread is inside C code or waits for a peer. A process that is stopped, or inside an
uninterruptible system call, cannot answer.

Guarantees:
- A process without our handler never gets the signal, which would end it.
- No call waits longer than `_ANSWER_SECONDS`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainium_agent.linux import kernel

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DUMP_SIGNAL = signal.SIGUSR2
_ANSWER_SECONDS = 0.5
_POLL_SECONDS = 0.01
_MAX_DUMP_BYTES = 1 << 16
_FRAMES = 12
_INNERMOST = 4
_COLLECTIVES = re.compile(
    r"torch/distributed/("
    r"distributed_c10d|_functional_collectives\w*|c10d_logger|_composable_state|device_mesh|nn/functional"
    r"|fsdp/_fully_shard/_fsdp_(collectives|param_group|state)"
    r"|tensor/_collective_utils"
    r")\.py"
)
_LONG_PATH = re.compile(r"\((?=/)(?:[^/)]*/)*(?=[^/)]+/[^/)]+\))")
_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)$')


def find_stacks_path(progress: Path) -> Path:
    """Return the file of a rank's stacks, beside its progress record."""
    return progress.with_name(f"{progress.name}.stacks")


def dump_on_signal(progress: Path) -> None:
    """Make this process write the stacks of all threads at each `DUMP_SIGNAL`; a rank also works without it."""
    with contextlib.suppress(OSError):
        path = find_stacks_path(progress)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Stays open for the life of the process, because a signal handler cannot open files.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        faulthandler.register(DUMP_SIGNAL, file=descriptor, all_threads=True)


@dataclass(frozen=True, slots=True)
class StackDump:
    """The answer of one process."""

    text: str = ""
    """All threads as the fault handler writes them; empty if the process did not answer."""
    problem: str = ""
    """Why there is no text."""
    kernel_location: str = ""

    @property
    def main_frames(self) -> tuple[str, ...]:
        """Frames of the main thread, innermost first, as `function (file:line)`."""
        # The fault handler lists the newest thread first, so the main thread is the last one.
        block = re.split(r"^(?:Current thread|Thread) .*$", self.text, flags=re.MULTILINE)[-1]
        matches = (_FRAME.match(line) for line in block.splitlines())
        return tuple(f"{frame['name']} ({frame['file']}:{frame['line']})" for frame in matches if frame)

    @property
    def innermost(self) -> str:
        """The innermost frames in one line, or the reason why there are none."""
        frames = " < ".join(_LONG_PATH.sub("(", frame) for frame in self.main_frames[:_FRAMES])
        location = f"; in the kernel: {self.kernel_location}" if self.kernel_location else ""
        return (frames or self.problem) + location

    @property
    def in_collective(self) -> bool | None:
        """Whether the main thread is inside a collective; None without an answer."""
        frames = self.main_frames
        return any(_COLLECTIVES.search(frame) for frame in frames[:_INNERMOST]) if frames else None


def request_stacks(processes: Mapping[int, tuple[int, Path]]) -> dict[int, StackDump]:
    """Request the stacks of living processes (rank to pid and progress file), all at once."""
    answers: dict[int, StackDump] = {}
    sizes: dict[int, int] = {}
    for rank, (pid, progress) in processes.items():
        if kernel.read_process_state(pid).letter in ("T", "t"):
            answers[rank] = StackDump(problem="no stack: it is stopped, so it cannot answer")
        elif not find_stacks_path(progress).exists() or not kernel.has_signal_handler(pid, DUMP_SIGNAL):
            answers[rank] = StackDump(problem="no stack: its signal handler is not installed yet")
        else:
            sizes[rank] = _read_size(find_stacks_path(progress))
            with contextlib.suppress(OSError):
                os.kill(pid, DUMP_SIGNAL)
    _await_answers({rank: (find_stacks_path(processes[rank][1]), size) for rank, size in sizes.items()})
    for rank, size in sizes.items():
        pid, progress = processes[rank]
        text = _read_tail(find_stacks_path(progress), size)
        letter = kernel.read_process_state(pid).letter or "?"
        answers[rank] = StackDump(text, "" if text else f"no stack: no answer in process state {letter}")
    return {
        rank: replace(stacks, kernel_location=kernel.read_kernel_location(processes[rank][0]))
        for rank, stacks in answers.items()
    }


def _await_answers(files: dict[int, tuple[Path, int]]) -> None:
    """Wait until each file has grown and stopped growing, or the time is up."""
    deadline = time.monotonic() + _ANSWER_SECONDS
    sizes = {rank: size for rank, (_, size) in files.items()}
    waiting = set(files)
    while waiting and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        for rank in tuple(waiting):
            path, before = files[rank]
            newest = _read_size(path)
            if newest > before and newest == sizes[rank]:
                waiting.discard(rank)
            sizes[rank] = newest


def _read_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_tail(path: Path, start: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(_MAX_DUMP_BYTES).decode(errors="replace")
    except OSError:
        return ""
