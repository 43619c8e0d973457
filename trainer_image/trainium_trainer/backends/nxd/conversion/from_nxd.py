"""Convert NxD's checkpoints to this trainer's: read a tag as whole tensors.

Guarantees:
- One whole tensor is in memory at a time.
- The weights are the master weights, if there are any.
- Tensors that do not match the model are refused by name, before anything is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainium_contract.models.parameters import EMBEDDING, HEAD, parameter_sizes
from trainium_trainer.backends.nxd.conversion.tag_files import Tag
from trainium_trainer.backends.nxd.layout.parameter_names import MOMENTS, list_pieces
from trainium_trainer.backends.nxd.layout.pieces import KeyValueOrder, Piece, TensorRank
from trainium_trainer.backends.nxd.limits import check_model
from trainium_trainer.checkpoint.interfaces import Position
from trainium_trainer.checkpoint.whole_tensors import TensorSource
from trainium_trainer.exits import UserError
from trainium_trainer.models.state_dict import OPTIMIZER_STEP, WEIGHT, format_state_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from trainium_contract.models.shape import ModelShape


@dataclass(frozen=True, slots=True)
class _Place:
    """A box of a whole tensor in one rank's parameter."""

    tensor: int
    pipeline: int
    parameter: str
    number: int
    """The index of the parameter in the optimizer's state."""
    piece: Piece


class NxdSource:
    """A tag as whole tensors."""

    def __init__(self, folder: Path, shape: ModelShape, order: KeyValueOrder, *, weights_only: bool = False) -> None:
        """Check names and sizes. Raises UserError if they are not the model's."""
        check_model(shape)
        self._tag = Tag(folder, weights_only=weights_only)
        self._shape = shape
        self._places: dict[str, list[_Place]] = {}
        self._sizes: dict[str, tuple[int, ...]] = {}
        sizes = self._tag.sizes
        for pipeline in range(sizes.pipeline):
            for tensor in range(sizes.tensor):
                self._note(TensorRank(shape, tensor, sizes.tensor, order), pipeline)
        self._check_whole()

    def list_sources(self) -> list[TensorSource]:
        """Return all tensors of the state; without the optimizer's files, the moments are zero."""
        items = [
            TensorSource(OPTIMIZER_STEP, torch.int64, torch.Size(()), lambda: torch.tensor(self.read_optimizer_step()))
        ]
        for name, size in self._sizes.items():
            for part in (WEIGHT, *MOMENTS):

                def load(part: str = part, name: str = name) -> torch.Tensor:
                    return self._assemble_tensor(part, name)

                items.append(TensorSource(format_state_name(part, name), torch.float32, torch.Size(size), load))
        return items

    def read_optimizer_step(self) -> int:
        """Return the number of updates in the moments."""
        if not self._tag.has_optimizer:
            return 0
        state = _find_inner_state(self._tag.read_optimizer(0, 0, 0))
        return max((int(entry["step"]) for entry in state.values() if "step" in entry), default=0)

    def find_position(self, *, step: int | None, samples: int | None, tokens: int | None) -> Position:
        """Return the position of the run, as given or as stored by the training script. Raises UserError if unknown."""
        content = self._tag.read_user_content()
        step = step if step is not None else _find_number(content, "step", "global_step", "total_steps")
        if step is None:
            raise UserError(f"{self._tag.folder}/user_content.pt has no step: give it with --step")
        samples = (
            samples if samples is not None else _find_number(content, "samples", "consumed_samples", "total_samples")
        )
        tokens = tokens if tokens is not None else _find_number(content, "tokens", "consumed_tokens")
        return Position(step=step, samples=samples or 0, tokens=tokens or 0)

    def _note(self, rank: TensorRank, pipeline: int) -> None:
        values = {
            name: value
            for name, value in self._tag.read_model(rank.rank, pipeline).items()
            if not name.endswith("inv_freq")  # a buffer of the rotary embedding
        }
        if self._shape.tie_embeddings:
            self._drop_head(values, rank)
        groups = self._tag.read_optimizer(0, rank.rank, pipeline)["param_groups"] if self._tag.has_optimizer else []
        numbers = self._number_parameters(values, groups)
        for parameter, value in values.items():
            try:
                pieces = list_pieces(rank, parameter)
            except KeyError as error:
                raise UserError(
                    f"{self._tag.folder}: {parameter} is not a parameter of this model: give the configuration that "
                    "the checkpoint was made with"
                ) from error
            rows = sum(piece.sizes[0] for piece in pieces)
            expected = (rows, *pieces[0].sizes[1:])
            if tuple(value.shape) != expected:
                raise UserError(
                    f"{self._tag.folder}: {parameter} has the size {tuple(value.shape)}, of this model it would have "
                    f"{expected}: give the configuration that the checkpoint was made with"
                )
            for piece in pieces:
                self._sizes[piece.name] = piece.whole
                self._places.setdefault(piece.name, []).append(
                    _Place(rank.rank, pipeline, parameter, numbers[parameter], piece)
                )

    def _drop_head(self, values: dict[str, torch.Tensor], rank: TensorRank) -> None:
        """Drop the output projection if it equals the embedding. Raises UserError if it differs."""
        head, embedding = values.pop(HEAD, None), self._tag.read_model(rank.rank, 0).get(EMBEDDING)
        if head is None or embedding is None or head.is_meta or embedding.is_meta:
            return
        if not torch.equal(head, embedding):
            raise UserError(
                f"{self._tag.folder}: {HEAD} is not the embedding, but this model's tieEmbeddings is true: give the "
                "configuration that the checkpoint was made with"
            )

    def _number_parameters(
        self, values: Mapping[str, torch.Tensor], groups: Sequence[Mapping[str, Any]]
    ) -> dict[str, int]:
        """Return the optimizer's index of each parameter, counted through its groups in the module's order."""
        names = [list(values)]
        if len(groups) > 1:
            # One group has weight decay; the other, norms and biases, which have one dimension, has none.
            spared = [name for name, value in values.items() if value.dim() == 1]
            others = [name for name in values if name not in spared]
            names = [spared if not group.get("weight_decay") else others for group in groups]
        if groups and [len(group_names) for group_names in names] != [len(group["params"]) for group in groups]:
            raise UserError(
                f"{self._tag.folder}/optim: the parameters of its {len(groups)} groups cannot be determined: convert "
                "the weights alone (--weights-only)"
            )
        ordered = [name for group_names in names for name in group_names]
        numbers = [number for group in groups for number in group["params"]] if groups else range(len(ordered))
        return dict(zip(ordered, numbers, strict=True))

    def _check_whole(self) -> None:
        """Check that each tensor of the model exists in boxes that cover it."""
        if missing := sorted(parameter_sizes(self._shape).keys() - self._places.keys()):
            raise UserError(f"{self._tag.folder} has no {missing[0]}: give the configuration it was made with")
        for name, locations in self._places.items():
            boxes = {location.piece.offsets: torch.Size(location.piece.sizes).numel() for location in locations}
            if sum(boxes.values()) != torch.Size(self._sizes[name]).numel():
                raise UserError(f"{self._tag.folder}: not all of {name} is there")

    @torch.no_grad()
    def _assemble_tensor(self, part: str, name: str) -> torch.Tensor:
        tensor = torch.zeros(self._sizes[name], dtype=torch.float32)
        if part != WEIGHT and not self._tag.has_optimizer:
            return tensor
        for location in self._places[name]:
            box = tensor
            for dimension, (offset, size) in enumerate(zip(location.piece.offsets, location.piece.sizes, strict=True)):
                box = box.narrow(dimension, offset, size)
            box.copy_(self._read_local(part, location)[location.piece.start : location.piece.end])
        return tensor

    def _read_local(self, part: str, location: _Place) -> torch.Tensor:
        """Return a rank's whole parameter, or the optimizer's values of it."""
        if self._tag.has_optimizer:
            ranks = range(self._tag.sizes.data)
            states = [self._tag.read_optimizer(data, location.tensor, location.pipeline) for data in ranks]
            if part == WEIGHT:
                shards = [state.get("sharded_master_weights", {}).get(location.number) for state in states]
            else:
                shards = [_find_inner_state(state)[location.number][MOMENTS[part]] for state in states]
            present = [shard for shard in shards if shard is not None]
            if present:
                return torch.cat(present) if present[0].dim() else present[0]
        weight = self._tag.read_model(location.tensor, location.pipeline)[location.parameter]
        if weight.is_meta:
            raise UserError(
                f"{self._tag.folder}/model has no weights, and "
                + ("the optimizer has no master weights" if self._tag.has_optimizer else "the optimizer is left out")
                + ": convert it with the optimizer's files, or take another tag"
            )
        return weight


def _find_inner_state(optimizer: Mapping[str, Any]) -> Mapping[int, Mapping[str, Any]]:
    """Return the moments by index: ZeRO-1 stores them apart from the state of the outer optimizer."""
    state: Mapping[int, Mapping[str, Any]] = optimizer.get("base_state") or optimizer["state"]
    return state


def _find_number(content: Mapping[str, Any], *names: str) -> int | None:
    return next((int(content[name]) for name in names if isinstance(content.get(name), (int, float))), None)
