"""Transfer field ownership (`metadata.managedFields`) to a job that is recreated.

The creator of an object owns all of it: the next `kubectl apply --server-side` of its author would conflict with us
wherever the file has changed, and would not remove fields that the file no longer has. So owners are transferred: of a
job that is recreated unchanged to its previous owners; of a corrected one to its previous applier.
Invariants: entries of the status are never touched; a job whose owners cannot be handed over (no right to patch) runs
all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_contract.api_server.errors import ConflictError, ForbiddenError
from trainium_contract.views.raw import mapping, objects, text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_client.api import Api, Json

_APPLIED_BY_CLIENT = "kubectl-client-side-apply"
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_TRIES = 5
Entries = tuple[dict[str, Any], ...]


def owners_before(job: Json) -> Entries:
    """Return the entries of a job that is recreated unchanged."""
    return _entries(job)


def owner_after(job: Json, made: Json) -> Entries:
    """Return the entries of a job that was recreated from a file: all of it belongs to its previous applier."""
    applied = [each for each in _entries(job) if each.get("operation") == "Apply"]
    if applied:
        first = max(applied, key=lambda each: _fields(mapping(each, "fieldsV1").get("f:spec")))
        owner = {"manager": text(first, "manager"), "operation": "Apply"}
    elif _LAST_APPLIED in mapping(mapping(job, "metadata"), "annotations"):
        owner = {"manager": _APPLIED_BY_CLIENT, "operation": "Update"}
    else:
        return ()
    return tuple({**each, **owner} for each in _entries(made))


def hand_over(api: Api, made: Json, entries: Entries) -> Json:
    """Give what we own of a job that we just made to those in `entries`; none: it stays ours."""
    ours, name = {_key(each) for each in _entries(made)}, str(made.get("metadata", {}).get("name", ""))
    found = made
    for _ in range(_TRIES if ours and entries else 0):
        others = [each for each in objects(mapping(found, "metadata"), "managedFields") if _key(each) not in ours]
        version = text(mapping(found, "metadata"), "resourceVersion")
        patch = {"metadata": {"managedFields": [*entries, *others], "resourceVersion": version}}
        try:
            return api.patch_job(name, patch)
        except ForbiddenError:
            return found
        except ConflictError:  # the operator has written the status
            found = api.job(name)
    return found


def contains(found: Any, wanted: Any) -> bool:
    """Return whether an object has all wanted fields; it may have more, for instance defaults."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(contains(found.get(key), each) for key, each in wanted.items())
    return bool(found == wanted)


def _entries(job: Mapping[str, Any]) -> Entries:
    found = objects(mapping(job, "metadata"), "managedFields")
    return tuple(dict(each) for each in found if text(each, "subresource") != "status")


def _key(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    return text(entry, "manager"), text(entry, "operation"), text(entry, "subresource")


def _fields(owned: Any) -> int:
    return 1 + sum(map(_fields, owned.values())) if isinstance(owned, dict) else 0
