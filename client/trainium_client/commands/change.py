"""Commands that change a job: suspend, resume, scale, retry."""

from __future__ import annotations

import time
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated

import typer

from trainium_client.commands.options import JobName, Session
from trainium_client.manifest import read_manifest
from trainium_client.retry import correct_manifest, retry_job
from trainium_contract.api_server.errors import ClientError
from trainium_contract.pages.formatting import pluralize
from trainium_contract.views.job import build_job_view
from trainium_contract.views.raw import read_mapping, read_text
from trainium_contract.views.status_reader import read_public_status

if TYPE_CHECKING:
    from trainium_client.api import Json


def suspend(
    session: Session,
    name: JobName,
) -> None:
    """Save, release all nodes, and wait for `resume`."""
    _set_suspend(session, name, suspend=True)


def resume(
    session: Session,
    name: JobName,
) -> None:
    """Resume from the newest checkpoint."""
    _set_suspend(session, name, suspend=False)


def scale(
    session: Session,
    name: JobName,
    size: Annotated[int, typer.Argument(help="Nodes; those that would save no pass of a step stay warm in reserve.")],
    role: Annotated[str, typer.Option("--role", help="Change the pods of this role of the job instead.")] = "",
) -> None:
    """Change the number of nodes, or of the pods of a role, while the job trains."""
    api = session.open()
    job = api.read_job(name)
    _require_not_ended(job, "scaled")
    if role:
        api.scale_role(job, role, size)
        sentence = f"role {role} of {name} is asked to have {pluralize(size, 'pod')}; see: kubectl trn status {name}"
        session.print_message(sentence, name=name, namespace=api.namespace, role=role, pods=size)
        return
    api.scale_job(name, size)
    sentence = f"{name} is asked to train on {pluralize(size, 'node')}; see: kubectl trn watch {name}"
    session.print_message(sentence, name=name, namespace=api.namespace, nodes=size)


def retry(
    session: Session,
    name: JobName,
    filename: Annotated[
        Path | None, typer.Option("--filename", "-f", help="The corrected job; default: as the cluster has it.")
    ] = None,
) -> None:
    """Run a failed job again, from its newest checkpoint: it is deleted and recreated, unchanged or from the file."""
    api = session.open()
    job = api.read_job(name)
    retry_job(
        api, job, None if filename is None else correct_manifest(job, read_manifest(filename, name), str(filename))
    )
    has_checkpoint = build_job_view(job, now=time.time()).checkpoints.durable_step is not None
    start = (
        "it resumes from its newest checkpoint"
        if has_checkpoint
        else "from the beginning, no checkpoint of it is known"
    )
    sentence = f"{name} runs again; {start}; see: kubectl trn watch {name}"
    session.print_message(sentence, name=name, namespace=api.namespace)


def _set_suspend(session: Session, name: str, *, suspend: bool) -> None:
    api = session.open()
    job = api.read_job(name)
    _require_not_ended(job, "suspended" if suspend else "resumed")
    changed = (read_mapping(job, "spec").get("suspend") is True) is not suspend
    if changed:
        api.patch_job(name, {"spec": {"suspend": suspend}})
        sentence = (
            f"{name} saves and releases its nodes; to resume it: kubectl trn resume {name}"
            if suspend
            else f"{name} resumes, from its newest checkpoint if it has one; see: kubectl trn watch {name}"
        )
    else:
        sentence = f"{name} is {'suspended' if suspend else 'not suspended'} already"
    session.print_message(sentence, name=name, namespace=api.namespace, suspend=suspend, changed=changed)


def _require_not_ended(job: Json, change: str) -> None:
    phase, name = read_public_status(job).read_text("phase"), read_text(read_mapping(job, "metadata"), "name")
    if phase in {"Completed", "Failed"}:
        hint = f"; run it again with: kubectl trn retry {name}" if phase == "Failed" else ""
        raise ClientError(f"{name} has {phase.lower()} and cannot be {change}{hint}")
