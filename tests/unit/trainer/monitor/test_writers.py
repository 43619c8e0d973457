"""Write one complete history over resumes, also when a rank failed before it wrote the line of a step."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainium_trainer.monitor.json_lines import read_first_line, read_newest_lines
from trainium_trainer.monitor.step_metrics import StepMetrics
from trainium_trainer.monitor.writers import METRICS_NAME, Recorder, ScalarWriter


def record(step: int) -> dict[str, Any]:
    return figures(step).to_json()


def figures(step: int) -> StepMetrics:
    return StepMetrics(
        step=step, loss=2.0, grad_norm=1.0, learning_rate=0.1, tokens=step * 10, samples=step * 2, batch=2
    )


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_step_that_rank_0_did_not_record_is_recorded_at_the_resume(tmp_path: Path) -> None:
    write(tmp_path / METRICS_NAME, [record(1), record(2)])

    assert Recorder.is_missing_line(tmp_path, 3)
    Recorder.append_missing_line(tmp_path, figures(3))

    assert [line["step"] for line in read_lines(tmp_path / METRICS_NAME)] == [1, 2, 3]
    assert not Recorder.is_missing_line(tmp_path, 3)


@pytest.mark.parametrize(
    ("written", "used", "added"),
    [
        pytest.param([(0, 3, [4, 5])], (4, 5), [], id="recorded samples are left alone"),
        pytest.param([(0, 2, [1, 2]), (1, 2, [8, 9]), (1, 3, [7])], (6, 7), [6], id="unrecorded samples are added"),
        pytest.param([(0, 3, [4, 5]), (1, 2, [2, 3])], (4, 5, 6, 7), [6, 7], id="samples of a lost rank are added"),
        # A batch between two passes over the data may have a sample twice.
        pytest.param(
            [(0, 3, [6, 1]), (1, 2, [2, 3])], (7, 6, 6, 1), [7, 6], id="a sample used twice is recorded twice"
        ),
    ],
)
def test_a_resume_adds_the_samples_of_its_step_that_no_rank_recorded(
    tmp_path: Path, written: list[tuple[int, int, list[int]]], used: tuple[int, ...], added: list[int]
) -> None:
    ranks: dict[int, list[dict[str, Any]]] = {}
    for rank, step, samples in written:
        ranks.setdefault(rank, []).append({"step": step, "samples": samples})
        write(tmp_path / f"samples-{rank}.jsonl", ranks[rank])

    for _ in range(3):
        Recorder.append_missing_samples(tmp_path, 3, used)

    ranks[0] += [{"step": 3, "samples": added, "mended": True}] if added else []
    assert {rank: read_lines(tmp_path / f"samples-{rank}.jsonl") for rank in ranks} == ranks


def test_a_run_without_files_has_no_history(tmp_path: Path) -> None:
    assert not Recorder.is_missing_line(tmp_path, 3)
    assert (read_newest_lines(tmp_path / METRICS_NAME, 5), read_first_line(tmp_path / METRICS_NAME)) == ([], None)


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_the_newest_lines_come_oldest_first(tmp_path: Path, count: int) -> None:
    write(tmp_path / METRICS_NAME, [record(step) for step in (1, 2, 3)])

    assert [line["step"] for line in read_newest_lines(tmp_path / METRICS_NAME, count)] == [1, 2, 3][-count:]
    assert read_first_line(tmp_path / METRICS_NAME)["step"] == 1


def create_recorder(root: Path, dp_rank: int, step: int, fallback: Path) -> Recorder:
    return Recorder(
        root,
        rank=dp_rank,
        dp_rank=dp_rank,
        tensorboard=False,
        record_samples=True,
        resume_step=step,
        fallback=fallback,
    )


def recorded_samples(root: Path, step: int) -> list[int]:
    records = [line for path in root.glob("samples-*.jsonl") for line in read_lines(path) if line["step"] == step]
    return sorted(sample for line in records for sample in line["samples"])


def write_fallback_of_rank_1(tmp_path: Path) -> Path:
    folder = tmp_path / "node-1"
    folder.mkdir()
    write(folder / "samples-1.jsonl", [{"step": 3, "samples": [6, 7]}])
    write(tmp_path / "samples-0.jsonl", [{"step": 3, "samples": [4, 5]}])
    return folder


def test_samples_that_wait_on_the_node_of_another_rank_are_not_added(tmp_path: Path) -> None:
    fallback_1, fallback_0 = write_fallback_of_rank_1(tmp_path), tmp_path / "node-0"
    Recorder.append_missing_samples(
        tmp_path, 3, (4, 5, 6, 7), fallback_0, Recorder.read_fallback_samples(3, fallback_1)
    )
    create_recorder(tmp_path, 1, 3, fallback_1).close()
    assert recorded_samples(tmp_path, 3) == [4, 5, 6, 7]


def test_samples_added_while_a_node_was_away_are_not_written_again_when_it_returns(tmp_path: Path) -> None:
    fallback_1, fallback_0 = write_fallback_of_rank_1(tmp_path), tmp_path / "node-0"
    Recorder.append_missing_samples(tmp_path, 3, (4, 5, 6, 7), fallback_0, {})
    create_recorder(tmp_path, 1, 5, fallback_1).close()
    assert recorded_samples(tmp_path, 3) == [4, 5, 6, 7]
    assert not list(fallback_1.iterdir())


def test_samples_of_a_node_that_is_back_are_put_in_the_order_of_their_steps(tmp_path: Path) -> None:
    fallback_1 = write_fallback_of_rank_1(tmp_path)
    write(tmp_path / "samples-1.jsonl", [{"step": step, "samples": [2 * step]} for step in (1, 2, 4, 5)])
    restarted = create_recorder(tmp_path, 1, 5, fallback_1)
    restarted.record_samples(6, [12])
    restarted.close()
    records = read_lines(tmp_path / "samples-1.jsonl")
    assert [(line["step"], line["samples"]) for line in records] == [
        (1, [2]), (2, [4]), (3, [6, 7]), (4, [8]), (5, [10]), (6, [12]),
    ]  # fmt: skip
    assert not list(fallback_1.iterdir())


@pytest.mark.parametrize("file", ["samples-1.jsonl", "samples-0.jsonl"])
def test_samples_of_a_step_that_was_repeated_while_a_node_was_away_are_not_recorded_twice(
    tmp_path: Path, file: str
) -> None:
    """The step was repeated by a replacement of the rank, or by fewer ranks."""
    fallback_1 = write_fallback_of_rank_1(tmp_path)
    repeated = [{"step": 3, "samples": [4, 5]}, {"step": 3, "samples": [6, 7]}]
    write(tmp_path / file, repeated[1:] if file == "samples-1.jsonl" else repeated)
    create_recorder(tmp_path, 1, 5, fallback_1).close()
    assert recorded_samples(tmp_path, 3) == [4, 5, 6, 7]


def test_metrics_that_another_node_has_written_since_are_not_written_again(tmp_path: Path) -> None:
    fallback = tmp_path / "node-0"
    fallback.mkdir()
    write(fallback / METRICS_NAME, [record(2), record(3), record(4)])
    write(tmp_path / METRICS_NAME, [record(1), record(2), record(3) | {"seconds": 9.0}])
    create_recorder(tmp_path, 0, 5, fallback).close()
    assert [line["step"] for line in read_lines(tmp_path / METRICS_NAME)] == [1, 2, 3, 4]


def test_a_curve_has_each_step_once_after_a_kill_before_the_first_checkpoint(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in (2, 3):
        writer = ScalarWriter(tmp_path, resume_step=0)
        for step in range(1, steps + 1):
            writer.write(step, {"loss": float(steps)})
        writer.close()
    curve = EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert [(point.step, point.value) for point in curve] == [(1, 3.0), (2, 3.0), (3, 3.0)]
