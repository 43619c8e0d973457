"""Report the progress of a training program to the agent of its pod; without an agent each call does nothing.

    import trainium_worker

    for step in range(first, last + 1):
        loss = train(step)
        trainium_worker.step(step, loss=loss, tokens=batch_tokens)
        if trainium_worker.should_stop():
            save(step)
            trainium_worker.saved(step, path)
            sys.exit(trainium_worker.STOPPED)

The trainer of this project writes the same record (`progress_record`), and the agent reads both in the same way.

Guarantees:
- The module needs only Python 3.9.
- All ranks get True from `should_stop` after the same step: the agents choose it once each rank waits or has passed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_worker.progress_record import STOP_PENDING, TRAIN, ProgressWriter
from trainium_worker.pulse import Activity, Waiting

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import SupportsFloat, SupportsIndex

__all__ = ["MEMORY", "STOPPED", "endpoints", "generation", "notice", "rank", "saved", "should_stop", "stage", "step"]

rank: int
"""The rank of this process, from 0."""
generation: int
"""The generation of the job's membership of this process; 0 without an agent."""

ENV_PROGRESS_FILE = "TRAINIUM_PROGRESS_FILE"
"""The path of the record; the agent sets it for each process."""
ENV_GENERATION = "TRAINIUM_GENERATION"
ENV_ATTEMPT = "TRAINIUM_ATTEMPT"
ENV_WORLD_SIZE = "TRAINIUM_WORLD_SIZE"
"""The number of processes that the agents started; a launcher in them starts more, and sets another WORLD_SIZE."""
ENV_ROLES_FILE = "TRAINIUM_ROLES_FILE"
"""The path of the file with the addresses of the job's roles; the agent replaces it at each change."""
MEMORY = "memory"
"""`location` of `saved` for a snapshot in the memory of the nodes."""
STOPPED = 75
"""The exit code of a program that saved and exited because of `should_stop`: it is not complete."""

_STOP_POLL_SECONDS = 0.005
_STOP_TIMEOUT_SECONDS = 60.0
GENERATE = "Generate"
"""The stage of a wait for answers, for instance of the pods of a role: a part of the step."""
_ACTIVITIES = {
    "Load": Activity.LOAD,
    "Compile": Activity.COMPILE,
    "Save": Activity.SAVE,
    "Export": Activity.SAVE,
    "Evaluate": Activity.SAVE,
    GENERATE: Activity.SAVE,
    TRAIN: Activity.STEP,
}
"""The activities of the stages whose limits for a hang differ from those of steps."""


class _Reporter:
    """Writes the reports of this process, which may come from several threads."""

    def __init__(self, writer: ProgressWriter) -> None:
        self.pid = os.getpid()
        self._writer = writer
        self._lock = threading.Lock()
        self._step_started: float | None = None
        """The monotonic time of the start of the current step, if known."""
        self._stops = False

    def step(self, number: int, figures: dict[str, float | None], consumed: Mapping[str, int]) -> None:
        """Record a completed step."""
        writer = self._writer
        with self._lock:
            now, previous = time.monotonic(), writer.record.step
            seconds = 0.0 if self._step_started is None else now - self._step_started
            if previous < 0:
                writer.record_resume(number - 1, tokens=0, samples=0)
            elif number < previous:
                writer.write_notice(
                    f"rank {__getattr__('rank')} reported step {number} after step {previous}: report steps as a "
                    "number that rises by one with each step of the optimizer, also after a resume"
                )
            elif number == previous:  # a further call for the same step
                writer.publish(**figures)
                writer.pulse.enter(Activity.STEP, Waiting.MAYBE)
                return
            self._step_started = now
            for name, count in consumed.items():
                figures[f"{name}_per_second"] = count / seconds if seconds > 0 else None
                figures[name] = getattr(writer.record, name) + count
            writer.complete_step({"step": number, **figures}, seconds=seconds)
            writer.pulse.enter(Activity.STEP, Waiting.MAYBE)

    def saved(self, step: int, *, memory: bool) -> None:
        with self._lock:
            self._writer.publish(**{"memory_step" if memory else "durable_step": step})

    def stage(self, name: str, done: float) -> None:
        writer = self._writer
        with self._lock:
            if name != GENERATE:
                self._step_started = time.monotonic()
            writer.record_stage(name, done)
            writer.pulse.enter(_ACTIVITIES.get(name, Activity.STEP if writer.record.step >= 0 else Activity.INIT))

    def notice(self, sentence: str) -> None:
        self._writer.write_notice(sentence)

    def should_stop(self) -> bool:
        """Return whether to save and exit; waits while the agents agree on the step."""
        writer = self._writer
        with self._lock:
            answer = writer.check_stop()
            check = writer.record.stop_checks
        if answer == STOP_PENDING:
            deadline = time.monotonic() + _STOP_TIMEOUT_SECONDS
            with writer.pulse.waiting_for_peers:
                while answer == STOP_PENDING and time.monotonic() < deadline:
                    time.sleep(_STOP_POLL_SECONDS)
                    answer = writer.read_stop_answer()
        self._stops = 0 < answer <= check
        return self._stops

    def is_kept(self, step: int) -> bool:
        """Return whether a step is in memory that remains after the stop."""
        writer = self._writer
        return self._stops and writer.read_memory_remains() and writer.record.memory_step == step

    @property
    def is_ending(self) -> bool:
        """Whether the process stops, or has reported the last step."""
        return self._stops or self._writer.record.step >= self._writer.record.total_steps > 0


_reporter: _Reporter | None = None
_reporter_lock = threading.Lock()


def _current_reporter() -> _Reporter:
    """Return the reporter of this process, which the first call opens, and the first call in a fork."""
    global _reporter  # noqa: PLW0603 - one process has one record
    with _reporter_lock:
        if _reporter is None or _reporter.pid != os.getpid():
            _reporter = _Reporter(_open_record(os.environ.get(ENV_PROGRESS_FILE)))
        return _reporter


def count_launched_ranks() -> int:
    """Return the number of ranks that a launcher started in each process of the agents; 1 without a launcher."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return max(1, world_size // int(os.environ.get(ENV_WORLD_SIZE, world_size)))


def _open_record(path: str | None) -> ProgressWriter:
    """Return the record of this process; without an agent, or if the file cannot be written, one without a reader.

    The ranks of a launcher have one record, which its first rank writes.
    """
    path = path if count_launched_ranks() == 1 or os.environ.get("LOCAL_RANK") == "0" else None
    attempt = int(os.environ.get(ENV_ATTEMPT, "0"))
    try:
        return ProgressWriter(Path(path) if path else None, generation=__getattr__("generation"), attempt=attempt)
    except OSError as error:
        sys.stderr.write(f"trainium_worker: nothing is reported to the agent: {path}: {error.strerror}\n")
        return ProgressWriter(None)


def __getattr__(name: str) -> int:
    """Return the current `rank` and `generation` of the environment: a warm process is forked before it has a rank."""
    if name == "rank":
        return int(os.environ.get("RANK", "0"))
    if name == "generation":
        return int(os.environ.get(ENV_GENERATION, "0"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def step(
    number: SupportsIndex,
    *,
    loss: SupportsFloat | None = None,
    tokens: SupportsIndex | None = None,
    samples: SupportsIndex | None = None,
    learning_rate: SupportsFloat | None = None,
    grad_norm: SupportsFloat | None = None,
    total_steps: SupportsIndex | None = None,
    **figures: SupportsFloat,
) -> None:
    """Report that the optimizer has completed its step `number`, counted from 1 over the whole run.

    Call it on every rank after each step, and after a resume with the number that continues the run. A second call for
    a step adds to the first.

    tokens, samples: of this step, over all ranks. figures: others by their names in the status of a job, for instance
    `reward_margin`. A loss on a device is copied, which waits for the device.
    """
    completed = index(number)
    optional = {"loss": loss, "learning_rate": learning_rate, "grad_norm": grad_norm, **figures}
    measured: dict[str, float | None] = {name: float(value) for name, value in optional.items() if value is not None}
    if total_steps is not None:
        measured["total_steps"] = index(total_steps)
    counts = {"tokens": tokens, "samples": samples}
    consumed = {name: index(count) for name, count in counts.items() if count is not None}
    _current_reporter().step(completed, measured, consumed)


def saved(step: SupportsIndex, location: str | os.PathLike[str]) -> None:
    """Report that the checkpoint of a step is complete: in a folder or bucket, or in `MEMORY`."""
    _current_reporter().saved(index(step), memory=os.fspath(location) == MEMORY)


def stage(name: str, done: float = 0.0) -> None:
    """Report the stage of the program and its completed fraction (0 to 1).

    `load`, `compile`, `save`, `export`, `evaluate` and `generate` have separate limits for a hang; `train` and each
    step end them.
    A name has at most 32 bytes.
    """
    _current_reporter().stage(name[:1].upper() + name[1:], done)


def notice(sentence: str) -> None:
    """Show a message in the status of the job, in place of the last one."""
    _current_reporter().notice(sentence)


def endpoints(role: str) -> tuple[str, ...]:
    """Return `address:port` of each pod of a role of the job that is ready now; empty while none is.

    The pods change while the program runs, so call it before each round of requests. Without an agent the variable
    TRAINIUM_ROLE_<ROLE> has the addresses, separated by commas. Raises LookupError for a role that the job lacks.
    """
    path = os.environ.get(ENV_ROLES_FILE)
    if path is not None:
        addresses = json.loads(Path(path).read_text(encoding="utf-8"))
    else:
        name = "TRAINIUM_ROLE_" + role.upper().replace("-", "_")
        addresses = {role: list(filter(None, os.environ[name].split(",")))} if name in os.environ else {}
    if role not in addresses:
        raise LookupError(
            f"the job has no role {role!r}, only {sorted(addresses)}: add it to spec.roles, or correct the name"
        )
    return tuple(addresses[role])


def should_stop() -> bool:
    """Return whether to save and exit now, with exit code `STOPPED`.

    Call it on every rank, once after each step: it is True on all ranks after the same step, without a collective.
    The agents do not see each rank of a launcher: there it is always False, and the launcher gets SIGTERM.
    """
    if count_launched_ranks() > 1:
        return False
    return _current_reporter().should_stop()


def is_ending() -> bool:
    """Return whether `should_stop` was True, or the last of `total_steps` is reported: the same on all ranks."""
    return _current_reporter().is_ending


def is_kept(step: int) -> bool:
    """Return whether `should_stop` was True, and this rank has saved the step to memory that remains after it."""
    return _current_reporter().is_kept(step)
