"""From NxD's own checkpoints to this trainer's: a tag as whole tensors.

Guarantees:
- One whole tensor is in memory at a time.
- Master weights, where there are any, are the weights.
- What does not fit the model is refused by name, before anything is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainium_contract.models.parameters import EMBEDDING, HEAD, parameter_sizes
from trainium_trainer.backends.nxd.conversion.tag_files import Tag
from trainium_trainer.backends.nxd.layout.parameter_names import MOMENTS, pieces_of
from trainium_trainer.backends.nxd.layout.pieces import KeyValueOrder, Piece, TensorRank
from trainium_trainer.backends.nxd.limits import check_model
from trainium_trainer.checkpoint.interfaces import Position
from trainium_trainer.checkpoint.whole_tensors import TensorSource
from trainium_trainer.exits import UserError
from trainium_trainer.models.state_dict import OPTIMIZER_STEP, WEIGHT, state_name

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
    """Of the parameter in the optimizer's state."""
    piece: Piece


class NxdSource:
    """A tag as whole tensors."""

    def __init__(self, folder: Path, shape: ModelShape, order: KeyValueOrder, *, weights_only: bool = False) -> None:
        """Look at names and sizes. UserError when they are not those of the model."""
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

    def sources(self) -> list[TensorSource]:
        """All tensors of the state; without the optimizer's files, its moments are zero."""
        found = [TensorSource(OPTIMIZER_STEP, torch.int64, torch.Size(()), lambda: torch.tensor(self.optimizer_step()))]
        for name, size in self._sizes.items():
            for part in (WEIGHT, *MOMENTS):

                def load(part: str = part, name: str = name) -> torch.Tensor:
                    return self._whole(part, name)

                found.append(TensorSource(state_name(part, name), torch.float32, torch.Size(size), load))
        return found

    def optimizer_step(self) -> int:
        """Return updates that the moments have seen."""
        if not self._tag.has_optimizer:
            return 0
        state = _state_of(self._tag.optimizer(0, 0, 0))
        return max((int(entry["step"]) for entry in state.values() if "step" in entry), default=0)

    def position(self, *, step: int | None, samples: int | None, tokens: int | None) -> Position:
        """Where the run stood: as given, else as the training script kept it. UserError when the step is not known."""
        kept = self._tag.user_content()
        step = step if step is not None else _number(kept, "step", "global_step", "total_steps")
        if step is None:
            raise UserError(f"{self._tag.folder}/user_content.pt has no step: give it with --step")
        samples = samples if samples is not None else _number(kept, "samples", "consumed_samples", "total_samples")
        tokens = tokens if tokens is not None else _number(kept, "tokens", "consumed_tokens")
        return Position(step=step, samples=samples or 0, tokens=tokens or 0)

    def _note(self, rank: TensorRank, pipeline: int) -> None:
        values = {
            name: value
            for name, value in self._tag.model(rank.rank, pipeline).items()
            if not name.endswith("inv_freq")  # a buffer of the rotary embedding
        }
        if self._shape.tie_embeddings:
            self._drop_head(values, rank)
        groups = self._tag.optimizer(0, rank.rank, pipeline)["param_groups"] if self._tag.has_optimizer else []
        numbers = self._numbers(values, groups)
        for parameter, value in values.items():
            try:
                pieces = pieces_of(rank, parameter)
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
        """Where the output projection is the embedding, a tag may hold it twice. UserError for a separate one."""
        head, embedding = values.pop(HEAD, None), self._tag.model(rank.rank, 0).get(EMBEDDING)
        if head is None or embedding is None or head.is_meta or embedding.is_meta:
            return
        if not torch.equal(head, embedding):
            raise UserError(
                f"{self._tag.folder}: {HEAD} is not the embedding, but this model's tieEmbeddings is true: give the "
                "configuration that the checkpoint was made with"
            )

    def _numbers(self, values: Mapping[str, torch.Tensor], groups: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """Return the optimizer's number of each parameter, counted through its groups in the module's order."""
        names = [list(values)]
        if len(groups) > 1:
            # One group decays and the other does not: norms and biases, which have one dimension.
            spared = [name for name, value in values.items() if value.dim() == 1]
            others = [name for name in values if name not in spared]
            names = [spared if not group.get("weight_decay") else others for group in groups]
        if groups and [len(each) for each in names] != [len(group["params"]) for group in groups]:
            raise UserError(
                f"{self._tag.folder}/optim: the parameters of its {len(groups)} groups cannot be determined: convert "
                "the weights alone (--weights-only)"
            )
        ordered = [name for each in names for name in each]
        numbers = [number for group in groups for number in group["params"]] if groups else range(len(ordered))
        return dict(zip(ordered, numbers, strict=True))

    def _check_whole(self) -> None:
        """Each tensor of the model is there, in boxes that cover it."""
        if missing := sorted(parameter_sizes(self._shape).keys() - self._places.keys()):
            raise UserError(f"{self._tag.folder} has no {missing[0]}: give the configuration it was made with")
        for name, places in self._places.items():
            boxes = {place.piece.offsets: torch.Size(place.piece.sizes).numel() for place in places}
            if sum(boxes.values()) != torch.Size(self._sizes[name]).numel():
                raise UserError(f"{self._tag.folder}: not all of {name} is there")

    @torch.no_grad()
    def _whole(self, part: str, name: str) -> torch.Tensor:
        whole = torch.zeros(self._sizes[name], dtype=torch.float32)
        if part != WEIGHT and not self._tag.has_optimizer:
            return whole
        for place in self._places[name]:
            box = whole
            for dimension, (offset, size) in enumerate(zip(place.piece.offsets, place.piece.sizes, strict=True)):
                box = box.narrow(dimension, offset, size)
            box.copy_(self._local(part, place)[place.piece.start : place.piece.end])
        return whole

    def _local(self, part: str, place: _Place) -> torch.Tensor:
        """Return a rank's parameter, or what the optimizer has of it, in full."""
        if self._tag.has_optimizer:
            states = [self._optimizer(data, place) for data in range(self._tag.sizes.data)]
            if part == WEIGHT:
                shards = [state.get("sharded_master_weights", {}).get(place.number) for state in states]
            else:
                shards = [_state_of(state)[place.number][MOMENTS[part]] for state in states]
            present = [shard for shard in shards if shard is not None]
            if present:
                return torch.cat(present) if present[0].dim() else present[0]
        weight = self._tag.model(place.tensor, place.pipeline)[place.parameter]
        if weight.is_meta:
            raise UserError(
                f"{self._tag.folder}/model has no weights, and "
                + ("the optimizer has no master weights" if self._tag.has_optimizer else "the optimizer is left out")
                + ": convert it with the optimizer's files, or take another tag"
            )
        return weight

    def _optimizer(self, data: int, place: _Place) -> dict[str, Any]:
        return self._tag.optimizer(data, place.tensor, place.pipeline)


def _state_of(optimizer: Mapping[str, Any]) -> Mapping[int, Mapping[str, Any]]:
    """Moments by number: ZeRO-1 keeps them apart from the state of the optimizer around it."""
    found: Mapping[int, Mapping[str, Any]] = optimizer.get("base_state") or optimizer["state"]
    return found


def _number(kept: Mapping[str, Any], *names: str) -> int | None:
    return next((int(kept[name]) for name in names if isinstance(kept.get(name), (int, float))), None)
