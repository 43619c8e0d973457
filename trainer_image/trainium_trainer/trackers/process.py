"""Start the process that sends a run to its trackers, and send it the facts that are not in metrics.jsonl."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.trainer.monitor import Tracker
from trainium_trainer.exits import UserError
from trainium_trainer.monitor.writers import METRICS_NAME

if TYPE_CHECKING:
    from pathlib import Path

    from trainium_contract.status.results import ArtifactReport
    from trainium_trainer.configuration.config import Settings

_MODULES = {Tracker.MLFLOW: "mlflow", Tracker.WANDB: "wandb"}
STATE_NAME = "trackers.json"
"""The file with the newest sent step of each tracker, next to the metrics of the run."""
STARTS_NAME = "starts.jsonl"
"""The file with the starts of the run, next to its metrics; rank 0 writes it, because it may end before that process
starts.
"""
_FINISH_SECONDS = 30.0
"""The time that a finished run waits for the next lines to be sent."""
_LONGEST_FINISH_SECONDS = 300.0
"""The limit of the whole wait."""
_POLL_SECONDS = 0.2
_PROJECT = "trainium"

_log = logging.getLogger("trainium.trackers")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run in trackers; sent to their process as JSON."""

    trackers: tuple[str, ...]
    project: str
    name: str
    run_id: str
    """The identity over all restarts; empty: the process draws one and stores it next to the metrics."""
    metrics: str
    """The path of metrics.jsonl."""
    notice: str
    """The path of the progress record, next to which notices are written; empty for none."""
    config: dict[str, Any]
    facts: dict[str, Any]
    """The digests of data, tokenizer and base, by their names in checkpoints."""
    start: str
    """The description of this start."""


def find_missing_trackers(trackers: tuple[Tracker, ...] | None) -> list[str]:
    """Return a message for each tracker whose package is not installed."""
    return [
        f"monitor.trackers: {tracker} needs the package {_MODULES[tracker]}, which is not installed here: "
        f"pip install 'trainium-trainer[{_MODULES[tracker]}]' in the image, or remove {tracker}"
        for tracker in trackers or ()
        if importlib.util.find_spec(_MODULES[tracker]) is None
    ]


def refuse_missing_trackers(trackers: tuple[Tracker, ...] | None) -> None:
    """Raise UserError if a tracker's package is missing."""
    if missing := find_missing_trackers(trackers):
        raise UserError("; ".join(missing))


def record_start(root: Path, run_id: str, start: str) -> None:
    """Append the description of a start to the file of starts."""
    try:
        with (root / STARTS_NAME).open("a") as file:
            file.write(json.dumps([run_id, start]) + "\n")
    except OSError as error:
        _log.warning("%s: cannot be written (%s): trackers do not show this start", STARTS_NAME, error.strerror)


class TrackerProcess:
    """The process of rank 0 that sends the run. It ends with rank 0; the next start sends the remaining steps."""

    def __init__(self, settings: Settings, root: Path, facts: dict[str, Any], *, step: int) -> None:
        """Start the process; training continues if that fails."""
        launch, monitor = settings.launch, settings.config.monitor
        nodes = launch.world_size // launch.local_world_size
        run = TrackedRun(
            trackers=tuple(monitor.trackers or ()),
            project=monitor.tracker_project or launch.job.namespace or _PROJECT,
            name=launch.job.name or root.name,
            run_id=launch.run_id,
            metrics=str(root / METRICS_NAME),
            notice="" if launch.progress_file is None else str(launch.progress_file),
            config=settings.config.to_wire(),
            facts=facts,
            start=f"after step {step} on {nodes} node{'s' * (nodes > 1)}"
            + (f", generation {launch.generation}.{launch.attempt}" if launch.generation else "")
            + (f", because of {launch.cause}" if launch.cause else ""),
        )
        record_start(root, run.run_id, run.start)
        command = [sys.executable, "-m", "trainium_trainer.trackers"]
        self._state = root / STATE_NAME
        self._process: subprocess.Popen[str] | None = None
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        except OSError as error:
            _log.warning("trackers: %s cannot be started (%s): training continues without", command[0], error.strerror)
        self._write({"run": {name: getattr(run, name) for name in run.__slots__}})

    def link(self, artifact: ArtifactReport) -> None:
        """Add an artifact of the run."""
        self._write({"artifact": artifact.to_wire()})

    def close(self, *, finished: bool) -> None:
        """End the process; if the run has `finished`, after it has sent the last lines."""
        process = self._process
        if process is None or process.stdin is None:
            return
        if finished:
            self._write({"finish": True})
            if not self._wait_for_end(process):
                _log.warning("trackers: not all was sent in time; metrics.jsonl has it")
        process.kill()
        process.wait()
        with contextlib.suppress(OSError):
            process.stdin.close()

    def _wait_for_end(self, process: subprocess.Popen[str]) -> bool:
        """Wait for the process to end while it sends steps; return whether it ended."""
        newest, now = 0, time.monotonic()
        latest, deadline = now + _LONGEST_FINISH_SECONDS, now + _FINISH_SECONDS
        while time.monotonic() < min(deadline, latest):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)
                return True
            with contextlib.suppress(OSError):
                if newest != (newest := self._state.stat().st_mtime_ns):
                    deadline = time.monotonic() + _FINISH_SECONDS
        return False

    def _write(self, message: dict[str, Any]) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # the process has ended and reported the reason
                self._process.stdin.write(json.dumps(message) + "\n")
                self._process.stdin.flush()
