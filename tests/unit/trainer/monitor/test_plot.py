"""Pictures of a run's history: their content, and the messages when they cannot be drawn."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from trainium_trainer.cli import run as command
from trainium_trainer.monitor.plot import read_history, running_mean

if TYPE_CHECKING:
    from pathlib import Path


def a_run(folder: Path, steps: int = 6, **changes: Any) -> Path:
    folder.mkdir()
    lines = [
        {"step": step, "loss": 9.0 / step, "gradNorm": 1.0, "learningRate": 0.1, "tokens": step * 100}
        | {"tokensPerSecond": 50.0, "goodput": 0.9, "mfu": 0.4}
        | ({"validationLoss": 8.0 / step} if step % 2 == 0 else {})
        | ({"resumed": True} if step == 4 else {})
        | changes
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_history_has_what_was_measured_and_where_the_run_was_resumed(tmp_path: Path) -> None:
    history = read_history(a_run(tmp_path / "one"))
    assert history.values("validationLoss") == ([2, 4, 6], [4.0, 2.0, 8.0 / 6])
    assert history.restarts == [4]
    assert history.name == read_history(tmp_path / "one" / "metrics.jsonl").name == "one"


def test_a_line_that_is_still_being_written_is_left_out(tmp_path: Path) -> None:
    with (a_run(tmp_path / "one") / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    assert len(read_history(tmp_path / "one").lines) == 6


def test_a_running_mean_is_of_the_newest_values() -> None:
    assert running_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize("count", [1, 2])
def test_one_run_or_several_are_drawn(tmp_path: Path, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(a_run(tmp_path / f"run-{number}", steps=120)) for number in range(count)]
    picture = tmp_path / "picture.png"
    assert command(["plot", *runs, "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.strip() == str(picture)


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
    assert command(["plot", str(tmp_path), "--output", str(tmp_path / "x.png")]) == 64
    error = capsys.readouterr().err
    assert "metrics.jsonl" in error
    assert message in error


@pytest.mark.parametrize("name", ["x.nonsense", "none/x.png"])
def test_a_picture_that_cannot_be_written_is_the_callers_mistake(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["plot", str(a_run(tmp_path / "one")), "--output", str(tmp_path / name)]) == 64
    assert name in capsys.readouterr().err


def test_without_matplotlib_it_names_the_package_to_install(tmp_path: Path) -> None:
    script = (
        "import sys\nsys.modules['matplotlib'] = None\n"
        "from trainium_trainer.cli import run\nsys.exit(run(sys.argv[1:]))\n"
    )
    arguments = ["plot", str(a_run(tmp_path / "one")), "--output", str(tmp_path / "x.png")]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 64
    assert "pip install matplotlib" in done.stderr
