"""Retry a failed job: delete it and recreate it under its name, so that it resumes from its newest checkpoint.

Invariants: a job that cannot be recreated is not deleted. Fields keep their owners (`ownership.py`), so the next apply
of the job's author, or of a GitOps tool, neither conflicts nor leaves a field behind.
"""

from __future__ import annotations

import copy
import json
import time
from typing import TYPE_CHECKING, Any

from trainium_client.ownership import applier_entries, contains_fields, field_owners, transfer_ownership
from trainium_contract.api_server.errors import ClientError, ConflictError, NotFoundError
from trainium_contract.views.raw import mapping, text
from trainium_contract.views.status_reader import public_status

if TYPE_CHECKING:
    from trainium_client.api import Api, Json

_DELETION_SECONDS = 120.0
_POLL_SECONDS = 0.5
_KEPT_METADATA = ("name", "namespace", "labels", "annotations", "ownerReferences")
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
"""Annotation with which `kubectl apply` finds removed fields; it is kept and updated."""


def retry_job(api: Api, job: Json, manifest: Json | None = None, *, seconds: float = _DELETION_SECONDS) -> Json:
    """Delete a failed job and recreate it from `manifest`, or unchanged. Raises ClientError if that is impossible."""
    name, phase = text(mapping(job, "metadata"), "name"), public_status(job).text("phase")
    if phase != "Failed":
        raise ClientError(f"only a failed job can be retried, and {name} is {phase or 'not answered yet'}")
    as_it_is = manifest is None
    manifest = user_manifest(job) if manifest is None else manifest
    probe = copy.deepcopy(manifest)
    probe["metadata"] |= {"name": f"{name[:40]}-probe"}
    api.create_job(probe, dry_run=True)  # a quota or a policy refuses it before anything is deleted
    uid = str(job["metadata"]["uid"])
    api.delete_job(name, uid, foreground=True)
    deadline = time.monotonic() + seconds
    while _job_exists(api, name, uid):
        if time.monotonic() > deadline:
            raise ClientError(
                f"{name} is deleted, but its pods are not gone after {seconds:.0f} s (is a node down?); when they are, "
                f"recreate it with kubectl apply"
            )
        time.sleep(_POLL_SECONDS)
    try:
        created = api.create_job(manifest)
    except ConflictError as error:
        return _accept_recreated(api, name, None if as_it_is else manifest, error)
    return transfer_ownership(api, created, field_owners(job) if as_it_is else applier_entries(job, created))


def _accept_recreated(api: Api, name: str, manifest: Json | None, error: ConflictError) -> Json:
    """Return the job that a GitOps tool recreated first, if it has the corrected spec; else raise ClientError."""
    found = api.job(name)
    if manifest is None or contains_fields(found.get("spec"), manifest.get("spec")):
        return found
    entries = mapping(found, "metadata").get("managedFields")
    managers = {text(entry, "manager") for entry in entries if "subresource" not in entry} if entries else set()
    who = " or ".join(sorted(managers)) or "another client"
    raise ClientError(
        f"{name} was recreated by {who} after its deletion, without the correction: it runs as its source "
        f"has it. Correct it there, or stop that tool for as long as the retry takes"
    ) from error


def user_manifest(job: Json) -> dict[str, Any]:
    """Return the job as its author wrote it, without what the server and the operator added."""
    metadata = mapping(job, "metadata")
    kept: dict[str, Any] = {key: copy.deepcopy(metadata[key]) for key in _KEPT_METADATA if metadata.get(key)}
    spec = copy.deepcopy(dict(mapping(job, "spec")))
    return {"apiVersion": job["apiVersion"], "kind": job["kind"], "metadata": kept, "spec": spec}


def correct_manifest(job: Json, written: Json, where: str) -> dict[str, Any]:
    """Return the corrected job under the failed one's name, with its owners. `where` is for errors."""
    metadata, found = mapping(job, "metadata"), mapping(written, "metadata")
    namespace = text(metadata, "namespace")
    other = text(found, "namespace")
    if other not in ("", namespace):
        raise ClientError(f"{where} is of namespace {other}, and the failed job of {namespace}: correct one of them")
    kept: dict[str, Any] = {key: copy.deepcopy(found[key]) for key in ("labels", "annotations") if found.get(key)}
    if metadata.get("ownerReferences"):
        kept["ownerReferences"] = copy.deepcopy(metadata["ownerReferences"])
    kept |= {"name": metadata["name"], "namespace": namespace}
    version = text(written, "apiVersion") or str(job["apiVersion"])
    spec = copy.deepcopy(dict(mapping(written, "spec")))
    manifest = {"apiVersion": version, "kind": job["kind"], "metadata": kept, "spec": spec}
    if _LAST_APPLIED in mapping(metadata, "annotations"):
        applied = {_LAST_APPLIED: json.dumps(manifest)}
        manifest["metadata"] = {**kept, "annotations": {**kept.get("annotations", {}), **applied}}
    return manifest


def _job_exists(api: Api, name: str, uid: str) -> bool:
    try:
        return str(api.job(name)["metadata"].get("uid")) == uid
    except NotFoundError:
        return False
