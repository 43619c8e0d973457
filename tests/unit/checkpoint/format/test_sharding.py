"""Assign boxes to their writers, on many meshes and for every layout; compare with the planners of torch's DCP."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import (
    create_default_global_save_plan,
    create_default_local_save_plan,
)

from tests.testing.suite.trials import trials
from tests.testing.trainer.base_models import SHAPE
from tests.testing.trainer.checkpoint_layouts import assert_written_once
from tests.unit.checkpoint.checkpoint_builders import mesh_coordinates
from tests.unit.checkpoint.rank_state import create_rank_state
from trainium_contract.trainer.parallelism import DataParallelMode
from trainium_trainer.checkpoint.format.layout import CheckpointLayout, TensorMetadata, merge_stages, replace_stages
from trainium_trainer.checkpoint.format.live_state import LayoutReport, build_layout, get_box, merge_reports
from trainium_trainer.checkpoint.sharding import Axis, Box, Cut, Grid, find_partition_problem
from trainium_trainer.models.state_dict import OPTIMIZER_STEP


def tensor(name: str, shape: tuple[int, ...], *cuts: Cut, stage: int = 0, dtype: str = "F32") -> TensorMetadata:
    return TensorMetadata(name, dtype, shape, stage, cuts)


GRIDS = st.builds(Grid, pipeline=st.just(1), data=st.integers(1, 9), tensor=st.integers(1, 5))


@st.composite
def layouts(draw: st.DrawFn) -> CheckpointLayout:
    """Draw any tensors, divided along any axes in any order."""
    grid = draw(GRIDS)
    tensors = []
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
        axes = draw(st.permutations(list(Axis)))[: draw(st.integers(0, 2))]
        tensors.append(tensor(f"t{number}", shape, *(Cut(draw(st.integers(0, len(shape) - 1)), axis) for axis in axes)))
    return CheckpointLayout(grid, tensors)


@settings(max_examples=trials(60))
@given(layouts())
def test_every_value_is_written_once_by_a_rank_that_holds_it(layout: CheckpointLayout) -> None:
    assert layout.find_problem() == ""
    assert_written_once(layout)


@settings(max_examples=trials(50))
@given(layouts(), st.data())
def test_the_writers_of_a_box_are_those_whose_boxes_overlap_it(layout: CheckpointLayout, data: st.DataObject) -> None:
    shape = layout.tensors["t0"].shape
    low = tuple(data.draw(st.integers(0, length - 1)) for length in shape)
    sizes = tuple(data.draw(st.integers(1, length - start)) for start, length in zip(low, shape, strict=True))

    def overlaps(box: Box) -> bool:
        edges = zip(low, sizes, box.offsets, box.sizes, strict=True)
        return all(max(a, c) < min(a + b, c + d) for a, b, c, d in edges)

    all_writers = layout.find_writers("t0", Box((0,) * len(shape), shape))
    assert set(layout.find_writers("t0", Box(low, sizes))) == {
        (box, rank) for box, rank in all_writers if overlaps(box)
    }


@settings(max_examples=trials(50))
@given(layouts())
def test_a_layout_is_the_same_after_json(layout: CheckpointLayout) -> None:
    reloaded = CheckpointLayout.from_json(layout.to_json())
    assert reloaded.digest == layout.digest
    assert [reloaded.plan_items(rank) for rank in range(reloaded.grid.size)] == [
        layout.plan_items(rank) for rank in range(layout.grid.size)
    ]


@pytest.mark.parametrize(
    ("shape", "cuts", "problem"),
    [
        ((8,), (Cut(0, Axis.DATA, 2),), ""),
        ((9,), (Cut(0, Axis.DATA, 2),), "no rank along data holds window 4"),
        ((8,), (Cut(0, Axis.DATA, 2, start=1),), "window 4"),
        ((8,), (Cut(0, Axis.TENSOR, 4, order=(0, 0)),), "no rank along tensor holds window 1"),
        ((8,), (Cut(0, Axis.TENSOR, 4, order=(1, 0)),), ""),
        ((8,), (Cut(0, Axis.TENSOR, order=(0,)),), "1 ranks are numbered where the axis tensor has 2"),
        ((8,), (Cut(1, Axis.DATA),), "there is no such cut"),
        ((8, 8), (Cut(0, Axis.DATA), Cut(1, Axis.DATA)), "cut along twice"),
        # A window that the cuts before it leave on some ranks only.
        ((10,), (Cut(0, Axis.TENSOR, 8), Cut(0, Axis.DATA, 2)), ""),
        ((10,), (Cut(0, Axis.TENSOR, 9), Cut(0, Axis.DATA, 2)), "window 4"),
    ],
)
def test_a_value_without_a_writer_is_reported(shape: tuple[int, ...], cuts: tuple[Cut, ...], problem: str) -> None:
    reported = find_partition_problem(shape, cuts, Grid(1, 4, 2))
    assert problem in reported
    assert bool(reported) == bool(problem)


def test_copies_are_written_by_all_holders_in_turn_largest_first() -> None:
    grid = Grid(1, 4, 2)
    tensors = [tensor(f"t{number}", (1 + number % 7, 8), Cut(1, Axis.TENSOR)) for number in range(30)]
    layout = CheckpointLayout(grid, tensors)
    loads = [sum(item.size for item in layout.plan_items(rank)) for rank in range(grid.size)]
    assert min(loads) > 0
    assert max(loads) - min(loads) <= max(metadata.volume for metadata in tensors) * 4 // grid.tensor


def test_a_tensor_of_several_stages_is_written_by_the_first() -> None:
    grid = Grid(3, 2, 1)
    stages = [
        CheckpointLayout(
            grid, [tensor(f"own{stage}", (6,), Cut(0, Axis.DATA), stage=stage), tensor("all", (5,), stage=stage)]
        )
        for stage in range(3)
    ]
    whole, moved = merge_reports(
        [LayoutReport(rank, rank // 2, stages[rank // 2].digest, stages[rank // 2]) for rank in range(6)]
    )
    assert moved == {"all": 0}
    assert_written_once(whole)
    for rank in range(6):
        assert replace_stages(stages[rank // 2], moved).plan_items(rank) == whole.plan_items(rank)


def test_ranks_that_disagree_are_refused_before_anything_is_written() -> None:
    grid = Grid(2, 2, 1)
    divided, whole = (
        CheckpointLayout(grid, [tensor("a", (4,), Cut(0, Axis.DATA))]),
        CheckpointLayout(grid, [tensor("a", (4,))]),
    )
    with pytest.raises(ValueError, match="rank 1 divides the state otherwise"):
        merge_reports([LayoutReport(0, 0, divided.digest, divided), LayoutReport(1, 0, whole.digest, None)])
    with pytest.raises(ValueError, match="two ranks have one place"):
        merge_reports([LayoutReport(0, 0, divided.digest, divided), LayoutReport(0, 0, divided.digest, None)])
    with pytest.raises(ValueError, match="a is not the same in pipeline stages 0 and 1"):
        merge_stages([divided, CheckpointLayout(grid, [tensor("a", (5,), stage=1)])])
    gap = CheckpointLayout(grid, [tensor("a", (9,), Cut(0, Axis.DATA, 4))])
    with pytest.raises(ValueError, match="the state cannot be saved: a: no rank along data holds window 2"):
        merge_reports([LayoutReport(0, 0, gap.digest, gap)])


MESHES = [(3, 1), (1, 8), (2, 2), (3, 2)]
MORE_RANKS = [(1, 1), (2, 1), (8, 1), (1, 2), (5, 2), (2, 4), (3, 4), (4, 8)]


@pytest.mark.parametrize("mode", list(DataParallelMode))
@pytest.mark.parametrize(
    "mesh",
    [*MESHES, *(pytest.param(mesh, marks=pytest.mark.long) for mesh in MORE_RANKS)],
    ids=lambda mesh: f"{mesh[0]}x{mesh[1]}",
)
def test_the_boxes_are_those_of_torchs_own_planners(mesh: tuple[int, int], mode: DataParallelMode) -> None:
    grid = Grid(1, *mesh)
    plans, layouts = [], []
    for rank in range(grid.size):
        with create_rank_state(SHAPE, grid, rank, mode) as state:
            plans.append(create_default_local_save_plan(state, is_coordinator=rank == 0))
            layouts.append(build_layout(state, mesh_coordinates(grid, rank, mode)))
            for item in plans[-1].items:
                box = Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))
                assert not box.volume or get_box(state[item.index.fqn]) == box
    assert len({layout.digest for layout in layouts}) == 1
    layout = layouts[0]
    assert layout.find_problem() == ""
    assert_written_once(layout)
    _, metadata = create_default_global_save_plan(dedup_save_plans(plans))
    torch_boxes = {
        (name, tuple(chunk.offsets), tuple(chunk.sizes))
        for name, entry in metadata.state_dict_metadata.items()
        for chunk in entry.chunks
        if chunk.sizes.numel()
    }
    boxes = {
        (item.name, item.box.offsets, item.box.sizes) for rank in range(grid.size) for item in layout.plan_items(rank)
    }
    assert boxes == torch_boxes
    held_boxes = [{(item.index.fqn, tuple(item.tensor_data.chunk.offsets)) for item in plan.items} for plan in plans]
    for rank in range(grid.size):
        assert {(item.name, item.box.offsets) for item in layout.plan_items(rank)} <= held_boxes[rank]


def test_a_layout_does_not_grow_with_the_ranks() -> None:
    def layout_text(grid: Grid) -> bytes:
        with create_rank_state(SHAPE, grid, 0, DataParallelMode.FULLY_SHARDED, device="meta") as state:
            return build_layout(state, mesh_coordinates(grid, 0, DataParallelMode.FULLY_SHARDED)).text

    small, large = layout_text(Grid(1, 2, 2)), layout_text(Grid(1, 512, 8))
    assert len(large) == len(small) + 2


def test_a_rank_whose_boxes_differ_from_the_layout_is_refused() -> None:
    grid, mode = Grid(1, 2, 2), DataParallelMode.FULLY_SHARDED
    with create_rank_state(SHAPE, grid, 1, mode) as state:
        with pytest.raises(ValueError, match="rank 2 holds"):
            build_layout(state, mesh_coordinates(grid, 2, mode))
        with_extra_rank = replace(mesh_coordinates(grid, 1, mode), world_size=5)
        with pytest.raises(ValueError, match="there are 5 ranks"):
            build_layout(state, with_extra_rank)


def test_a_placement_that_checkpoints_cannot_express_is_refused() -> None:
    from torch.distributed.tensor import Partial

    grid, mode = Grid(1, 2, 2), DataParallelMode.FULLY_SHARDED
    with create_rank_state(SHAPE, grid, 0, mode) as state:
        name = next(name for name in state if name != OPTIMIZER_STEP)
        state[name]._spec = replace(state[name]._spec, placements=(Partial(), *state[name].placements[1:]))
        with pytest.raises(TypeError, match="cannot express the placement"):
            build_layout(state, mesh_coordinates(grid, 0, mode))
    with pytest.raises(TypeError, match="step: checkpoints do not hold"):
        build_layout({"step": torch.zeros(2, dtype=torch.complex64)}, mesh_coordinates(Grid(), 0, mode))


def test_wide_types_come_first_in_a_file() -> None:
    tensors = [tensor("a", (3,), dtype="BF16"), tensor("b", (3,)), tensor("c", (), dtype="I64")]
    assert [item.dtype for item in CheckpointLayout(Grid(), tensors).plan_items(0)] == ["I64", "F32", "BF16"]
