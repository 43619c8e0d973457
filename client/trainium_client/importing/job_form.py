"""Define what one kind of job of another Kubernetes operator is: its form, and the parts that are read from a job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainium_client.importing.source_job import YEAR_SECONDS, Note

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainium_client.importing.fields import Fields

Json = dict[str, Any]
_FROM_SERVER = (
    "uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink", "deletionTimestamp",
    "deletionGracePeriodSeconds", "finalizers", "ownerReferences",
)  # fmt: skip

RENDEZVOUS = "the agents agree on a rendezvous by themselves"
SERVICE = "the operator creates the Service of the workers"
COMPLETE = "the job is complete when all ranks ended with 0"
CAUSES = "the table of causes decides (docs/causes.md), recovery.rules adds rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Values that the function of a form reads."""

    template: Fields
    """Pod template of the workers."""
    nodes: int
    min_nodes: int | None = None
    max_nodes: int | None = None
    spares: int = 0
    processes: object = None
    """Processes of a node for a launcher without that option; None for a form without such a field."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the job that replace those of the training container."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings, as in `SourceJob`."""
    budgets: tuple[tuple[str, int | None], ...] = ()
    """Failures that the job survives, by the field that limits them; the first that is given counts."""
    window_seconds: int = YEAR_SECONDS
    restarts: bool = True
    """Whether the job restarts at all, where nothing limits it."""
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True)
class Form:
    """A kind of job."""

    containers: tuple[str, ...]
    """Names that the platform gives to the training container."""
    settings: Mapping[str, str]
    """Fields of `spec` of a TrainingJob, and the path of each in the job; of several paths the first one given."""
    sentences: Mapping[str, str]
    """Why a field has no counterpart, by its path without indices."""
    read: Callable[[Fields, Sequence[Json], str], Parts]
    """Takes the job, the documents beside it, and the name of the part that trains."""
    refusal_without_launcher: str = ""


def read_metadata(fields: Fields) -> dict[str, Any]:
    """Return name, namespace, labels and annotations, and mark what only the API server writes as read."""
    fields.skip("apiVersion", "kind", "status", *(f"metadata.{key}" for key in _FROM_SERVER))
    return {
        "name": fields.read_text("metadata.name") or fields.read_text("metadata.generateName"),
        "namespace": fields.read_text("metadata.namespace"),
        "labels": fields.read_text_map("metadata.labels"),
        "annotations": fields.read_text_map("metadata.annotations"),
    }
