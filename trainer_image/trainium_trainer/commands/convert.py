"""Convert checkpoints from and to those of neuronx-distributed (NxD): `trainium-trainer convert`.

Guarantees:
- Importing this module imports no torch.
- NxD itself is not needed.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path  # noqa: TC003 - typer reads annotations
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from trainium_contract.models.parameters import count_parameters
from trainium_trainer.exits import UserError
from trainium_trainer.storage import open_storage
from trainium_trainer.storage.protocol import Retry

if TYPE_CHECKING:
    from trainium_trainer.backends.nxd.layout.pieces import KeyValueOrder

E = TypeVar("E", bound=StrEnum)


def from_nxd(
    tag: Annotated[Path, typer.Argument(help="The tag's folder: it has `model`, `optim` and `done`.")],
    root: Annotated[str, typer.Argument(help="New checkpoint root: a folder or s3://bucket/prefix.")],
    *,
    config: Annotated[Path, typer.Option(help="YAML file of the trainer with the model that the tag was made with.")],
    step: Annotated[
        int | None, typer.Option(help="Optimizer steps completed, if user_content.pt does not have it.")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Samples consumed, likewise.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens trained on, likewise.")] = None,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Leave the optimizer's state out.")] = False,
    hardware: Annotated[str, typer.Option(help="Where key/value heads were repeated: trn1 or trn2.")] = "trn1",
) -> None:
    """Convert a checkpoint of neuronx-distributed to one that training resumes from."""
    from trainium_trainer.backends.nxd.conversion.from_nxd import NxdSource  # noqa: PLC0415 - imports torch
    from trainium_trainer.checkpoint.whole_tensors import write_whole  # noqa: PLC0415
    from trainium_trainer.configuration.config import load  # noqa: PLC0415
    from trainium_trainer.configuration.model_shape import resolve_shape  # noqa: PLC0415
    from trainium_trainer.data.prepared.s3_copy import find_vocabulary_size  # noqa: PLC0415

    settings = load(config)
    shape = resolve_shape(settings.model, find_vocabulary_size(settings.data))
    source = NxdSource(tag, shape, _sort_hardware(hardware), weights_only=weights_only)
    position = source.find_position(step=step, samples=samples, tokens=tokens)
    folder = write_whole(open_storage(root), source.list_sources(), position, {"model": shape.to_json()}, Retry())
    typer.echo(
        f"{root}/{folder}: step {position.step}, {count_parameters(shape):,} parameters; the data continues after "
        f"{position.samples:,} samples"
    )


def to_nxd(
    root: Annotated[str, typer.Argument(help="Checkpoint root: a folder or s3://bucket/prefix.")],
    tag: Annotated[Path, typer.Argument(help="New folder DIRECTORY/TAG.")],
    *,
    tensor: Annotated[int, typer.Option(min=1, help="Tensor-parallel degree.")],
    zero1: Annotated[
        int | None,
        typer.Option(min=1, help="Data-parallel degree that ZeRO-1 divides the state over; without: no ZeRO-1."),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Of the checkpoint; by default the newest.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of the trainer, for the optimizer's settings.")] = None,
    precision: Annotated[str, typer.Option(help="Of the weights in `model`: Float32 or BFloat16.")] = "BFloat16",
    projections: Annotated[
        str, typer.Option(help="Query, key and value in one weight (fused) or three (split).")
    ] = "fused",
    hardware: Annotated[str, typer.Option(help="How key/value heads are repeated: as on trn1 or as on trn2.")] = "trn1",
) -> None:
    """Make a tag that neuronx-distributed's `load_checkpoint` reads."""
    import torch  # noqa: PLC0415 - slow

    from trainium_contract.trainer.optimizer import OptimizerConfig  # noqa: PLC0415
    from trainium_contract.trainer.parallelism import Precision  # noqa: PLC0415
    from trainium_trainer.backends.nxd.conversion.to_nxd import NxdTarget, write_tag  # noqa: PLC0415
    from trainium_trainer.backends.nxd.layout.parameter_names import Projections  # noqa: PLC0415
    from trainium_trainer.checkpoint.format.reader import CheckpointReader  # noqa: PLC0415
    from trainium_trainer.checkpoint.interfaces import Position  # noqa: PLC0415
    from trainium_trainer.checkpoint.root.selection import choose_checkpoint, explain_damage, parse_shape  # noqa: PLC0415
    from trainium_trainer.configuration.config import load  # noqa: PLC0415

    storage = open_storage(root)
    checkpoint = choose_checkpoint(storage, root, step, milestones=False)
    manifest = checkpoint.manifest
    dtypes = {Precision.FLOAT32: torch.float32, Precision.BFLOAT16: torch.bfloat16}
    target = NxdTarget(
        tensor=tensor,
        zero1=zero1,
        dtype=dtypes[_parse_choice(Precision, precision, "--precision")],
        projections=_parse_choice(Projections, projections, "--projections"),
        order=_sort_hardware(hardware),
    )
    optimizer = OptimizerConfig() if config is None else load(config).optimizer
    position = Position(step=manifest.step, samples=manifest.samples, tokens=manifest.tokens)
    with explain_damage(root):
        reader = CheckpointReader(storage, checkpoint, Retry())
        write_tag(tag, reader, parse_shape(checkpoint), target, optimizer, position)
    typer.echo(f"{tag}: step {manifest.step}, tensor parallel {tensor}" + (f", ZeRO-1 over {zero1}" if zero1 else ""))


def _sort_hardware(hardware: str) -> KeyValueOrder:
    from trainium_trainer.backends.nxd.layout.pieces import KeyValueOrder  # noqa: PLC0415 - with those that import torch

    return _parse_choice(KeyValueOrder, hardware, "--hardware")


def _parse_choice(kind: type[E], value: str, option: str) -> E:
    try:
        return kind(value)
    except ValueError as error:
        raise UserError(f"{option} {value}: use {' or '.join(choice.value for choice in kind)}") from error
