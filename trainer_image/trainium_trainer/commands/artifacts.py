"""Commands of `trainium-trainer` that export, merge and fetch models.

Guarantees:
- Importing this module imports no torch.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path  # noqa: TC003 - typer reads annotations
from typing import Annotated

import typer

from trainium_contract.trainer.artifacts import ArtifactKind, ArtifactPrecision


class ExportType(StrEnum):
    """Number formats of an exported model."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def precision(self) -> ArtifactPrecision:
        """The type as a value of the configuration."""
        return next(precision for precision in ArtifactPrecision if precision.value.lower() == self.value)


def export(
    root: Annotated[str, typer.Argument(help="Checkpoints of a run: a folder or s3://bucket/prefix.")],
    folder: Annotated[str, typer.Argument(help="Folder to make, or s3://bucket/prefix.")],
    *,
    step: Annotated[int | None, typer.Option(help="Step to export; omitted: the newest.")] = None,
    dtype: Annotated[ExportType, typer.Option(help="Number format of the weights.")] = ExportType.BFLOAT16,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json, or a folder with one, to put beside the model.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="The model that the run began with; needed where it trained a part only.")
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the LoRA adapter in peft's format, not the merged model.")
    ] = False,
) -> None:
    """Write a checkpoint as a model that transformers, vLLM and others load, or as an adapter for peft."""
    from trainium_trainer.artifacts.export import export as export_now  # noqa: PLC0415 - imports torch

    done = export_now(
        root,
        folder,
        step=step,
        precision=dtype.precision,
        tokenizer=tokenizer,
        base=base,
        kind=ArtifactKind.ADAPTER if adapter else ArtifactKind.MODEL,
        heartbeat=_show_progress,
    )
    typer.echo(f"exported step {done} to {folder}")


def merge(
    output: Annotated[str, typer.Argument(help="Folder to make, or s3://bucket/prefix.")],
    *,
    base: Annotated[str, typer.Option(help="The model: a Hugging Face folder or s3://bucket/prefix.")],
    adapter: Annotated[str, typer.Option(help="A LoRA adapter in peft's format.")],
    dtype: Annotated[ExportType, typer.Option(help="Number format of the weights.")] = ExportType.BFLOAT16,
) -> None:
    """Merge a LoRA adapter into its model, in float32, row by row."""
    from trainium_trainer.artifacts.export import merge as merge_now  # noqa: PLC0415 - imports torch

    merge_now(base, adapter, output, precision=dtype.precision, heartbeat=_show_progress)
    typer.echo(f"merged {adapter} into {base}: {output}")


def fetch_model(
    name: Annotated[str, typer.Argument(help="Name of a model on the Hugging Face hub: owner/name.")],
    output: Annotated[Path, typer.Option(help="Folder to make; name it in model.weights afterwards.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit; omitted: the newest.")] = None,
) -> None:
    """Fetch configuration, safetensors and tokenizer; what is there already is not fetched again. Token: HF_TOKEN."""
    from trainium_trainer.weights.fetch import fetch  # noqa: PLC0415 - imports the hub's library

    typer.echo(f"fetched {name} to {output}: {fetch(name, output, revision=revision)}")


def _show_progress(done: float) -> None:
    """Show progress on one line that is overwritten, if stderr is a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{100 * done:3.0f} %" + ("\n" if done >= 1.0 else ""))
        sys.stderr.flush()
