"""Add owner and labels to every object of a job, and a digest to ConfigMaps and budgets.

Invariant: the digest is of the object's content, so it is applied once and again only when that changes.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from trainium_contract.wire.worker_env import GROUP, KIND, VERSION
from trainium_operator.plan.model import names

if TYPE_CHECKING:
    from trainium_operator.plan.model.observed import JobView

Json = dict[str, Any]


def build_owner_reference(job: JobView) -> Json:
    """Return the controller reference that lets the garbage collector delete an object with its job."""
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def compute_content_hash(content: Any) -> str:
    """Return a short digest of JSON content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def build_owned_object(job: JobView, api_version: str, kind: str, name: str, content: Json, component: str) -> Json:
    """Build a complete manifest with the digest of its content."""
    metadata = {
        "name": name,
        "namespace": job.namespace,
        "labels": names.build_object_labels(job.name, component),
        "ownerReferences": [build_owner_reference(job)],
    }
    manifest = {"apiVersion": api_version, "kind": kind, "metadata": metadata, **content}
    digest = compute_content_hash(manifest)
    annotations = {names.ANNOTATION_CONTENT_HASH: digest, names.ANNOTATION_JOB_UID: job.uid}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}
