"""Follow the ranks of a job: by their reports, and a program also from outside, by its output and signs of activity.

A step that is found in output, or that transformers posts where no pattern is given, is written to a progress record
beside the record of the library `trainium_worker`, so that readers treat both alike. The library's record takes
precedence once it has a step.

Guarantees:
- Only the newest lines are searched, each cut to `_LINE_BYTES`, and a search ends after `_SEARCH_SECONDS`; a pattern
  that takes longer repeatedly is disabled.
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_agent.linux import kernel
from trainium_agent.ranks.output import strip_escapes
from trainium_agent.workload.attempt import find_progress_file
from trainium_agent.workload.posted_progress import PostedProgressServer
from trainium_agent.workload.program_checkpoints import CheckpointFolder
from trainium_contract.spec.program import STEP_GROUP
from trainium_contract.wire.messages import HangDetection
from trainium_contract.worker_process.process_tree import list_descendants
from trainium_worker.progress_record import (
    ProgressPhase,
    ProgressReading,
    ProgressRecord,
    ProgressWriter,
    read_progress,
    read_with_pulse,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from trainium_agent.ranks.processes import RankProcess
    from trainium_agent.settings import AgentSettings
    from trainium_agent.workload.attempt import AttemptLayout
    from trainium_agent.workload.posted_progress import PostedProgress
    from trainium_agent.workload.rank_spec import RankSpec

_log = logging.getLogger(__name__)

_LINE_BYTES = 2048
_LINES = 256
"""Number of a rank's newest lines that wait for a search."""
_SEARCH_SECONDS = 0.05
"""Processor time of one search."""
_SLOW_SEARCHES = 20
_UNMATCHED_SECONDS = 60.0
_SHOWN_CHARACTERS = 200
_CPU_SECONDS = 2.0
"""Interval between two reads of the processor time of a rank's processes."""
_BUSY = 0.05
_LAST_LIST_SECONDS = 5.0
"""Longest wait for the list of a program's last checkpoints, because storage may hang."""
_READ_SECONDS = 0.1
"""Interval between two reads of all records, because a node may have more than a hundred ranks."""
_NUMBER = re.compile(rb"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?\b(?:nan|inf)\b", re.IGNORECASE)
_NEURON = Path("/sys/devices/virtual/neuron_device")


@dataclass(slots=True)
class _Rank:
    """One local rank of the current attempt; the output thread appends lines, the event loop searches them."""

    rank: int
    node_rank: int
    path: Path
    generation: int
    attempt: int
    started: float = field(default_factory=time.time)
    """Unix seconds."""
    lines: deque[tuple[float, bytes]] = field(default_factory=lambda: deque(maxlen=_LINES))
    posts: deque[PostedProgress] = field(default_factory=lambda: deque(maxlen=_LINES))
    written: int = 0
    """Number of lines so far."""
    first_at: float = 0.0
    """When the first line arrived; monotonic seconds, as all times here."""
    last: bytes = b""
    step: int = -1
    step_at: float = 0.0
    writer: ProgressWriter | None = None
    activity: int = 0
    cpu: tuple[float, float, int] | None = None
    """When the processor time and the devices' execution count were last read, and their values."""

    @property
    def unmatched(self) -> bool:
        """Whether it has written output for long without a step."""
        return self.step < 0 < self.first_at < time.monotonic() - _UNMATCHED_SECONDS


class ProgramMonitor:
    """Follows ranks; those that do not report each step, without their cooperation."""

    def __init__(self, settings: AgentSettings, ranks: RankSpec) -> None:
        self._settings = settings
        self.ranks = ranks
        self._pattern = re.compile(ranks.progress_pattern.encode()) if ranks.progress_pattern else None
        self._ranks: dict[int, _Rank] = {}
        self._records: list[tuple[_Rank, ProgressRecord]] = []
        self._read_at = 0.0
        self._slow = 0
        self._backwards = ""
        self.end_problem = ""
        """Problem that the output of a rank shows although it ended with code 0."""
        self._checkpoints = CheckpointFolder(ranks.checkpoints) if ranks.checkpoints else None
        self._server: PostedProgressServer | None = None

    def on_output(self, layout: AttemptLayout, local_rank: int) -> Callable[[bytes], None] | None:
        """Start to follow a rank; return the callback for each line of its output, if it is needed.

        It is called in the output thread.
        """
        if self.ranks.reports_each_step:
            return None
        path = find_progress_file(self._settings, layout.generation, local_rank)
        rank = _Rank(layout.compute_rank(local_rank), layout.node_rank, path, layout.generation, layout.attempt)
        self._ranks = {**self._ranks, local_rank: rank}
        if local_rank == 0 and self._checkpoints is not None:
            self._checkpoints.list_now()  # the program resumes from the newest one

        def append_line(line: bytes) -> None:
            if not rank.written:
                rank.first_at = time.monotonic()
            rank.written += 1
            rank.last = line[:_LINE_BYTES]
            rank.lines.append((time.monotonic(), rank.last))

        return append_line

    def accept_posts(self, layout: AttemptLayout, local_rank: int) -> dict[str, str]:
        """Accept the progress that transformers posts from a rank of the next start; return the rank's environment."""
        if self._server is None:
            try:
                self._server = PostedProgressServer(self._settings.progress_directory)
            except OSError as error:
                _log.warning("progress that transformers posts is not received: %s", error)
                return {}
        start = f"{layout.generation}-{layout.attempt}-{local_rank}"

        def append_post(post: PostedProgress) -> None:
            rank = self._ranks.get(local_rank)
            if rank is not None and (rank.generation, rank.attempt) == (layout.generation, layout.attempt):
                rank.posts.append(post)

        return self._server.add_receiver(start, append_post)

    def observe(self, *, fresh: bool = False) -> None:
        """Read the ranks' progress in the main thread; `fresh`: also progress that was read a moment ago."""
        for rank in self._ranks.values():
            while rank.lines:
                at, line = rank.lines.popleft()
                if self._pattern is not None and self._slow < _SLOW_SEARCHES:
                    self._search(self._pattern, rank, at, line)
            while rank.posts:
                post = rank.posts.popleft()
                if self._pattern is None:
                    self._record_step(rank, post.step, post.at, total_steps=post.total_steps, **post.figures)
        now = time.monotonic()
        if fresh or now >= self._read_at + _READ_SECONDS:
            self._read_at = now
            readings = ((rank, self.read(rank.path)) for rank in self._ranks.values())
            self._records = [(rank, reading.record) for rank, reading in readings if reading is not None]
            if self._checkpoints is not None and self._records:
                self._checkpoints.record_step(*max((record.updated, record.step) for _, record in self._records))

    def read_newest(self, files: Sequence[Path]) -> tuple[ProgressRecord, Path] | None:
        """Return the record in `files` with the highest step, as of the last read, and its file.

        It is that of the first rank if all are in the same step. Called in the event loop.
        """
        if self.ranks.reports_each_step:
            first = read_progress(files[0]) if files else None
            return None if first is None else (first, files[0])
        # A spare that has trained before still has the records of its last ranks.
        records = [(record, rank.path) for rank, record in self._records if rank.path in files]
        return max(records, key=lambda record_path: record_path[0].step, default=None)

    def read(self, path: Path) -> ProgressReading | None:
        """Return the progress of a rank: from the library, else from its output, else only that the program runs.

        It may be called from any thread; `path` is the rank's progress file.
        """
        if self.ranks.reports_each_step:
            return read_with_pulse(path)
        rank = next((local_rank for local_rank in self._ranks.values() if local_rank.path == path), None)
        reported, printed = (
            reading if reading is not None and (rank is None or rank.attempt <= reading.record.attempt) else None
            for reading in map(read_with_pulse, (path, _find_output_record_path(path)))
        )
        if reported is not None and reported.record.step >= 0:
            return reported
        if printed is not None:
            return printed
        if reported is not None or rank is None:
            return reported
        # Most programs print steps on the first or the last rank only, so only the first node waits for one.
        awaits_step = self._pattern is not None and rank.node_rank == 0 and not rank.unmatched
        phase = ProgressPhase.LOADING if awaits_step else ProgressPhase.TRAINING
        record = ProgressRecord(
            pid=0, generation=rank.generation, attempt=rank.attempt, phase=phase, updated=rank.started
        )
        return ProgressReading(record, None)

    def on_finish(self, processes: Sequence[RankProcess]) -> str:  # noqa: ARG002 - what the program needs
        """List the folder once more for the last checkpoint of a program."""
        self.list_checkpoints(_LAST_LIST_SECONDS)
        return ""

    def list_checkpoints(self, seconds: float) -> None:
        """List the folder of the program's checkpoints again; blocks for at most so many seconds."""
        if self._checkpoints is not None:
            self._checkpoints.list_now().join(seconds)

    def step_limit(self, path: Path, limit: float) -> float:
        """Allow for unreported saves and validations between steps that are found in output."""
        prints_steps = any(rank.path == path and rank.writer is not None for rank in self._ranks.values())
        return max(limit, self._settings.hang.save_seconds) if prints_steps else limit

    def count_activity(self, process: RankProcess, now: float) -> int | None:
        """Return a count of the activity: output, processor time, use of the devices; None before any output."""
        rank = self._ranks.get(process.local_rank)
        if rank is None or not rank.written:
            return None
        if rank.cpu is None or now - rank.cpu[0] >= _CPU_SECONDS:
            pids = (process.pid, *list_descendants(process.pid))
            seconds, count = sum(kernel.read_process_state(pid).cpu_seconds for pid in pids), count_executions()
            if rank.cpu is not None:
                read_at, last_seconds, last_count = rank.cpu
                rank.activity += seconds - last_seconds >= _BUSY * (now - read_at) or count != last_count
            rank.cpu = (now, seconds, count)
        return rank.activity + rank.written

    @property
    def has_steps(self) -> bool:
        """Whether a rank of the current attempt has reported a step."""
        return any(record.step >= 0 for _, record in self._records)

    @property
    def has_all_steps(self) -> bool:
        """Whether a rank of the current attempt has reported the last step of the run."""
        return any(record.step >= record.total_steps > 0 for _, record in self._records)

    @property
    def hang_detection(self) -> HangDetection | None:
        """The signal that detects hangs now; None for ranks that report each step."""
        if self.ranks.reports_each_step:
            return None
        if not self._settings.hang.enabled:
            return HangDetection.OFF
        if self.has_steps:
            return HangDetection.STEPS
        return HangDetection.OUTPUT if any(rank.written for rank in self._ranks.values()) else HangDetection.OFF

    @property
    def problem(self) -> str:
        """Why steps or checkpoints cannot be read, and the remedy; empty while they can."""
        checkpoints = self._checkpoints.problem if self._checkpoints is not None else ""
        pattern = self._describe_pattern_problem() or self._backwards
        return self.end_problem or pattern or self._describe_different_steps() or checkpoints

    @property
    def durable_step(self) -> int:
        """Step of the newest checkpoint in the program's folder; -1 for none."""
        return self._checkpoints.newest if self._checkpoints is not None else -1

    def _search(self, pattern: re.Pattern[bytes], rank: _Rank, at: float, line: bytes) -> None:
        try:
            with limit_cpu_time(_SEARCH_SECONDS):
                plain = strip_escapes(line)
                match = pattern.search(plain) or (pattern.search(line) if plain != line else None)
        except TimeoutError:
            self._slow += 1
            return
        step = _parse_step(match)
        if match is not None and step is not None:
            figures = {name: _parse_number(match, name) for name in ("loss", "tokens_per_second", "samples_per_second")}
            self._record_step(rank, step, at, **figures)

    def _record_step(self, rank: _Rank, step: int, at: float, **figures: float) -> None:
        # A program that starts its own ranks, or that prints within a step, prints a step more than once. A
        # progress bar starts at 0, wherever the program resumes.
        if not step or step == rank.step:
            return
        if step < rank.step:
            self._backwards = (
                f"step {step} of rank {rank.rank} follows step {rank.step} within one start: print steps that count "
                "up, or have program.progress.pattern match lines of training only"
            )
        if rank.writer is None:
            rank.writer = self._open(rank, step)
        seconds = (at - rank.step_at) if rank.step_at else 0.0
        step_seconds = seconds / max(1, step - rank.step)
        rank.writer.publish(
            **figures,
            step=step,
            updated=time.time() - (time.monotonic() - at),
            step_seconds=step_seconds,
            productive_seconds=rank.writer.record.productive_seconds + seconds,
        )
        if seconds:
            rank.writer.pulse.complete_step(step_seconds)
        rank.step, rank.step_at = step, at

    def _open(self, rank: _Rank, step: int) -> ProgressWriter:
        """Create the record of a rank at its first step; earlier attempts count as far as the rank continues them."""
        writer = ProgressWriter(_find_output_record_path(rank.path), generation=rank.generation, attempt=rank.attempt)
        writer.record_resume(step, tokens=0, samples=0)  # the time of its first step is not known
        # Without a known checkpoint it resumed right before the first step that it prints.
        writer.publish(resume_step=self.durable_step if 0 <= self.durable_step < step else step - 1)
        return writer

    def _describe_pattern_problem(self) -> str:
        if self._pattern is None:
            return ""
        pattern = self._pattern.pattern.decode()
        if self._slow >= _SLOW_SEARCHES:
            return (
                f"program.progress.pattern {pattern} takes more than {_SEARCH_SECONDS * 1000:.0f} ms of CPU time a "
                "line and is no longer searched for: simplify it (no repetition inside a repetition)"
            )
        waited = [rank for rank in self._ranks.values() if rank.unmatched and rank.node_rank == 0]
        if not waited or self.has_steps:
            return ""
        shown = waited[0].last.decode(errors="replace").strip()[:_SHOWN_CHARACTERS]
        return (
            f"program.progress.pattern {pattern} has matched no line of output for {_UNMATCHED_SECONDS:.0f} s; the "
            f"last line of rank {waited[0].rank} is {shown!r}: correct the pattern"
        )

    def _describe_different_steps(self) -> str:
        """Compare the steps of the ranks at the same time; a difference of one step is always allowed."""
        steps = {rank.rank: record.step for rank, record in self._records if record.step >= 0}
        if not steps or max(steps.values()) - min(steps.values()) <= max(1, max(steps.values()) // 10):
            return ""
        slow, fast = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
        return (
            f"rank {slow} reports step {steps[slow]} and rank {fast} step {steps[fast]}: report the step of the "
            "optimizer, which is the same on all ranks"
        )


def count_executions() -> int:
    """Return how many programs the node's Neuron cores have executed; 0 if that cannot be read.

    Source: Neuron Sysfs User Guide of aws-neuron-sdk, and `neuron_sysfs_metrics.c` of aws-neuron-driver 2.24.7, where
    `success` counts completed executions. Driver 2.31 moved nodes of this tree; its paths have not been checked.
    """
    total = 0
    for path in _NEURON.glob("neuron*/neuron_core*/stats/status/success/total"):
        with contextlib.suppress(OSError, ValueError):
            total += int(path.read_text())
    return total


def _find_output_record_path(path: Path) -> Path:
    """Return the file of the steps that were found in output."""
    return path.with_name(f"{path.name}.output")


def _parse_step(match: re.Match[bytes] | None) -> int | None:
    digits = (match[STEP_GROUP] or b"").replace(b",", b"") if match is not None else b""
    return int(digits) if digits.isdigit() and len(digits) <= 18 else None


def _parse_number(match: re.Match[bytes], group: str) -> float:
    """Return the number in a group, which often has more than the number: `2.5,`, `1,024.0`, `tensor(2.5)`."""
    found = _NUMBER.search(match.groupdict().get(group) or b"")
    return float(found[0].replace(b",", b"")) if found is not None else float("nan")


@contextlib.contextmanager
def limit_cpu_time(seconds: float) -> Iterator[None]:
    """Raise TimeoutError when the block takes more processor time; only a signal ends the search of an expression.

    A busy node may suspend the agent for longer: that is not the expression's time.
    """
    is_armed = True

    def expire(_number: int, _frame: FrameType | None) -> None:
        if is_armed:
            raise TimeoutError

    previous = signal.signal(signal.SIGVTALRM, expire)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        is_armed = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
