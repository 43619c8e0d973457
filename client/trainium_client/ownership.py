"""Transfer field ownership (`metadata.managedFields`) to a job that is recreated.

The creator of an object owns all of it: the next `kubectl apply --server-side` of its author would conflict with this
client wherever the file has changed, and would not remove fields that the file no longer has. So an unchanged job is
transferred to its previous owners, a corrected one to its previous applier.

Invariants: entries of the status are never touched. Without the right to patch, the job runs but its
ownership is not transferred.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_contract.api_server.errors import ConflictError, ForbiddenError
from trainium_contract.views.raw import read_mapping, read_objects, read_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_client.api import Api, Json

_APPLIED_BY_CLIENT = "kubectl-client-side-apply"
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_MAX_ATTEMPTS = 5
Entries = tuple[dict[str, Any], ...]


def build_applier_entries(job: Json, created: Json) -> Entries:
    """Return the entries of a job that was recreated from a file: its previous applier owns all of it."""
    applied = [entry for entry in list_field_owners(job) if entry.get("operation") == "Apply"]
    if applied:
        main = max(applied, key=lambda entry: _count_fields(read_mapping(entry, "fieldsV1").get("f:spec")))
        owner = {"manager": read_text(main, "manager"), "operation": "Apply"}
    elif _LAST_APPLIED in read_mapping(read_mapping(job, "metadata"), "annotations"):
        owner = {"manager": _APPLIED_BY_CLIENT, "operation": "Update"}
    else:
        return ()
    return tuple({**entry, **owner} for entry in list_field_owners(created))


def transfer_ownership(api: Api, created: Json, entries: Entries) -> Json:
    """Transfer ownership of a new job to those in `entries`; without entries it stays with this client."""
    own_keys = {_get_owner_key(entry) for entry in list_field_owners(created)}
    name = read_text(read_mapping(created, "metadata"), "name")
    current = created
    for _ in range(_MAX_ATTEMPTS if own_keys and entries else 0):
        others = [
            entry
            for entry in read_objects(read_mapping(current, "metadata"), "managedFields")
            if _get_owner_key(entry) not in own_keys
        ]
        version = read_text(read_mapping(current, "metadata"), "resourceVersion")
        patch = {"metadata": {"managedFields": [*entries, *others], "resourceVersion": version}}
        try:
            return api.patch_job(name, patch)
        except ForbiddenError:
            return current
        except ConflictError:  # the operator has written the status
            current = api.read_job(name)
    return current


def contains_fields(value: Any, expected: Any) -> bool:
    """Return whether an object has all expected fields; it may have more, for instance defaults."""
    if isinstance(expected, dict):
        return isinstance(value, dict) and all(contains_fields(value.get(key), expected[key]) for key in expected)
    return bool(value == expected)


def list_field_owners(job: Mapping[str, Any]) -> Entries:
    """Return the entries of a job without those of its status."""
    entries = read_objects(read_mapping(job, "metadata"), "managedFields")
    return tuple(dict(entry) for entry in entries if read_text(entry, "subresource") != "status")


def _get_owner_key(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    return read_text(entry, "manager"), read_text(entry, "operation"), read_text(entry, "subresource")


def _count_fields(owned: Any) -> int:
    return 1 + sum(map(_count_fields, owned.values())) if isinstance(owned, dict) else 0
