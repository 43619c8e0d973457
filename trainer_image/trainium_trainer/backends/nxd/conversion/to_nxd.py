"""Convert this trainer's checkpoints to NxD's: write a tag that NxD's `load_checkpoint` reads.

Guarantees:
- One tensor-parallel rank is in memory at a time.
- The weights in `model` have the requested type; the master weights of ZeRO-1 and the moments are those of the
  checkpoint, in float32.
- `done` is written last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainium_contract.models.parameters import parameter_sizes
from trainium_trainer.backends.nxd.conversion.tag_files import begin_tag, finish_tag, format_rank_file_name
from trainium_trainer.backends.nxd.layout.parameter_names import MOMENTS, Projections, list_parameters, list_pieces
from trainium_trainer.backends.nxd.layout.pieces import KeyValueOrder, TensorRank
from trainium_trainer.backends.nxd.limits import check_model
from trainium_trainer.exits import UserError
from trainium_trainer.models.state_dict import OPTIMIZER_STEP, WEIGHT, format_state_name

if TYPE_CHECKING:
    from pathlib import Path

    from trainium_contract.models.shape import ModelShape
    from trainium_contract.trainer.optimizer import OptimizerConfig
    from trainium_trainer.checkpoint.format.reader import CheckpointReader
    from trainium_trainer.checkpoint.interfaces import Position


@dataclass(frozen=True, slots=True)
class NxdTarget:
    """The layout and the names of the tag."""

    tensor: int
    """The tensor-parallel degree."""
    zero1: int | None
    """The data-parallel degree over which ZeRO-1 divides the optimizer's state; None without ZeRO-1."""
    dtype: torch.dtype
    """The type of the weights in `model`."""
    projections: Projections
    order: KeyValueOrder


def write_tag(
    folder: Path,
    reader: CheckpointReader,
    shape: ModelShape,
    target: NxdTarget,
    optimizer: OptimizerConfig,
    position: Position,
) -> None:
    """Write a complete tag. Raises UserError if the model cannot be divided so or the folder is not empty."""
    check_model(shape)
    _check(shape, target.tensor)
    _refuse_parts(reader, shape)
    begin_tag(folder)
    for tensor in range(target.tensor):
        _write_rank(folder, reader, TensorRank(shape, tensor, target.tensor, target.order), target, optimizer)
    rate = optimizer.learning_rate
    schedule = {"base_lrs": [rate], "last_epoch": position.step, "_step_count": position.step + 1, "_last_lr": [rate]}
    torch.save(schedule | {"lr_lambdas": [None]}, folder / "scheduler.pt")
    content = {"step": position.step, "samples": position.samples, "tokens": position.tokens}
    torch.save(content, folder / "user_content.pt")
    finish_tag(folder)


@torch.no_grad()
def _write_rank(
    folder: Path, reader: CheckpointReader, rank: TensorRank, target: NxdTarget, optimizer: OptimizerConfig
) -> None:
    names = list(list_parameters(rank.shape, target.projections))
    ranks = target.zero1 or 1
    step = reader.read(OPTIMIZER_STEP).float()
    model: dict[str, torch.Tensor] = {}
    states: list[dict[int, dict[str, torch.Tensor]]] = [{} for _ in range(ranks)]
    masters: list[dict[int, torch.Tensor]] = [{} for _ in range(ranks)]
    for number, name in enumerate(names):
        weight = _assemble_parameter(reader, rank, WEIGHT, name)
        model[name] = weight.to(target.dtype)
        for data, shard in enumerate(_split_rows(weight, ranks)):
            masters[data][number] = shard
            states[data][number] = {"step": step}
        for part, key in MOMENTS.items():
            for data, shard in enumerate(_split_rows(_assemble_parameter(reader, rank, part, name), ranks)):
                states[data][number][key] = shard
    sizes = {number: model[name].shape for number, name in enumerate(names)}
    if rank.shape.tie_embeddings:
        model["lm_head.weight"] = model["model.embed_tokens.weight"]
    torch.save(model, folder / "model" / format_rank_file_name(0, rank.rank, 0))
    groups = [_group(optimizer, len(names))]
    for data in range(ranks):
        content: dict[str, Any] = {"state": states[data], "param_groups": groups}
        if target.zero1 is not None:
            content = {"state": {}, "param_groups": groups, "base_state": states[data]}
            content |= {"shape_info": sizes, "sharded_master_weights": masters[data]}
        torch.save(content, folder / "optim" / format_rank_file_name(data, rank.rank, 0))


def _assemble_parameter(reader: CheckpointReader, rank: TensorRank, part: str, parameter: str) -> torch.Tensor:
    """Assemble a rank's parameter from boxes of whole tensors."""
    pieces = list_pieces(rank, parameter)
    rows = sum(piece.sizes[0] for piece in pieces)
    local = torch.empty((rows, *pieces[0].sizes[1:]), dtype=torch.float32)
    wanted = [
        item
        for piece in pieces
        for item in reader.plan_read(format_state_name(part, piece.name), piece.offsets, local[piece.start : piece.end])
    ]
    reader.fill(wanted)
    return local


def _split_rows(tensor: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Split into equal chunks of rows, zero-padded at the end; copies, so that a file holds only its chunk."""
    missing = -tensor.shape[0] % ranks
    if missing:
        tensor = torch.cat([tensor, torch.zeros((missing, *tensor.shape[1:]), dtype=tensor.dtype)])
    return [shard.clone() for shard in tensor.chunk(ranks)]


def _group(optimizer: OptimizerConfig, count: int) -> dict[str, Any]:
    """Return AdamW's only group of parameters."""
    return {
        "lr": optimizer.learning_rate,
        "betas": (optimizer.beta1, optimizer.beta2),
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "params": list(range(count)),
    }


def _refuse_parts(reader: CheckpointReader, shape: ModelShape) -> None:
    """Raise UserError if a checkpoint of a tuning lacks weights of the base."""
    missing = [name for name in parameter_sizes(shape) if format_state_name(WEIGHT, name) not in reader.tensors]
    if missing:
        raise UserError(
            f"the checkpoint holds what a tuning trained and not {missing[0]}, which is its base's, but NxD resumes "
            "whole models only: make a Hugging Face folder of it with `trainium-trainer export`"
        )


def _check(shape: ModelShape, tensor: int) -> None:
    for what, number in (
        ("numAttentionHeads", shape.num_attention_heads),
        ("intermediateSize", shape.intermediate_size),
        ("vocabSize", shape.vocab_size),
    ):
        if number % tensor:
            raise UserError(f"--tensor {tensor} does not divide the model's {what} {number}: choose another degree")
    if shape.num_key_value_heads % tensor and tensor % shape.num_key_value_heads:
        raise UserError(
            f"--tensor {tensor} neither divides the model's numKeyValueHeads {shape.num_key_value_heads} nor is it a "
            "multiple of it: choose another degree"
        )
