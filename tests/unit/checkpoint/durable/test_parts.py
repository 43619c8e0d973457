"""Save, read and stage parts of tensors whose boundaries DTensor cannot express."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.checkpoint.checkpoint_builders import SINGLE_RANK, mesh_coordinates, write_checkpoint
from trainium_trainer.checkpoint.format.live_state import StagingBuffers, TensorPart, build_layout, to_local
from trainium_trainer.checkpoint.format.reader import load_checkpoint
from trainium_trainer.checkpoint.sharding import Axis, Cut, Grid
from trainium_trainer.storage.posix import PosixStorage
from trainium_trainer.storage.protocol import Retry

WHOLE = torch.arange(84.0).view(14, 6)


def divide(rows: int, start: int, ranks: int, values: torch.Tensor = WHOLE) -> list[dict[str, Any]]:
    """Return the state of each rank, which has `rows` rows of a stack; `values` begin at its row `start`."""
    division = (Cut(0, Axis.DATA, rows, start),)
    states: list[dict[str, Any]] = []
    for rank in range(ranks):
        low, high = (min(max(at * rows - start, 0), 14) for at in (rank, rank + 1))
        local = values[low:high].clone()
        box = {"offsets": (low, 0), "sizes": (high - low, 6)}
        part = TensorPart(lambda local=local: local, whole=(14, 6), dtype=torch.float32, division=division, **box)
        states.append({"weight": part})
    return states


class LoadableState:
    """A state as `load_checkpoint` takes it."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state.keys() == self.tensors.keys()

    def list_local_tensors(self) -> dict[str, torch.Tensor]:
        return {name: to_local(value) for name, value in self.tensors.items()}


def save_and_load(folder: Path, source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """Save the states of `source` in real files, and load them into `target`."""
    grid = Grid(data=len(source))
    layouts = [build_layout(state, mesh_coordinates(grid, rank)) for rank, state in enumerate(source)]
    assert len({layout.digest for layout in layouts}) == 1
    checkpoint = write_checkpoint(folder, layouts[0], lambda rank, item: to_local(source[rank][item.name]))
    for state in target:
        load_checkpoint(PosixStorage(folder), checkpoint, LoadableState(state), Retry(()))


@pytest.mark.parametrize("saved", [(14, 0, 1), (5, 0, 3), (3, 4, 6), (9, 8, 3)])
@pytest.mark.parametrize("loaded", [(14, 0, 1), (4, 2, 4), (7, 7, 4)])
def test_parts_of_any_boundaries_are_read_into_parts_of_any_others(
    tmp_path: Path, saved: tuple[int, int, int], loaded: tuple[int, int, int]
) -> None:
    target = divide(*loaded, torch.full_like(WHOLE, -1.0))
    save_and_load(tmp_path, divide(*saved), target)
    assert torch.equal(torch.cat([state["weight"].local for state in target]), WHOLE)


def test_parts_and_whole_tensors_are_read_from_each_other(tmp_path: Path) -> None:
    target = {"weight": torch.zeros_like(WHOLE)}
    save_and_load(tmp_path / "one", divide(5, 1, 3), [target])
    assert torch.equal(target["weight"], WHOLE)
    parts = divide(5, 1, 3, torch.zeros_like(WHOLE))
    save_and_load(tmp_path / "two", [{"weight": WHOLE}], parts)
    assert torch.equal(torch.cat([state["weight"].local for state in parts]), WHOLE)


def test_a_part_without_the_division_of_the_whole_is_not_saved() -> None:
    part = TensorPart(lambda: WHOLE, whole=(14, 6), offsets=(0, 0), sizes=(14, 6), dtype=torch.float32)
    with pytest.raises(TypeError, match="needs the division of the whole"):
        build_layout({"weight": part}, SINGLE_RANK)


def test_staging_computes_values_only_when_it_copies_them() -> None:
    calls = []

    def values() -> torch.Tensor:
        calls.append(True)
        return WHOLE[2:5]

    state = {"weight": TensorPart(values, whole=(14, 6), offsets=(2, 0), sizes=(3, 6), dtype=torch.float32)}
    staging = StagingBuffers(state)
    assert not calls
    staged = staging.fill(state)["weight"]
    assert torch.equal(staged, WHOLE[2:5])
    assert staged.data_ptr() != WHOLE[2:5].data_ptr()


def test_a_tensor_part_has_the_size_of_the_whole_tensor_and_refuses_to_compute() -> None:
    state = divide(5, 0, 3)[0]
    assert state["weight"].size() == (14, 6)
    with pytest.raises(TypeError, match="use its local tensor"):
        torch.add(state["weight"], 1.0)
