"""Boxes with boundaries that DTensor has no words for: what DCP plans for them, and what is staged of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import (
    create_default_global_save_plan,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.utils import find_state_dict_object

from trainium_trainer.checkpoint.part import Part
from trainium_trainer.checkpoint.staging import Staging

if TYPE_CHECKING:
    from collections.abc import Sequence

WHOLE = torch.arange(84.0).view(14, 6)


def cut(rows: Sequence[int], values: torch.Tensor = WHOLE) -> list[dict[str, Any]]:
    """One state per rank: the whole, cut along its rows into runs of these lengths; an empty run is left out."""
    states: list[dict[str, Any]] = []
    start = 0
    for count in rows:
        local = values[start : start + count].clone()
        part = Part(lambda local=local: local, whole=(14, 6), offsets=(start, 0), sizes=(count, 6), dtype=torch.float32)
        states.append({"weight": part} if count else {})
        start += count
    return states


def moved(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """What a save and a load do, with the planners of DCP and a dictionary for a store."""
    plans, metadata = create_default_global_save_plan(
        [create_default_local_save_plan(state, is_coordinator=rank == 0) for rank, state in enumerate(source)]
    )
    stored = {
        item.index: find_state_dict_object(state, item.index).clone()
        for state, plan in zip(source, plans, strict=True)
        for item in plan.items
    }
    stored = {(index.fqn, tuple(index.offset or ())): value for index, value in stored.items()}
    for state in target:
        for item in create_default_local_load_plan(state, metadata).items:
            box = stored[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
            for dimension, (offset, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                box = box.narrow(dimension, offset, size)
            place = find_state_dict_object(state, item.dest_index)
            for dimension, (offset, size) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
                place = place.narrow(dimension, offset, size)
            place.copy_(box)


@pytest.mark.parametrize("saved", [(14,), (5, 9), (1, 6, 0, 7)])
@pytest.mark.parametrize("loaded", [(14,), (3, 3, 8), (6, 8)])
def test_parts_of_any_boundaries_are_read_into_parts_of_any_others(
    saved: tuple[int, ...], loaded: tuple[int, ...]
) -> None:
    target = cut(loaded, torch.full_like(WHOLE, -1.0))
    moved(cut(saved), target)
    assert torch.equal(torch.cat([state["weight"].local for state in target]), WHOLE)


def test_parts_and_whole_tensors_are_read_from_each_other() -> None:
    target = {"weight": torch.zeros_like(WHOLE)}
    moved(cut((5, 9)), [target])
    assert torch.equal(target["weight"], WHOLE)
    (part,) = cut((14,), torch.zeros_like(WHOLE))
    moved([{"weight": WHOLE}], [part])
    assert torch.equal(part["weight"].local, WHOLE)


def test_staging_asks_for_values_only_when_it_copies_them() -> None:
    asked = []

    def values() -> torch.Tensor:
        asked.append(True)
        return WHOLE[2:5]

    state = {"weight": Part(values, whole=(14, 6), offsets=(2, 0), sizes=(3, 6), dtype=torch.float32)}
    staging = Staging(state)
    assert not asked
    staging.fill(state)
    staged = staging.tensors["weight"]
    assert (staged.whole, staged.offsets) == ((14, 6), (2, 0))
    assert torch.equal(staged.local, WHOLE[2:5])
    assert staged.local.data_ptr() != WHOLE[2:5].data_ptr()


def test_a_part_has_the_size_of_the_whole_and_computes_nothing() -> None:
    (state, _) = cut((5, 9))
    assert state["weight"].size() == (14, 6)
    with pytest.raises(TypeError, match="use its local tensor"):
        torch.add(state["weight"], 1.0)
