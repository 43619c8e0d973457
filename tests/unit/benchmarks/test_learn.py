"""Results of `make learn` from a run's metrics: the curve, the verdict, the page and the picture."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.learn import document
from benchmarks.learn.__main__ import BASE, curve, last_speed, passed, write_config
from trainium_trainer.configuration import config as configuration

if TYPE_CHECKING:
    from pathlib import Path


def metrics(validation: list[float]) -> list[dict[str, Any]]:
    """Two steps of 3 s and 1,000 tokens before each validation."""
    lines = []
    for step in range(1, 2 * len(validation) + 1):
        lines.append({"step": step, "time": 100.0 + 3 * step, "seconds": 3.0, "tokens": 1000 * step})
        lines[-1] |= {"loss": 8.0 / step, "learningRate": 1e-3}
        if step % 2 == 0:
            lines[-1]["validationLoss"] = validation[step // 2 - 1]
    return lines


def report(validation: list[float]) -> dict[str, Any]:
    made = {
        "seconds": 600.4,
        "processorSeconds": 1100.0,
        "versions": {"torch": "2.9", "python": "3.11"},
        "machine": "2 cores",
        "ranks": 2,
        "date": "2026-01-01",
        "settings": BASE,
        "parameters": 1_234_567,
        "steps": 2 * len(validation),
        "tokens": {"training": 5000, "validation": 500, "batch": 1000, "trained": 1000 * 2 * len(validation)},
        "nGrams": {"1": 7.0, "2": 5.0, "3": 4.5, "5": 4.3},
        "yardstick": 2,
        "curve": curve(metrics(validation)),
    }
    return made | {"passed": passed(made)}


def test_a_curve_has_the_time_since_the_first_step_began_and_the_mean_loss_since_the_last_validation() -> None:
    first, second = curve(metrics([6.0, 5.5]))
    assert first == {
        "step": 2,
        "seconds": 6.0,
        "tokens": 2000,
        "learningRate": 1e-3,
        "training": (8.0 + 4.0) / 2,
        "validation": 6.0,
    }
    assert second["seconds"] == 12.0
    assert second["training"] == (8.0 / 3 + 2.0) / 2


@pytest.mark.parametrize(
    ("validation", "verdict"),
    [([6.0, 5.5, 4.9], True), ([6.0, 5.5, 5.1], False), ([6.0, 4.8, 4.9], False), ([6.0, 4.9, 4.9], False)],
)
def test_a_run_has_learned_when_it_ends_below_the_yardstick_and_still_falls(
    validation: list[float], *, verdict: bool
) -> None:
    assert passed(report(validation)) is verdict


def test_the_page_has_the_run_among_the_n_grams_and_reports_it_when_it_fell_short(tmp_path: Path) -> None:
    document.write(report([6.0, 5.5, 4.9]), tmp_path / "learning.md", tmp_path / "images/learning.png")
    page = (tmp_path / "learning.md").read_text()
    assert "ends at 4.900, against 5.000 for bigrams, 0.600 lower" in page
    assert page.index("bigrams | 5.000") < page.index("**this model** | 4.900") < page.index("trigrams | 4.500")
    assert "1,234,567 parameters (4 layers, 192 wide" in page
    assert page.rstrip().splitlines()[-1] == "| 6 | 18 | 6,000 | 0.001 | 1.467 | 4.900 | 134.3 |"
    assert (tmp_path / "images/learning.png").read_bytes().startswith(b"\x89PNG")
    assert document.sentence(report([6.0, 5.5, 5.1])).startswith("NOT REACHED. Its validation loss ends at 5.100")


def test_the_speed_is_that_of_the_newest_half_and_the_file_is_a_configuration(tmp_path: Path) -> None:
    lines = metrics([6.0, 5.5, 4.9, 4.8])
    lines[0]["seconds"] = 300.0
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert last_speed(tmp_path / "metrics.jsonl") == pytest.approx(1000 / 3)
    config = configuration.load(write_config(BASE, tmp_path, 740))
    assert (config.steps, config.schedule.warmup_steps, config.schedule.decay_steps) == (740, 37, 296)
    assert config.data.validation is not None
    assert config.data.validation.every_steps == 74
