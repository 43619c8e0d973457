"""Results of demos: checks, tables and plot of the second demo, and the view of a running job."""

import io
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from trainium_devcluster.demos.curves import Curves, Fault
from trainium_devcluster.demos.view import View
from trainium_devcluster.tune import report
from trainium_devcluster.tune.report import Evaluation, Figure

DOCUMENT: dict[str, Any] = {
    "examples": 120,
    "figures": [
        {"name": "perplexity", "before": 80.0, "after": 8.0},
        {"name": "exactMatch", "before": 0.0, "after": 0.3},
        {"name": "rougeL", "before": 0.1, "after": 0.6},
        {"name": "other", "after": 0.6},
    ],
    "answers": [
        {
            "prompt": "### Instruction\nList the arguments.\n\n### Context\nf(a)\n\n### Answer\n",
            "expected": "a",
            "before": "what " * 100,
            "after": "a",
        }
    ],
}


CURVES = Curves(2, {1: 4.0, 2: 3.0}, {1: 4.0, 2: 3.0}, (Fault("killed process", 1, 0.1, 1.5, 1.5, 0, 0),))


def evaluation_with(name: str, **change: float | None) -> Evaluation:
    figures = [{**figure, **change} if figure["name"] == name else figure for figure in DOCUMENT["figures"]]
    return Evaluation.from_json({**DOCUMENT, "figures": figures})


def test_a_tuned_model_is_better_in_each_figure() -> None:
    assert Evaluation.from_json(DOCUMENT).is_clearly_better


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("perplexity", {"after": 60.0}),
        ("rougeL", {"after": 0.15}),
        ("exactMatch", {"after": 0.05}),
        ("exactMatch", {"before": None}),
        ("perplexity", {"after": float("nan")}),
    ],
)
def test_a_model_that_is_hardly_better_in_one_figure_fails_the_demo(name: str, change: dict[str, float | None]) -> None:
    assert not evaluation_with(name, **change).is_clearly_better


@pytest.mark.parametrize(
    ("accuracy", "margin", "is_better"), [(0.9, 0.4, True), (0.65, 0.2, True), (0.6, 0.4, False), (0.9, -0.1, False)]
)
def test_most_preferred_answers_must_have_the_greater_reward(accuracy: float, margin: float, is_better: bool) -> None:
    figures = (Figure("rewardAccuracy", 0.5, accuracy), Figure("rewardMargin", 0.0, margin))
    assert Evaluation(120, figures, ()).is_clearly_better is is_better


def test_the_tables_show_figures_and_shortened_answers() -> None:
    screen = Console(width=110, file=io.StringIO(), record=True)
    evaluation = Evaluation.from_json(DOCUMENT)
    screen.print(report.format_figures(evaluation))
    screen.print(report.build_answer_table(evaluation))
    text = screen.export_text()
    assert "80.000" in text
    assert "List the arguments." in text
    assert "###" not in text
    assert "..." in text


def test_the_picture_has_the_figures_beside_the_curves(tmp_path: Path) -> None:
    report.draw_picture(CURVES, Evaluation.from_json(DOCUMENT), tmp_path / "tune.png")
    assert (tmp_path / "tune.png").read_bytes().startswith(b"\x89PNG")


def show_jobs(*statuses: dict[str, Any], terminal: bool) -> str:
    output = io.StringIO()
    with View(Console(file=output, width=110, force_terminal=terminal)) as view:
        for status in statuses:
            view.show({"metadata": {"namespace": "a", "name": "b"}, "spec": {}, "status": status})
    return output.getvalue()


RUNNING: dict[str, Any] = {"phase": "Running", "replicas": 3, "desired": 3, "progress": {"step": 7, "totalSteps": 20}}


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(("status", "shown"), [({}, "no status yet"), (RUNNING, "35.0 %  step 7/20")])
def test_a_running_job_is_shown_as_by_status(status: dict[str, Any], shown: str, terminal: bool) -> None:
    assert shown in show_jobs(status, terminal=terminal)


def test_a_file_has_one_line_for_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    text = show_jobs({}, {}, {}, RUNNING, RUNNING, {}, terminal=False)
    assert [line.split()[1].rstrip(";") for line in text.splitlines()] == ["no", "Running", "no"]
