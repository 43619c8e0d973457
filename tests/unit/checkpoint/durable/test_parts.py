"""Boxes with boundaries that DTensor has no words for: how they are saved and read, and what is staged of them."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.checkpoint.checkpoint_builders import write_checkpoint
from trainium_trainer.checkpoint.format.live_state import StagingBuffers, TensorPart, build_layout, to_local
from trainium_trainer.checkpoint.format.reader import load_checkpoint
from trainium_trainer.checkpoint.sharding import Axis, Cut
from trainium_trainer.storage.posix import PosixStorage
from trainium_trainer.storage.protocol import Retry

WHOLE = torch.arange(84.0).view(14, 6)


def cut(rows: int, start: int, ranks: int, values: torch.Tensor = WHOLE) -> list[dict[str, Any]]:
    """Return a state per rank: the whole is from row `start` on in a stack, of which each rank has so many rows."""
    division = (Cut(0, Axis.DATA, rows, start),)
    states: list[dict[str, Any]] = []
    for rank in range(ranks):
        low, high = (min(max(at * rows - start, 0), 14) for at in (rank, rank + 1))
        local = values[low:high].clone()
        place = {"offsets": (low, 0), "sizes": (high - low, 6)}
        part = TensorPart(lambda local=local: local, whole=(14, 6), dtype=torch.float32, division=division, **place)
        states.append({"weight": part})
    return states


class Held:
    """A state as `load_checkpoint` takes it."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state.keys() == self.tensors.keys()

    def local_tensors(self) -> dict[str, torch.Tensor]:
        return {name: to_local(value) for name, value in self.tensors.items()}


def places(ranks: int) -> Iterator[Any]:
    for rank in range(ranks):
        sizes = {"world_size": ranks, "dp_size": ranks, "tp_size": 1, "pp_size": 1}
        yield SimpleNamespace(rank=rank, dp_rank=rank, tp_rank=0, pp_rank=0, **sizes)


def moved(folder: Path, source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """Save the one, load the other, with real files."""
    layouts = [build_layout(state, place) for state, place in zip(source, places(len(source)), strict=True)]
    assert len({layout.digest for layout in layouts}) == 1
    checkpoint = write_checkpoint(folder, layouts[0], lambda rank, item: to_local(source[rank][item.name]))
    for state in target:
        load_checkpoint(PosixStorage(folder), checkpoint, Held(state), Retry(()))


@pytest.mark.parametrize("saved", [(14, 0, 1), (5, 0, 3), (3, 4, 6), (9, 8, 3)])
@pytest.mark.parametrize("loaded", [(14, 0, 1), (4, 2, 4), (7, 7, 4)])
def test_parts_of_any_boundaries_are_read_into_parts_of_any_others(
    tmp_path: Path, saved: tuple[int, int, int], loaded: tuple[int, int, int]
) -> None:
    target = cut(*loaded, torch.full_like(WHOLE, -1.0))
    moved(tmp_path, cut(*saved), target)
    assert torch.equal(torch.cat([state["weight"].local for state in target]), WHOLE)


def test_parts_and_whole_tensors_are_read_from_each_other(tmp_path: Path) -> None:
    target = {"weight": torch.zeros_like(WHOLE)}
    moved(tmp_path / "one", cut(5, 1, 3), [target])
    assert torch.equal(target["weight"], WHOLE)
    parts = cut(5, 1, 3, torch.zeros_like(WHOLE))
    moved(tmp_path / "two", [{"weight": WHOLE}], parts)
    assert torch.equal(torch.cat([state["weight"].local for state in parts]), WHOLE)


def test_a_part_without_the_division_of_the_whole_is_not_saved() -> None:
    part = TensorPart(lambda: WHOLE, whole=(14, 6), offsets=(0, 0), sizes=(14, 6), dtype=torch.float32)
    with pytest.raises(TypeError, match="needs the division of the whole"):
        build_layout({"weight": part}, next(places(1)))


def test_staging_asks_for_values_only_when_it_copies_them() -> None:
    asked = []

    def values() -> torch.Tensor:
        asked.append(True)
        return WHOLE[2:5]

    state = {"weight": TensorPart(values, whole=(14, 6), offsets=(2, 0), sizes=(3, 6), dtype=torch.float32)}
    staging = StagingBuffers(state)
    assert staging.fits(state)
    assert not asked
    staged = staging.fill(state)["weight"]
    assert torch.equal(staged, WHOLE[2:5])
    assert staged.data_ptr() != WHOLE[2:5].data_ptr()


def test_staging_fits_its_own_layout_alone() -> None:
    staging = StagingBuffers(cut(5, 0, 3)[0])
    assert staging.fits(cut(5, 0, 3)[0])
    assert not staging.fits(cut(5, 0, 3)[1])
    assert not staging.fits(cut(5, 1, 3)[0])
    assert not staging.fits({"weight": torch.zeros(5, 6)})
    assert not staging.fits({})


def test_a_tensor_part_has_the_size_of_the_whole_tensor_and_refuses_to_compute() -> None:
    state = cut(5, 0, 3)[0]
    assert state["weight"].size() == (14, 6)
    with pytest.raises(TypeError, match="use its local tensor"):
        torch.add(state["weight"], 1.0)
