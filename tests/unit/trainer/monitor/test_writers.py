"""A resume leaves one whole history, also when a rank was lost between a step's end and the writing of its line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from trainium_trainer.monitor.figures import StepFigures
from trainium_trainer.monitor.lines import first_line, newest_lines
from trainium_trainer.monitor.writers import METRICS_NAME, Recorder, ScalarWriter

if TYPE_CHECKING:
    from pathlib import Path


def record(step: int) -> dict[str, Any]:
    return figures(step).to_json()


def figures(step: int) -> StepFigures:
    return StepFigures(
        step=step, loss=2.0, grad_norm=1.0, learning_rate=0.1, tokens=step * 10, samples=step * 2, batch=2
    )


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_step_that_rank_0_did_not_record_is_recorded_at_the_resume(tmp_path: Path) -> None:
    write(tmp_path / METRICS_NAME, [record(1), record(2)])

    assert Recorder.lacks(tmp_path, 3)
    Recorder.mend(tmp_path, figures(3))

    assert [line["step"] for line in lines(tmp_path / METRICS_NAME)] == [1, 2, 3]
    assert not Recorder.lacks(tmp_path, 3)


def test_samples_of_a_resumed_step_that_are_recorded_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "samples-0.jsonl", [{"step": 3, "samples": [4, 5]}])

    Recorder.mend_samples(tmp_path, 3, (4, 5))

    assert lines(tmp_path / "samples-0.jsonl") == [{"step": 3, "samples": [4, 5]}]


def test_samples_of_the_resumed_step_that_nobody_recorded_are_added_once(tmp_path: Path) -> None:
    write(tmp_path / "samples-0.jsonl", [{"step": 2, "samples": [1, 2]}])
    write(tmp_path / "samples-1.jsonl", [{"step": 2, "samples": [8, 9]}, {"step": 3, "samples": [7]}])

    Recorder.mend_samples(tmp_path, 3, (6, 7))

    assert lines(tmp_path / "samples-0.jsonl")[-1] == {"step": 3, "samples": [6], "mended": True}
    assert len(lines(tmp_path / "samples-1.jsonl")) == 2


def test_a_sample_that_a_step_has_twice_is_there_twice_again(tmp_path: Path) -> None:
    """Where one pass over the data ends and the next begins, a batch may hold a sample of both."""
    write(tmp_path / "samples-0.jsonl", [{"step": 3, "samples": [6, 1]}])
    write(tmp_path / "samples-1.jsonl", [{"step": 2, "samples": [2, 3]}])

    for _ in range(2):
        Recorder.mend_samples(tmp_path, 3, (7, 6, 6, 1))

    found = [one for line in lines(tmp_path / "samples-0.jsonl") for one in line["samples"]]
    assert sorted(found) == [1, 6, 6, 7]


def test_a_step_that_is_resumed_twice_is_mended_once(tmp_path: Path) -> None:
    write(tmp_path / "samples-0.jsonl", [{"step": 3, "samples": [4, 5]}])
    write(tmp_path / "samples-1.jsonl", [{"step": 2, "samples": [2, 3]}])

    for _ in range(3):
        Recorder.mend_samples(tmp_path, 3, (4, 5, 6, 7))

    assert lines(tmp_path / "samples-0.jsonl") == [
        {"step": 3, "samples": [4, 5]},
        {"step": 3, "samples": [6, 7], "mended": True},
    ]


def test_a_run_without_files_gets_no_history_that_it_does_not_have(tmp_path: Path) -> None:
    assert not Recorder.lacks(tmp_path, 3)
    assert (newest_lines(tmp_path / METRICS_NAME, 5), first_line(tmp_path / METRICS_NAME)) == ([], None)


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_the_newest_lines_come_oldest_first(tmp_path: Path, count: int) -> None:
    write(tmp_path / METRICS_NAME, [record(step) for step in (1, 2, 3)])

    assert [line["step"] for line in newest_lines(tmp_path / METRICS_NAME, count)] == [1, 2, 3][-count:]
    assert first_line(tmp_path / METRICS_NAME)["step"] == 1


def recorder(root: Path, dp_rank: int, step: int, aside: Path) -> Recorder:
    return Recorder(
        root, rank=dp_rank, dp_rank=dp_rank, tensorboard=False, record_samples=True, resume_step=step, aside=aside
    )


def recorded(root: Path, step: int) -> list[int]:
    found = [line for path in root.glob("samples-*.jsonl") for line in lines(path) if line["step"] == step]
    return sorted(one for line in found for one in line["samples"])


def aside_of_rank_1(tmp_path: Path) -> Path:
    folder = tmp_path / "node-1"
    folder.mkdir()
    write(folder / "samples-1.jsonl", [{"step": 3, "samples": [6, 7]}])
    write(tmp_path / "samples-0.jsonl", [{"step": 3, "samples": [4, 5]}])
    return folder


def test_what_waits_on_the_node_of_another_rank_is_not_mended(tmp_path: Path) -> None:
    theirs, mine = aside_of_rank_1(tmp_path), tmp_path / "node-0"
    Recorder.mend_samples(tmp_path, 3, (4, 5, 6, 7), mine, Recorder.samples_aside(3, theirs))
    recorder(tmp_path, 1, 3, theirs).close()
    assert recorded(tmp_path, 3) == [4, 5, 6, 7]


def test_what_was_mended_while_a_node_was_away_is_not_written_when_it_is_back(tmp_path: Path) -> None:
    theirs, mine = aside_of_rank_1(tmp_path), tmp_path / "node-0"
    Recorder.mend_samples(tmp_path, 3, (4, 5, 6, 7), mine, {})
    recorder(tmp_path, 1, 5, theirs).close()
    assert recorded(tmp_path, 3) == [4, 5, 6, 7]
    assert not list(theirs.iterdir())


def test_samples_of_a_node_that_is_back_are_put_in_the_order_of_their_steps(tmp_path: Path) -> None:
    theirs = aside_of_rank_1(tmp_path)
    write(tmp_path / "samples-1.jsonl", [{"step": step, "samples": [2 * step]} for step in (1, 2, 4, 5)])
    opened = recorder(tmp_path, 1, 5, theirs)
    opened.samples(6, [12])
    opened.close()
    found = lines(tmp_path / "samples-1.jsonl")
    assert [(line["step"], line["samples"]) for line in found] == [
        (1, [2]), (2, [4]), (3, [6, 7]), (4, [8]), (5, [10]), (6, [12]),
    ]  # fmt: skip
    assert not list(theirs.iterdir())


@pytest.mark.parametrize("file", ["samples-1.jsonl", "samples-0.jsonl"])
def test_samples_of_a_step_that_was_repeated_while_a_node_was_away_are_not_recorded_twice(
    tmp_path: Path, file: str
) -> None:
    """By the rank in its place, or by fewer ranks."""
    theirs = aside_of_rank_1(tmp_path)
    repeated = [{"step": 3, "samples": [4, 5]}, {"step": 3, "samples": [6, 7]}]
    write(tmp_path / file, repeated[1:] if file == "samples-1.jsonl" else repeated)
    recorder(tmp_path, 1, 5, theirs).close()
    assert recorded(tmp_path, 3) == [4, 5, 6, 7]


def test_metrics_that_another_node_has_written_since_are_not_written_again(tmp_path: Path) -> None:
    aside = tmp_path / "node-0"
    aside.mkdir()
    write(aside / METRICS_NAME, [record(2), record(3), record(4)])
    write(tmp_path / METRICS_NAME, [record(1), record(2), record(3) | {"seconds": 9.0}])
    recorder(tmp_path, 0, 5, aside).close()
    assert [line["step"] for line in lines(tmp_path / METRICS_NAME)] == [1, 2, 3, 4]


def test_a_curve_has_each_step_once_after_a_kill_before_the_first_checkpoint(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in (2, 3):
        writer = ScalarWriter(tmp_path, resume_step=0)
        for step in range(1, steps + 1):
            writer.write(step, {"loss": float(steps)})
        writer.close()
    curve = EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert [(point.step, point.value) for point in curve] == [(1, 3.0), (2, 3.0), (3, 3.0)]
