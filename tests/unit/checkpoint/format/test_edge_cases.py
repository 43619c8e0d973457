"""Edge cases of the formats: empty copies, a single rank, invalid states and layouts."""

import gc
from typing import Any

import pytest
import torch

from trainium_trainer.checkpoint.collectives import disable_gc, reduce_on_root
from trainium_trainer.checkpoint.format.layout import CheckpointLayout, TensorMetadata
from trainium_trainer.checkpoint.format.live_state import copy_all, flatten
from trainium_trainer.checkpoint.inspect import _format_age
from trainium_trainer.checkpoint.sharding import Axis, Box, Cut, Grid, find_overlapping_boxes


def test_a_rank_without_a_part_of_the_state_copies_nothing() -> None:
    copy_all([], [])
    target = torch.zeros(3)
    copy_all([target], [torch.ones(3)])
    assert torch.equal(target, torch.ones(3))


def test_a_single_rank_receives_its_message() -> None:
    assert reduce_on_root(lambda: "value", list, None, "alone") == ["value"]


@pytest.mark.parametrize("is_enabled", [True, False])
def test_garbage_collection_is_as_before_afterwards(is_enabled: bool) -> None:
    if not is_enabled:
        gc.disable()
    try:
        with disable_gc():
            assert not gc.isenabled()
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()


def test_a_state_has_dotted_names_and_nothing_but_tensors() -> None:
    value = torch.zeros(1)
    assert flatten({"model": {"weight": value}, "bias": value}) == {"model.weight": value, "bias": value}
    with pytest.raises(TypeError, match=r"tensors only: model\.step is int"):
        flatten({"model": {"step": 3}})


LAYOUT = CheckpointLayout(Grid(pipeline=2), [TensorMetadata("a", "F32", (4,), 1, ())])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [({"dtype": "F13"}, "no type F13"), ({"stage": 2}, "no stage 2"), ({"stage": -1}, "no stage -1")],
)
def test_a_layout_with_types_or_stages_that_do_not_exist_is_refused(changes: dict[str, Any], sentence: str) -> None:
    raw = LAYOUT.to_json()
    assert CheckpointLayout.from_json(raw).to_json() == raw
    with pytest.raises(ValueError, match=sentence):
        CheckpointLayout.from_json({**raw, "tensors": {"a": {**raw["tensors"]["a"], **changes}}})


def test_an_empty_box_overlaps_nothing() -> None:
    cut = Cut(0, Axis.DATA)
    grid = Grid(data=2)
    assert list(find_overlapping_boxes((4,), (cut,), grid, Box((2,), (0,)))) == []
    assert [overlap.box for overlap in find_overlapping_boxes((4,), (cut,), grid, Box((1,), (2,)))] == [
        Box((0,), (2,)),
        Box((2,), (2,)),
    ]
    assert list(cut.list_window_numbers(2, 2, 4, 2)) == []


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-5.0, "0 s"), (59.4, "59 s"), (60.0, "1.0 m"), (5400.0, "1.5 h"), (3 * 86400.0, "3.0 d")],
)
def test_an_age_is_shown_in_its_largest_unit(seconds: float, shown: str) -> None:
    assert _format_age(seconds) == shown
