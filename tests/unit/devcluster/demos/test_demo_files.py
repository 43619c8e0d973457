"""Checks of demos on the files of a run: steps, samples of each epoch, and equality of loss curves."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trainium_devcluster.demos.curves import Curves, Fault
from trainium_devcluster.jobs.metrics import (
    StepLog,
    has_every_sample_once,
    has_every_sample_once_an_epoch,
    has_every_sample_once_in_batches,
)

RESIZE = Fault("resize 3 to 2", 2, 0.1, 0.5, 0.5, 0, 0)
LOSS = {1: 4.0, 2: 3.0, 3: 2.0}


def write_batches(folder: Path, batches: list[list[int]]) -> None:
    """Write the records of two ranks, between which each batch is divided."""
    for rank in (0, 1):
        lines = [json.dumps({"step": step, "samples": batch[rank::2]}) for step, batch in enumerate(batches, start=1)]
        (folder / f"samples-{rank}.jsonl").write_text("\n".join(lines) + "\n")


def test_an_epoch_with_every_sample_once_is_complete(tmp_path: Path) -> None:
    write_batches(tmp_path, [[0, 3, 1, 4], [2], [4, 2, 0, 1], [3]])
    assert has_every_sample_once_an_epoch(tmp_path, steps=4, batch=4, epochs=2)


@pytest.mark.parametrize(
    "batches",
    [
        pytest.param([[0, 3, 1, 4], [2], [4, 2, 0, 1], [4]], id="a sample twice in an epoch and another never"),
        pytest.param([[0, 3, 1, 4], [2], [4, 2, 0, 1], []], id="a sample missing"),
        pytest.param([[0, 3, 1, 4], [2], [4, 2, 0], [1, 3]], id="a batch that is not whole"),
        pytest.param([[0, 3, 1, 4], [2], [4, 2, 0, 1]], id="a step without a record"),
        pytest.param([[0, 3, 1, 5], [2], [5, 2, 0, 1], [3]], id="a sample that no epoch has"),
        pytest.param([[0, 3, 1, 4], [2], [4, 2, 0, 1], [3], [0]], id="a step beyond the last"),
    ],
)
def test_an_incomplete_epoch_is_detected(tmp_path: Path, batches: list[list[int]]) -> None:
    write_batches(tmp_path, batches)
    assert not has_every_sample_once_an_epoch(tmp_path, steps=4, batch=4, epochs=2)


def test_a_run_without_records_is_incomplete(tmp_path: Path) -> None:
    assert not has_every_sample_once_an_epoch(tmp_path, steps=0, batch=4, epochs=1)
    assert not has_every_sample_once_an_epoch(tmp_path, steps=4, batch=4, epochs=1)


def test_within_an_epoch_no_sample_is_seen_twice(tmp_path: Path) -> None:
    write_batches(tmp_path, [[0, 1], [2, 3]])
    assert has_every_sample_once(tmp_path, steps=2, batch=2)
    write_batches(tmp_path, [[0, 1], [1, 3]])
    assert not has_every_sample_once(tmp_path, steps=2, batch=2)


def test_batches_of_different_sizes_have_their_number_of_distinct_samples(tmp_path: Path) -> None:
    write_batches(tmp_path, [[0, 1], [2, 3, 4]])
    assert has_every_sample_once_in_batches(tmp_path, {1: 2, 2: 3})
    assert not has_every_sample_once_in_batches(tmp_path, {1: 2, 2: 2})
    assert not has_every_sample_once_in_batches(tmp_path, {1: 2, 2: 3, 3: 2})
    write_batches(tmp_path, [[0, 1], [2, 3, 1]])
    assert not has_every_sample_once_in_batches(tmp_path, {1: 2, 2: 3})


def test_curves_are_equal_until_a_resize_and_close_after_it() -> None:
    curves = Curves(3, LOSS, {1: 4.0, 2: 3.0, 3: 2.0 * (1 + 1e-6)}, (RESIZE,))
    assert curves.first_resize_step == 2
    assert curves.is_identical
    assert not replace(curves, faults=()).is_identical, "at one size the losses are bitwise equal"
    assert replace(curves, faults=()).is_equal_within_rounding
    assert replace(curves, faults=(), unplanned_resizes=(2,)).is_identical


@pytest.mark.parametrize(
    "reference",
    [
        pytest.param({1: 4.0, 2: 3.0000001, 3: 2.0}, id="a bit before the resize"),
        pytest.param({1: 4.0, 2: 3.0, 3: 2.001}, id="more than rounding after it"),
        pytest.param({1: 4.0, 2: 3.0}, id="a step is missing"),
    ],
)
def test_different_curves_are_detected(reference: dict[int, float]) -> None:
    assert not Curves(3, LOSS, reference, (RESIZE,)).is_identical


def test_empty_curves_are_not_equal() -> None:
    assert not Curves(0, {}, {}, ()).is_identical


def test_the_first_end_of_a_repeated_step_is_kept(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "metrics.jsonl")

    def write(times: dict[int, float]) -> None:
        lines = ({"step": step, "time": time, "loss": 1.0} for step, time in times.items())
        log.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        log.refresh()

    write({1: 10.0, 2: 11.0, 3: 12.0})
    write({1: 10.0, 2: 20.0, 3: 21.0, 4: 22.0})  # resumed after step 1
    assert (log.step_time(3), log.first_times[3]) == (21.0, 12.0)
    assert log.first_times[4] == log.step_time(4) == 22.0
