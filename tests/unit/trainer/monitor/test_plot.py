"""Plot the history of runs, and report when a plot is impossible."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainium_trainer.cli import run as run_command
from trainium_trainer.monitor.plot import XAxis, compute_loss_difference, compute_running_mean, read_history


def write_run(folder: Path, steps: int = 6, **changes: Any) -> Path:
    folder.mkdir()
    lines = [
        {"step": step, "loss": 9.0 / step, "gradNorm": 1.0, "learningRate": 0.1, "tokens": step * 100}
        | {"tokensPerSecond": 50.0, "timeInSteps": 0.9, "mfu": 0.4}
        | ({"validationLoss": 8.0 / step} if step % 2 == 0 else {})
        | ({"resumed": True} if step == 4 else {})
        | changes
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_history_has_measured_values_and_restarts(tmp_path: Path) -> None:
    history = read_history(write_run(tmp_path / "one"))
    assert history.list_values("validationLoss") == ([2, 4, 6], [4.0, 2.0, 8.0 / 6])
    assert history.restarts == [4]
    assert history.name == read_history(tmp_path / "one" / "metrics.jsonl").name == "one"


def test_an_incomplete_line_is_left_out(tmp_path: Path) -> None:
    with (write_run(tmp_path / "one") / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    assert len(read_history(tmp_path / "one").lines) == 6


def test_a_running_mean_is_of_the_newest_values() -> None:
    assert compute_running_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_one_run_or_several_are_drawn(tmp_path: Path, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(write_run(tmp_path / f"run-{number}", steps=120)) for number in range(count)]
    picture = tmp_path / "picture.png"
    assert run_command(["plot", *runs, "--by", "tokens", "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.strip() == str(picture)


def test_figures_of_models_are_drawn_over_tokens_with_their_standard_errors(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one")
    for step, name, value in (
        (2, "milestone", 0.25),
        (6, "milestone", 0.3),
        (6, "evaluation", 0.5),
        (9, "milestone", 1),
    ):
        folder = run / f"artifacts/step-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        figures = [{"name": "perplexity", "after": 9.0}, {"name": "mmlu acc", "after": value, "standardError": 0.02}]
        (folder / f"{name}.json").write_text(json.dumps({"model": "m", "figures": figures}))
    (run / "artifacts/step-6/model").mkdir()
    (run / "artifacts/step-4").mkdir()
    (run / "artifacts/step-4/milestone.json").write_text('{"figures": [{"na')
    history = read_history(run, XAxis.TOKENS)
    assert set(history.evaluations) == {"mmlu acc"}
    assert history.list_figures("mmlu acc") == ([200, 600], [0.25, 0.5], [0.02, 0.02])
    picture = tmp_path / "picture.svg"
    assert run_command(["plot", str(run), "--by", "tokens", "--output", str(picture)]) == 0
    assert "evaluation of models, with standard errors" in picture.read_text()


def test_runs_of_other_batches_are_compared_at_the_same_tokens(tmp_path: Path) -> None:
    first = read_history(write_run(tmp_path / "one"), XAxis.TOKENS)
    (tmp_path / "other").mkdir()
    lines = [{"step": step, "loss": 1.0, "tokens": step * 150} for step in range(1, 6)]
    (tmp_path / "other" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokens, differences = compute_loss_difference(first, read_history(tmp_path / "other", XAxis.TOKENS))
    assert tokens == [150, 300, 450, 600], "the first run has fewer than 750 tokens"
    assert differences == pytest.approx([1 - (9.0 + 4.5) / 2, 1 - 3.0, 1 - (2.25 + 1.8) / 2, 1 - 1.5])


def test_spikes_are_counted_with_their_lengths_once_they_have_ended(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", steps=9)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = zip(lines, [0, 1, 0, 1, 2, 3, 0, 1, 0], strict=True)
    (run / "metrics.jsonl").write_text(
        "".join(
            json.dumps(line | {"spikeSteps": count, "spikeCounted": line["step"] < 8 and count > 0}) + "\n"
            for line, count in steps
        )
    )
    assert read_history(run).spike_lengths == [1, 3], "the last is noise"


def test_the_speed_by_number_of_nodes_is_a_table_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = write_run(tmp_path / "small", steps=4, nodes=1, batch=8, seconds=2.0)
    large = write_run(tmp_path / "large", steps=8, nodes=4, batch=8, seconds=0.625)
    assert run_command(["plot", "--scaling", str(small), str(large), "--output", str(tmp_path / "x.png")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "NODES    STEPS MEDIAN STEP  SAMPLES/S     TOKENS/S EFFICIENCY",
        "    1        2     2.000 s          4           50     100.0%",
        "    4        6     0.625 s       12.8          160      80.0%",
        str(tmp_path / "x.png"),
    ], "the first steps after a start are left out"


def test_a_run_without_measured_steps_has_no_scaling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run_command(["plot", "--scaling", str(write_run(tmp_path / "one")), "--output", str(tmp_path / "x.png")]) == 64
    )
    assert "train longer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (None, "cannot be read"),
        ("", "no step is recorded yet"),
        ("nonsense\n", "line 1 is not a step's line"),
        ('{"loss": 1}\n', "line 1 is not a step's line"),
    ],
)
def test_a_path_without_a_run_is_reported(
    tmp_path: Path, lines: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if lines is not None:
        (tmp_path / "metrics.jsonl").write_text(lines)
    assert run_command(["plot", str(tmp_path), "--output", str(tmp_path / "x.png")]) == 64
    error = capsys.readouterr().err
    assert "metrics.jsonl" in error
    assert message in error


@pytest.mark.parametrize("name", ["x.nonsense", "none/x.png"])
def test_a_picture_that_cannot_be_written_is_an_error_of_the_user(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["plot", str(write_run(tmp_path / "one")), "--output", str(tmp_path / name)]) == 64
    assert name in capsys.readouterr().err


def test_a_missing_matplotlib_is_named(tmp_path: Path) -> None:
    script = (
        "import sys\nsys.modules['matplotlib'] = None\n"
        "from trainium_trainer.cli import run\nsys.exit(run(sys.argv[1:]))\n"
    )
    arguments = ["plot", str(write_run(tmp_path / "one")), "--output", str(tmp_path / "x.png")]
    completed = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert completed.returncode == 64
    assert "pip install matplotlib" in completed.stderr
