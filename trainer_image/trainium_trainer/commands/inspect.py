"""List the checkpoints of a run: `trainium-trainer inspect`.

Guarantees:
- Importing this module imports no torch, so that looking at checkpoints is quick.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from trainium_trainer.checkpoint import inspect as inspection
from trainium_trainer.exits import UserError
from trainium_trainer.storage import open_storage
from trainium_trainer.storage.errors import create_storage_error


def inspect(
    root: Annotated[str, typer.Argument(help="The parent of the step-N folders: a folder or s3://bucket/prefix.")],
    *,
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and compare its digest.")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Set damaged and uncommitted ones aside; no run may be using them.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the durable checkpoints of a run, mark those that are whole, and set aside the others.

    Exit codes: 0 when all is well or was repaired, 64 when a checkpoint is damaged, 81 when the store cannot be read.
    """
    storage = open_storage(root)
    try:
        if not storage.list(""):
            raise UserError(f"there is nothing in {root}: name the folder that holds the step-N folders")
        rows = inspection.list_checkpoints(storage, verify=verify)
        if repair:
            broken = inspection.set_aside(storage, rows)
            rows = inspection.list_checkpoints(storage)
            typer.echo(f"set aside: {', '.join(row.folder for row in broken) or 'nothing'}", err=True)
    except OSError as error:
        raise create_storage_error(error, root) from error
    if as_json:
        typer.echo(inspection.format_json(rows))
    else:
        typer.echo(inspection.format_table(rows, now=time.time()) if rows else f"no checkpoints in {root}")
    damaged = [row.folder for row in rows if row.state is inspection.CheckpointState.DAMAGED]
    if damaged:
        raise UserError(
            f"{len(damaged)} of {len(rows)} checkpoints in {root} are damaged: resuming takes the newest whole one; "
            "--repair sets them aside"
        )
