"""`simulate`: run a job of the cluster, or of a file, in `trainium-operator simulate`, which uses the real plan.

Invariant: nothing is written to the cluster. The simulator is the operator's program, beside this one or on PATH.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from trainium_client.commands.options import Session, complete_jobs
from trainium_contract.api_server.errors import ClientError

_PROGRAM = "trainium-operator"


def simulate(
    session: Session,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME] [OPTION]...",
            help="The TrainingJob, as the cluster has it, then options of trainium-operator simulate.",
            autocompletion=complete_jobs,
        ),
    ] = None,
    filename: Annotated[Path | None, typer.Option("--filename", "-f", help="A manifest in place of NAME.")] = None,
    learn: Annotated[
        bool, typer.Option("--learn", help="Take the times of the stages from the job's history.")
    ] = False,
) -> int:
    """Simulate the goodput of a job and what each spare adds (options: trainium-operator simulate --help)."""
    program = find_program()
    options = list(arguments or [])
    name = options.pop(0) if filename is None and options and not options[0].startswith("-") else None
    if name is None and filename is None:
        raise ClientError("give the NAME of a job in the cluster first, or a manifest with -f FILE")
    with tempfile.TemporaryDirectory() as folder:
        manifest = filename or Path(folder) / f"{name}.json"
        if name is not None:
            manifest.write_text(json.dumps(session.open().read_job(name)), encoding="utf-8")
        learn_options = ["--learn-from", str(manifest)] if learn else []
        output = subprocess.run([program, "simulate", str(manifest), *learn_options, *options], check=False)
    return 1 if output.returncode else 0


def find_program() -> str:
    """Find the simulator's program. Raises ClientError if it is not installed."""
    program = shutil.which(_PROGRAM, path=str(Path(sys.executable).parent)) or shutil.which(_PROGRAM)
    if program is None:
        raise ClientError(
            f"{_PROGRAM} is not installed here, which runs the simulation; install it from the same release: "
            "pip install trainium_simulator-*.whl trainium_operator-*.whl trainium_contract-*.whl"
        )
    return program
