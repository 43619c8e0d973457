"""Provide what several formats share: metadata, policies and budgets."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainium_client.importing.source_job import YEAR_SECONDS, Budget, Note, Program
from trainium_contract.api_server.errors import ClientError
from trainium_contract.job import CleanPodPolicy

if TYPE_CHECKING:
    from trainium_client.importing.fields import Fields

_FROM_SERVER = (
    "uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink", "deletionTimestamp",
    "deletionGracePeriodSeconds", "finalizers", "ownerReferences",
)  # fmt: skip
_POLICIES = {policy.value: policy for policy in CleanPodPolicy} | {"OnlyComplete": CleanPodPolicy.RUNNING}


def metadata_of(fields: Fields) -> dict[str, Any]:
    """Return name, namespace, labels and annotations, and mark what only the API server writes as read."""
    for key in ("apiVersion", "kind", "status"):
        fields.read(key)
    metadata = fields.child("metadata")
    for key in _FROM_SERVER:
        metadata.read(key)
    return {
        "name": metadata.text("name") or metadata.text("generateName"),
        "namespace": metadata.text("namespace"),
        "labels": metadata.text_map("labels"),
        "annotations": metadata.text_map("annotations"),
    }


def clean_pod_policy(name: str) -> CleanPodPolicy | None:
    """Return the policy of this name; None without one. Raises ClientError for an unknown one."""
    if name and name not in _POLICIES:
        raise ClientError(f"cleanPodPolicy {name} is unknown: give one of {', '.join(_POLICIES)}")
    return _POLICIES.get(name)


def budget_of(*limits: tuple[str, int | None], window_seconds: int = YEAR_SECONDS) -> Budget | None:
    """Return the budget of the first limit that is given; each has the name of its field."""
    for reason, limit in limits:
        if limit is not None:
            return Budget(max_failures=min(limit, 100_000), window_seconds=window_seconds, reason=reason)
    return None


def with_processes(program: Program, given: object) -> Program:
    """Return the program with the processes that a field of the job gives to a launcher without that option."""
    if not program.launched or program.processes is not None or program.one_for_each_device:
        return program
    number = given if isinstance(given, int) else int(given) if isinstance(given, str) and given.isdigit() else None
    return replace(program, processes=number, one_for_each_device=number is None)


def differing_fields(first: dict[str, Any], second: dict[str, Any], name: str, kept: str) -> list[Note]:
    """Return a note that names what differs between two templates, of which only the second is kept."""
    paths = sorted(_differences(first, second, ""))
    if not paths:
        return []
    return [Note(f"{name} differs in {', '.join(paths[:8])}{', ...' * (len(paths) > 8)}: {kept} are used for all")]


def _differences(first: Any, second: Any, path: str) -> set[str]:
    if isinstance(first, dict) and isinstance(second, dict):
        return {
            found
            for key in {*first, *second}
            for found in _differences(first.get(key), second.get(key), f"{path}.{key}".lstrip("."))
        }
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return {
            found
            for index, pair in enumerate(zip(first, second, strict=True))
            for found in _differences(*pair, f"{path}[{index}]")
        }
    return set() if first == second else {path}


def choose_part(parts: list[Fields], path: str, name: str) -> tuple[Fields, tuple[Note, ...]]:
    """Return the part that trains: the only one, or the one with this name. Raises ClientError if that is not clear."""
    by_name = {part.text("name"): part for part in parts}
    if name and name not in by_name:
        raise ClientError(f"{path} has no {name}: give --replica with one of {', '.join(by_name) or 'none'}")
    if not parts or (len(parts) > 1 and not name):
        given = f"has {', '.join(by_name)}: give --replica with the one that trains" if parts else "is empty: give one"
        raise ClientError(f"{path} {given}")
    chosen = by_name[name] if name else parts[0]
    beside = [part for part in parts if part is not chosen]
    for part in beside:
        part.rest()
    return chosen, tuple(Note(f"{path} {part.text('name')}: only {chosen.text('name')} is imported") for part in beside)
