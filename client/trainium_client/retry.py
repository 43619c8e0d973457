"""Retry a failed job: delete it and recreate it under its name, so that it resumes from its newest checkpoint.

Invariants: a job that cannot be recreated is not deleted. Fields keep their owners (`ownership.py`), so the next apply
of the job's author, or of a GitOps tool, neither conflicts nor leaves a field behind.
"""

from __future__ import annotations

import copy
import json
import time
from typing import TYPE_CHECKING, Any

from trainium_client.ownership import build_applier_entries, contains_fields, list_field_owners, transfer_ownership
from trainium_contract.api_server.errors import ClientError, ConflictError, NotFoundError
from trainium_contract.views.raw import read_mapping, read_text
from trainium_contract.views.status_reader import read_public_status

if TYPE_CHECKING:
    from trainium_client.api import Api, Json

_DELETION_TIMEOUT_SECONDS = 120.0
_POLL_SECONDS = 0.5
_AUTHOR_METADATA = ("name", "namespace", "labels", "annotations", "ownerReferences")
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
"""Annotation by which `kubectl apply` detects removed fields."""


def retry_job(api: Api, job: Json, manifest: Json | None = None) -> Json:
    """Delete a failed job and recreate it from `manifest`, or unchanged. Raises ClientError if that is impossible."""
    name, phase = read_text(read_mapping(job, "metadata"), "name"), read_public_status(job).read_text("phase")
    if phase != "Failed":
        raise ClientError(f"only a failed job can be retried, and {name} is {phase or 'without a status'}")
    unchanged = manifest is None
    manifest = extract_user_manifest(job) if manifest is None else manifest
    probe = copy.deepcopy(manifest)
    probe["metadata"] |= {"name": f"{name[:40]}-probe"}
    api.create_job(probe, dry_run=True)  # a quota or a policy refuses it before anything is deleted
    uid = str(job["metadata"]["uid"])
    api.delete_job(name, uid, foreground=True)
    deadline = time.monotonic() + _DELETION_TIMEOUT_SECONDS
    while _has_job(api, name, uid):
        if time.monotonic() > deadline:
            raise ClientError(
                f"{name} is deleted, but its pods still exist after {_DELETION_TIMEOUT_SECONDS:.0f} s (is a node "
                f"down?); when they are deleted, recreate it with kubectl apply"
            )
        time.sleep(_POLL_SECONDS)
    try:
        created = api.create_job(manifest)
    except ConflictError as error:
        return _accept_recreated(api, name, None if unchanged else manifest, error)
    return transfer_ownership(
        api, created, list_field_owners(job) if unchanged else build_applier_entries(job, created)
    )


def _accept_recreated(api: Api, name: str, manifest: Json | None, error: ConflictError) -> Json:
    """Return the job that a GitOps tool recreated first, if it has the corrected spec; else raise ClientError."""
    recreated = api.read_job(name)
    if manifest is None or contains_fields(recreated.get("spec"), manifest.get("spec")):
        return recreated
    entries = read_mapping(recreated, "metadata").get("managedFields")
    managers = {read_text(entry, "manager") for entry in entries if "subresource" not in entry} if entries else set()
    creator = " or ".join(sorted(managers)) or "another client"
    raise ClientError(
        f"{name} was recreated by {creator} after its deletion, without the correction: it runs as its source "
        f"has it. Correct it there, or stop that tool for as long as the retry takes"
    ) from error


def extract_user_manifest(job: Json) -> dict[str, Any]:
    """Return the job as its author wrote it, without fields of the server and the operator."""
    metadata = read_mapping(job, "metadata")
    kept: dict[str, Any] = {key: copy.deepcopy(metadata[key]) for key in _AUTHOR_METADATA if metadata.get(key)}
    spec = copy.deepcopy(dict(read_mapping(job, "spec")))
    return {"apiVersion": job["apiVersion"], "kind": job["kind"], "metadata": kept, "spec": spec}


def correct_manifest(job: Json, correction: Json, source: str) -> dict[str, Any]:
    """Return the corrected job with the name and owners of the failed one; errors name `source`."""
    metadata, corrected = read_mapping(job, "metadata"), read_mapping(correction, "metadata")
    namespace = read_text(metadata, "namespace")
    other = read_text(corrected, "namespace")
    if other not in ("", namespace):
        raise ClientError(f"{source} is of namespace {other}, and the failed job of {namespace}: correct one of them")
    kept: dict[str, Any] = {
        key: copy.deepcopy(corrected[key]) for key in ("labels", "annotations") if corrected.get(key)
    }
    if metadata.get("ownerReferences"):
        kept["ownerReferences"] = copy.deepcopy(metadata["ownerReferences"])
    kept |= {"name": metadata["name"], "namespace": namespace}
    version = read_text(correction, "apiVersion") or str(job["apiVersion"])
    spec = copy.deepcopy(dict(read_mapping(correction, "spec")))
    manifest = {"apiVersion": version, "kind": job["kind"], "metadata": kept, "spec": spec}
    if _LAST_APPLIED in read_mapping(metadata, "annotations"):
        applied = {_LAST_APPLIED: json.dumps(manifest)}
        manifest["metadata"] = {**kept, "annotations": {**kept.get("annotations", {}), **applied}}
    return manifest


def _has_job(api: Api, name: str, uid: str) -> bool:
    try:
        return str(api.read_job(name)["metadata"].get("uid")) == uid
    except NotFoundError:
        return False
