"""View of a job for people: on a terminal a panel, elsewhere a line now and then."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
from rich.console import Console

from trainium_devcluster.demos.view import View

RUNNING: dict[str, Any] = {"phase": "Running", "readyReplicas": 2, "membership": {"size": 3}, "spares": 1}


def seen(status: dict[str, Any], newest: dict[str, Any], steps: int, *, terminal: bool) -> str:
    output = io.StringIO()
    console = Console(file=output, width=110, force_terminal=terminal)
    with View(console) as view:
        view.show("TrainingJob a/b", status, newest, steps)
    return output.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_job_whose_steps_are_not_known_yet_is_shown(terminal: bool) -> None:
    assert "?" in seen({}, {}, 0, terminal=terminal)


@pytest.mark.parametrize("terminal", [True, False])
def test_step_loss_and_workers_are_shown(terminal: bool) -> None:
    text = seen(RUNNING, {"step": 7, "loss": 2.5}, 20, terminal=terminal)
    for part in ("Running", "7", "20", "2.5000", "2/3 training, 1 spare"):
        assert part in text


@pytest.mark.parametrize("terminal", [True, False])
def test_a_stage_after_training_is_named_with_its_share(terminal: bool) -> None:
    status = {**RUNNING, "stage": "Evaluate", "stageProgress": 0.4}
    assert "Running (Evaluate 40%)" in seen(status, {"step": 20, "loss": 2.5}, 20, terminal=terminal)
    assert "Train" not in seen({**RUNNING, "stage": "Train"}, {}, 20, terminal=terminal).replace("TrainingJob", "")


def test_in_a_file_a_job_that_waits_is_reported_once_and_each_change_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    output = io.StringIO()
    with View(Console(file=output, width=110)) as view:
        for status in ({}, {}, {}, RUNNING, RUNNING, {}):
            view.show("TrainingJob a/b", status, {}, 20)
    assert [line.split()[2].rstrip(",") for line in output.getvalue().splitlines()] == ["Pending", "Running", "Pending"]
