"""Conclusions of demos from the files of a run: whose samples were seen, and whether two curves are one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from trainium_devcluster.demos.curves import Curves, Fault
from trainium_devcluster.demos.metrics import (
    every_sample_once,
    every_sample_once_an_epoch,
    every_sample_once_in_batches,
)

if TYPE_CHECKING:
    from pathlib import Path

RESIZE = Fault("resize 3 to 2", 2, 0.1, 0.5, 0.5, 0, 0)
LOSS = {1: 4.0, 2: 3.0, 3: 2.0}


def record(folder: Path, batches: list[list[int]]) -> None:
    """Two ranks' records; a batch is divided between them."""
    for rank in (0, 1):
        lines = [json.dumps({"step": step, "samples": batch[rank::2]}) for step, batch in enumerate(batches, start=1)]
        (folder / f"samples-{rank}.jsonl").write_text("\n".join(lines) + "\n")


def test_epochs_are_whole_when_each_has_every_sample_once(tmp_path: Path) -> None:
    record(tmp_path, [[0, 3, 1, 4], [2], [4, 2, 0, 1], [3]])
    assert every_sample_once_an_epoch(tmp_path, steps=4, batch=4, epochs=2)


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
def test_an_epoch_that_is_not_whole_is_noticed(tmp_path: Path, batches: list[list[int]]) -> None:
    record(tmp_path, batches)
    assert not every_sample_once_an_epoch(tmp_path, steps=4, batch=4, epochs=2)


def test_a_run_without_records_saw_nothing(tmp_path: Path) -> None:
    assert not every_sample_once_an_epoch(tmp_path, steps=0, batch=4, epochs=1)
    assert not every_sample_once_an_epoch(tmp_path, steps=4, batch=4, epochs=1)


def test_within_an_epoch_no_sample_is_seen_twice(tmp_path: Path) -> None:
    record(tmp_path, [[0, 1], [2, 3]])
    assert every_sample_once(tmp_path, steps=2, batch=2)
    record(tmp_path, [[0, 1], [1, 3]])
    assert not every_sample_once(tmp_path, steps=2, batch=2)


def test_steps_of_different_batches_have_as_many_samples_as_they_state_and_none_twice(tmp_path: Path) -> None:
    record(tmp_path, [[0, 1], [2, 3, 4]])
    assert every_sample_once_in_batches(tmp_path, {1: 2, 2: 3})
    assert not every_sample_once_in_batches(tmp_path, {1: 2, 2: 2})
    assert not every_sample_once_in_batches(tmp_path, {1: 2, 2: 3, 3: 2})
    record(tmp_path, [[0, 1], [2, 3, 1]])
    assert not every_sample_once_in_batches(tmp_path, {1: 2, 2: 3})


def test_curves_are_one_when_equal_at_equal_size_and_close_after_a_resize() -> None:
    curves = Curves(3, LOSS, {1: 4.0, 2: 3.0, 3: 2.0 * (1 + 1e-6)}, (RESIZE,))
    assert curves.first_resize_step == 2
    assert curves.same
    assert not replace(curves, faults=()).same, "at one size not a bit may differ"
    assert replace(curves, faults=()).same_but_for_rounding


@pytest.mark.parametrize(
    "reference",
    [
        pytest.param({1: 4.0, 2: 3.0000001, 3: 2.0}, id="a bit before the resize"),
        pytest.param({1: 4.0, 2: 3.0, 3: 2.001}, id="more than rounding after it"),
        pytest.param({1: 4.0, 2: 3.0}, id="a step is missing"),
    ],
)
def test_curves_that_differ_are_two(reference: dict[int, float]) -> None:
    assert not Curves(3, LOSS, reference, (RESIZE,)).same


def test_curves_of_nothing_are_not_one() -> None:
    assert not Curves(0, {}, {}, ()).same
