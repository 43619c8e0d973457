"""`import`: print TrainingJobs for jobs of other platforms, scripts of Slurm and commands of torchrun."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainium_client.commands.options import notify
from trainium_contract.api_server.errors import ClientError

if TYPE_CHECKING:
    from trainium_client.importing.convert import ImportedJob

_STANDARD_INPUT = "-"


def import_(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="A PyTorchJob, TrainJob (with its runtime, in any of the files), JobSet, HyperPodPyTorchJob, RayJob, "
            "sbatch script or command of torchrun; - reads standard input.",
        ),
    ],
    instance_type: Annotated[
        str, typer.Option("--instance-type", help="Instance type of the workers, for instance trn2.48xlarge.")
    ] = "",
    image: Annotated[str, typer.Option("--image", help="Image of the program, in place of the one in the input.")] = "",
    replica: Annotated[
        str, typer.Option("--replica", help="The replicated Job or replica spec that trains, where there are several.")
    ] = "",
) -> None:
    """Print a TrainingJob for a job of another platform, with a comment at each decision; nothing is created."""
    # The models of a job take a tenth of a second, which other commands do not need.
    from trainium_client.importing.documents import MAX_BYTES, decode_input  # noqa: PLC0415
    from trainium_client.importing.importer import Options, import_jobs  # noqa: PLC0415
    from trainium_client.importing.writer import write_job  # noqa: PLC0415

    inputs = [(_read_name(file), decode_input(_read(file, MAX_BYTES + 1), _read_name(file))) for file in files]
    imported = import_jobs(inputs, Options(instance_type, image, replica))
    for name, job in imported:
        _refuse_invalid(job, name)
    sys.stdout.write("---\n".join(write_job(job, name) for name, job in imported))
    sys.stdout.flush()
    for name, job in imported:
        for sentence in job.missing:
            notify(f"{name}: {sentence}")


def _read_name(file: str) -> str:
    return "standard input" if file == _STANDARD_INPUT else Path(file).name


def _read(file: str, size: int) -> bytes:
    """Return at most `size` bytes of an input. Raises ClientError."""
    try:
        if file == _STANDARD_INPUT:
            return sys.stdin.buffer.read(size)
        with Path(file).open("rb") as opened:
            return opened.read(size)
    except OSError as error:
        raise ClientError(f"{file} cannot be read: {error.strerror or error}") from error


def _refuse_invalid(job: ImportedJob, name: str) -> None:
    """Raise ClientError if a value is not allowed in a TrainingJob; fields that are still missing are."""
    from pydantic import ValidationError  # noqa: PLC0415 - as in import_

    from trainium_contract.job import TrainingJobSpec  # noqa: PLC0415 - as in import_

    try:
        TrainingJobSpec.model_validate(job.document["spec"])
    except ValidationError as error:
        for detail in error.errors(include_url=False, include_input=False):
            if detail["type"] != "missing":
                place = ".".join(str(part) for part in detail["loc"])
                raise ClientError(
                    f"{name} cannot be a TrainingJob: {place}: {detail['msg']}; change the input"
                ) from None
