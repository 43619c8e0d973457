"""State of a job that the operator keeps across its restarts, and that no other program reads.

`job.py` combines it with the public fields (`public.py`). The API server stores it as one text, so that what people see
with `kubectl describe` and `kubectl get -o yaml` is the public part.

Invariants: the two have no field in common. Client, pages and views read nothing here. A condition reports what people
should know of it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from trainium_contract.base import StatusModel
from trainium_contract.faults.causes import Cause
from trainium_contract.sizes import MAX_ROLE_REPLICAS, MAX_ROLES
from trainium_contract.status.activity import ActivityStatus
from trainium_contract.status.start_failures import StartFailuresStatus
from trainium_contract.stored_json import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping

INTERNAL_KEY = "internal"
"""Key of the text below `status`."""
MAX_INTERNAL_TEXT = 1 << 17
"""128 failures with the longest names have 90,000 characters."""
MAX_ROLE_FAILURES = 32
WINDOW_SAMPLES = 15
"""Samples of the step time in one window."""


class GangStatus(StatusModel):
    """State of gang scheduling."""

    holding_since: float | None = None
    """Unix seconds since when some workers hold nodes that do not suffice to start."""
    releases: int = 0
    """Number of times that a partial gang released its nodes since the job last trained."""
    retry_at: float | None = None
    """Unix seconds until which no worker is created after nodes were released."""


class FailureRecord(StatusModel):
    """One counted failure, for the windowed budgets."""

    at: float
    """Unix seconds."""
    cause: Cause
    """Why it failed."""
    pod: Annotated[str, Field(max_length=253)] = ""
    """Pod that failed; a pod that never became a member is counted once by its name."""
    node: Annotated[str, Field(max_length=253)] = ""
    """Node that new workers avoid because of it; empty if no node is suspected."""


class RoleState(StatusModel):
    """State of one role."""

    name: Annotated[str, Field(max_length=63)]
    """Name of the role."""
    next_ordinal: int = 0
    """Ordinal of its next pod; raised before the pod is created, so no name is ever used twice."""
    ready: Annotated[tuple[int, ...], Field(max_length=MAX_ROLE_REPLICAS)] = ()
    """Ordinals of its pods that have been ready."""
    failed_starts: int = 0
    """Consecutive pods that ended before they were ready; the pause before the next grows with them."""
    failed_at: float | None = None
    """Unix seconds of the newest of them."""
    failures: Annotated[tuple[FailureRecord, ...], Field(max_length=MAX_ROLE_FAILURES)] = ()
    """The newest failures of its pods; no budget counts them."""


class InternalIdleNodes(StatusModel):
    """Internal part of `status.idleNodes`: the time of the next request for idle nodes."""

    asked_at: float | None = None
    """Unix seconds since when requested extras wait for a node; absent while none does."""
    failed_requests: Annotated[int, Field(ge=0)] = 0
    """Number of consecutive requests without a node."""
    retry_at: float | None = None
    """Unix seconds before which no more are requested."""


class StepWindow(StatusModel):
    """The present window of step times, and where its next sample starts."""

    size: int = 0
    """Nodes while the samples were taken."""
    step: int = 0
    """Newest step that was counted."""
    at: float | None = None
    """When it ended, by its agent's clock; absent while no sample may begin."""
    samples: Annotated[tuple[float, ...], Field(max_length=WINDOW_SAMPLES)] = ()
    """Seconds per step."""


class InternalGoodput(StatusModel):
    """Internal part of `status.goodput`: the state of the count."""

    starting: bool = True
    """Whether no new step has been made since the job started or was resumed."""
    counted_step: int = -1
    """Steps up to this one are counted."""
    earlier_seconds: float = 0.0
    """Productive seconds at sizes that are no longer listed."""
    earlier_node_seconds: float = 0.0
    """The same as node time."""
    window: StepWindow = StepWindow()
    """Step times from which the reference follows."""


class InternalStatus(StatusModel):
    """The operator's internal state of a job, beside that within `goodput` and `idleNodes`."""

    activity: ActivityStatus = ActivityStatus()
    """Since when the job has been active, for its deadlines."""
    gang: GangStatus = GangStatus()
    """Gang scheduling of the workers."""
    start_failures: StartFailuresStatus = StartFailuresStatus()
    """Worker pods that ended before their agent registered."""
    committed_step: int = -1
    """Newest durable checkpoint that members have reported; -1 for none."""
    next_pod_ordinal: int = 0
    """Ordinal of the next pod; raised before the pod is created, so no name is ever used twice."""
    waiting_since: float | None = None
    """Unix seconds since when the membership is smaller than desired or a member is missing."""
    leaving_since: float | None = None
    """Unix seconds since when a member's node is known to leave soon."""
    failures: Annotated[tuple[FailureRecord, ...], Field(max_length=128)] = ()
    """Counted failures within the largest budget window, oldest first."""
    role_states: Annotated[tuple[RoleState, ...], Field(max_length=MAX_ROLES)] = ()
    """State of each role."""

    @property
    def all_failures(self) -> tuple[FailureRecord, ...]:
        """Return the failures of workers and of pods of roles, for the memory of bad machines."""
        return (*self.failures, *(record for role in self.role_states for record in role.failures))


_PARTS_BY_PATH: dict[str, type[StatusModel]] = {
    "": InternalStatus,
    "goodput.": InternalGoodput,
    "idleNodes.": InternalIdleNodes,
}
"""The place of each part below `status`."""


def list_internal_fields() -> frozenset[str]:
    """Return the paths below `status`, as on the wire, of all internal fields; a path includes all below it."""
    return frozenset(
        f"{place}{field.alias or name}"
        for place, part in _PARTS_BY_PATH.items()
        for name, field in part.model_fields.items()
    )


def pack_internal(status: StatusModel) -> dict[str, Any]:
    """Return the status as the API server stores it: public fields that have a value, the internal ones as one text."""
    stored = status.to_wire()
    given = status.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    internal: dict[str, Any] = {}
    for path in sorted(list_internal_fields()):
        place, _, name = path.rpartition(".")
        (stored[place] if place else stored).pop(name, None)
        part = given.get(place, {}) if place else given
        if name in part:
            (internal.setdefault(place, {}) if place else internal)[name] = part[name]
    # A metav1.Condition has its message even if it is empty; no changes since a failure differ from unknown ones.
    complete = {name: stored.pop(name) for name in ("conditions", "failedSpec") if name in stored}
    stored = _drop_empty(stored) | complete
    return {**stored, INTERNAL_KEY: json.dumps(internal, separators=(",", ":"))} if internal else stored


_EMPTY: tuple[Any, ...] = ("", [], {})
"""Values that a missing field has as well, and that `kubectl describe` would show as a line each."""


def _drop_empty(value: Any) -> Any:
    """Return a part of the status without fields that have no value."""
    if isinstance(value, dict):
        return {name: kept for name, part in value.items() if (kept := _drop_empty(part)) not in _EMPTY}
    return [_drop_empty(part) for part in value] if isinstance(value, list) else value


def unpack_internal(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored status with its internal fields in their places. Raises ValueError if their text is invalid."""
    status = {key: value for key, value in stored.items() if key != INTERNAL_KEY}
    if INTERNAL_KEY not in stored:
        return status
    internal = read_json(str(stored[INTERNAL_KEY]).encode())
    if not isinstance(internal, dict):
        raise ValueError("the text is no JSON object")  # noqa: TRY004 - one kind of error for bad data
    for path in list_internal_fields():
        place, _, name = path.rpartition(".")
        part = internal.get(place) if place else internal
        if isinstance(part, dict) and name in part:
            beside = status.get(place)
            if place:
                status[place] = {**(beside if isinstance(beside, dict) else {}), name: part[name]}
            else:
                status[name] = part[name]
    return status
