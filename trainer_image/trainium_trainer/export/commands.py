"""The commands of `trainium-trainer` about finished models.

Invariant: importing this module imports no torch.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path  # noqa: TC003 - typer reads annotations
from typing import Annotated

import typer


class ExportType(StrEnum):
    """Number formats of an exported model."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command()(export)


def export(
    root: Annotated[str, typer.Argument(help="Checkpoints of a run: a folder or s3://bucket/prefix.")],
    folder: Annotated[Path, typer.Argument(help="Folder to make: config.json and safetensors.")],
    *,
    step: Annotated[int | None, typer.Option(help="Step to export; omitted: the newest.")] = None,
    dtype: Annotated[ExportType, typer.Option(help="Number format of the weights.")] = ExportType.BFLOAT16,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json, or a folder with one, to put beside the model.")
    ] = None,
) -> None:
    """Write a checkpoint as a model that transformers, vLLM and others load."""
    import torch  # noqa: PLC0415 - see above

    from trainium_trainer.export.checkpoint import export as export_now  # noqa: PLC0415 - imports torch

    done = export_now(root, folder, step=step, dtype=getattr(torch, dtype.value), tokenizer=tokenizer)
    typer.echo(f"exported step {done} to {folder}")
