"""The clients of the trackers; the package of a tracker is imported when its run is opened."""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainium_contract.trainer.monitor import Tracker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainium_trainer.trackers.process import TrackedRun

_log = logging.getLogger("trainium.trackers")
_RUN_TAG = "trainium.run"
_LONGEST_VALUE = 500
_NAME = re.compile(r"\w[\w -]{0,60}")
"""A part of a parameter's name."""
_MAX_PER_REQUEST = 100
"""The maximum number of parameters and tags per request to MLflow."""


@dataclass(frozen=True, slots=True)
class Step:
    """The figures of a completed step."""

    number: int
    at: float
    """Unix seconds of its end."""
    figures: Mapping[str, float]


class Service(Protocol):
    """A tracker. Its methods raise the errors of its library."""

    def open(self, run: TrackedRun, run_id: str) -> int | None:
        """Create the run or open it again; return its newest step, 0 for none, None if unknown."""

    def send(self, steps: Sequence[Step]) -> None:
        """Add steps, in order."""

    def describe(self, text: str) -> None:
        """Replace the description of the run."""

    def close(self) -> None:
        """Mark the run as finished."""

    def leave(self) -> None:
        """Flush the library's buffers: rank 0 has ended, but the run has not."""


class MLflow:
    """A run of an MLflow server, found by a tag with the identity of the run."""

    def open(self, run: TrackedRun, run_id: str) -> int:
        """See the protocol."""
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        from mlflow import MlflowClient  # noqa: PLC0415 - an extra
        from mlflow.exceptions import MlflowException  # noqa: PLC0415 - as above

        self._client = MlflowClient()
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.project
        experiment = self._client.get_experiment_by_name(project)
        experiment_id = self._client.create_experiment(project) if experiment is None else experiment.experiment_id
        runs = self._client.search_runs([experiment_id], f"tags.`{_RUN_TAG}` = '{run_id}'", max_results=1)
        started = (
            runs[0] if runs else self._client.create_run(experiment_id, tags={_RUN_TAG: run_id}, run_name=run.name)
        )
        self._id = started.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        try:
            self._add_parameters(run, started.data.params)
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            _log.warning("MLflow: the settings of the run are not recorded (%s); its steps are", error.message)
        return int(started.data.metrics.get("step", 0))

    def _add_parameters(self, run: TrackedRun, recorded: Mapping[str, str]) -> None:
        """Log the configuration. A parameter keeps its first value; a later one is a tag."""
        from mlflow.entities import Param, RunTag  # noqa: PLC0415 - an extra

        values = {**_flatten(run.config), **_flatten(run.facts)}
        new = [Param(name, value) for name, value in values.items() if name not in recorded]
        tags = [
            RunTag(f"changed.{name}", value) for name, value in values.items() if recorded.get(name, value) != value
        ]
        for begin in range(0, max(len(new), len(tags)), _MAX_PER_REQUEST):
            part = slice(begin, begin + _MAX_PER_REQUEST)
            self._client.log_batch(self._id, params=new[part], tags=tags[part])

    def send(self, steps: Sequence[Step]) -> None:
        """See the protocol. `open` reads the metric `step` to continue."""
        from mlflow.entities import Metric  # noqa: PLC0415 - an extra

        metrics = [
            Metric(name, value, int(step.at * 1000), step.number)
            for step in steps
            for name, value in (*step.figures.items(), ("step", step.number))
        ]
        for begin in range(0, len(metrics), 1000):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + 1000])

    def describe(self, text: str) -> None:
        """See the protocol."""
        self._client.set_tag(self._id, "mlflow.note.content", text)

    def close(self) -> None:
        """See the protocol."""
        self._client.set_terminated(self._id, "FINISHED")

    def leave(self) -> None:
        """See the protocol: each request was answered."""


class WandB:
    """A run of Weights & Biases; offline, a run of each start in the folder of the records."""

    def open(self, run: TrackedRun, run_id: str) -> int | None:
        """See the protocol."""
        import wandb  # noqa: PLC0415 - an extra

        folder = os.environ.get("WANDB_DIR") or str(Path(run.metrics).parent)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or run.project,
            name=run.name,
            id=run_id,
            resume="allow",
            dir=folder,
            config={**run.config, "facts": run.facts},
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, init_timeout=30),
        )
        if self._run.offline:
            return None
        return int(self._run.starting_step) - 1 if self._run.resumed else 0

    def send(self, steps: Sequence[Step]) -> None:
        """See the protocol."""
        for step in steps:
            self._run.log(dict(step.figures), step=step.number)

    def describe(self, text: str) -> None:
        """See the protocol."""
        self._run.notes = text

    def close(self) -> None:
        """See the protocol."""
        self._run.finish()

    def leave(self) -> None:
        """See the protocol."""
        self._run.finish(exit_code=1)


SERVICES: dict[str, Callable[[], Service]] = {Tracker.MLFLOW: MLflow, Tracker.WANDB: WandB}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested settings by dotted names, as short texts; settings by pattern stay together as JSON.

    MLflow refuses names with other characters than these.
    """
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict) and not all(_NAME.fullmatch(key) for key in value):
            flat[f"{prefix}{name}"] = json.dumps(value)[:_LONGEST_VALUE]
        elif isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        elif value is not None:
            flat[f"{prefix}{name}"] = str(value)[:_LONGEST_VALUE]
    return flat
