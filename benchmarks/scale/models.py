"""The models whose jobs are simulated, and the state of one of their ranks without its numbers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainium_contract.trainer.model import ModelConfig, ModelPreset
from trainium_contract.trainer.parallelism import DataParallelMode
from trainium_trainer.backends.nxd.layout.divisions import divisions, zero1
from trainium_trainer.backends.nxd.layout.parameter_names import Projections, parameters_of
from trainium_trainer.backends.nxd.layout.pieces import TensorRank
from trainium_trainer.checkpoint.dividing.cuts import Axis, Cut, Grid
from trainium_trainer.checkpoint.dividing.scheme import Divided, Scheme
from trainium_trainer.checkpoint.format.part import TensorPart
from trainium_trainer.configuration.model_shape import resolve_shape
from trainium_trainer.models.llama import Llama
from trainium_trainer.models.shapes import PRESETS
from trainium_trainer.models.stages import canonical_parameters
from trainium_trainer.models.state_dict import OPTIMIZER_STEP, state_name
from trainium_trainer.models.state_dict import StateKind as Kind

if TYPE_CHECKING:
    from trainium_trainer.models.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Model:
    """A job of manifests/examples."""

    name: str
    shape: ModelShape
    tensor: int
    """Tensor-parallel degree."""
    on_a_node: int
    """Ranks of a node."""
    step_seconds: float
    """Of a step at 4,096 ranks: HLAT's for 7B; 70B has ten times the work in one step, on cores twice as fast."""

    def grid(self, ranks: int) -> Grid:
        """The mesh of so many ranks."""
        return Grid(1, ranks // self.tensor, self.tensor)


MODELS = (
    Model("hlat-7b", PRESETS[ModelPreset.LLAMA2_7B], tensor=8, on_a_node=32, step_seconds=10.0),
    Model("hlat-70b", PRESETS[ModelPreset.LLAMA2_70B], tensor=32, on_a_node=64, step_seconds=10.0),
)


@dataclass
class Place:
    """What checkpoints ask of a mesh."""

    grid: Grid
    rank: int
    dp_mode: DataParallelMode = DataParallelMode.SHARDED_OPTIMIZER

    def __post_init__(self) -> None:
        self.pp_rank, self.dp_rank, self.tp_rank = self.grid.place(self.rank)
        self.world_size, self.dp_size = self.grid.size, self.grid.data
        self.tp_size, self.pp_size = self.grid.tensor, self.grid.pipeline


def state_of(shape: ModelShape, place: Place, *, values: bool = False) -> dict[str, Any]:
    """One rank's state under its checkpoint names, bfloat16; without `values` nothing may be copied out of it."""
    rank = TensorRank(shape, place.tp_rank, place.tp_size)
    state: dict[str, Any] = {OPTIMIZER_STEP: torch.zeros((), dtype=torch.int64)}
    for parameter in parameters_of(shape, Projections.FUSED):
        pieces = rank.pieces(parameter)
        rows = -(-sum(piece.sizes[0] for piece in pieces) // place.dp_size)
        for stored, kind in itertools.product(zero1(pieces, divisions(rank, parameter), place.dp_rank, rows), Kind):
            piece = stored.piece
            local = torch.zeros(piece.sizes if values else (), dtype=torch.bfloat16)
            state[state_name(kind, piece.name)] = TensorPart(
                lambda local=local: local,  # type: ignore[misc]
                whole=piece.whole,
                offsets=piece.offsets,
                sizes=piece.sizes,
                dtype=torch.bfloat16,
                division=stored.division,
            )
    return state


def tiny_shapes(model: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """The parameters of a small model by name."""
    shape = resolve_shape(ModelConfig.model_validate(model), model["vocabSize"])
    with torch.device("meta"):
        return {name: tuple(value.shape) for name, value in canonical_parameters(Llama(shape))}


def tiny_scheme(shapes: dict[str, tuple[int, ...]], ranks: int, *, sharded: bool) -> Scheme:
    """How a float32 model with these parameters and AdamW's moments is held: by FSDP, or whole by each rank."""
    grid, division = Grid(1, ranks, 1), (Cut(0, Axis.DATA),) if sharded else ()
    tensors = [
        Divided(state_name(kind, name), "F32", shape, 0, division)
        for (name, shape), kind in itertools.product(shapes.items(), Kind)
    ]
    return Scheme(grid, [*tensors, Divided(OPTIMIZER_STEP, "I64", (), 0, ())])
