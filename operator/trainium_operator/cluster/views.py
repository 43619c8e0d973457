"""From raw JSON of the API server to the plan's small frozen views.

Invariant: nobody else knows the shape of that JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from trainium_contract.job import TrainingJobSpec, TrainingJobStatus
from trainium_contract.messages import Membership
from trainium_contract.worker_env import ANNOTATION_TEMPLATE_HASH, LABEL_JOB
from trainium_operator.plan import names
from trainium_operator.plan.model import JobView, NodeReadiness, NodeView, PodPhase, PodView

if TYPE_CHECKING:
    from trainium_operator.cluster.api import Json

_PHASES = {phase.value: phase for phase in PodPhase}
_READINESS = {readiness.value: readiness for readiness in NodeReadiness}


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One TrainingJob: its view, or why it cannot be read (an object from before the CRD's rules, or a newer one)."""

    namespace: str
    name: str
    uid: str
    view: JobView | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class ChildRecord:
    """One Service or ConfigMap of a job."""

    content_hash: str
    membership: Membership | None = None


def job_record(raw: Json) -> JobRecord:
    """A TrainingJob; a spec or status that does not parse becomes `error`."""
    metadata = raw["metadata"]
    identity = (metadata["namespace"], metadata["name"], metadata["uid"])
    try:
        view = JobView(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=metadata["uid"],
            generation=metadata.get("generation", 0),
            deleting="deletionTimestamp" in metadata,
            spec=TrainingJobSpec.model_validate(raw.get("spec") or {}),
            status=TrainingJobStatus.model_validate(raw.get("status") or {}),
            created=seconds(metadata.get("creationTimestamp")) or 0.0,
            resource_version=metadata["resourceVersion"],
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return JobRecord(*identity, None, f"{where}: {first['msg']}")
    return JobRecord(*identity, view)


def pod_view(raw: Json) -> PodView:
    """A worker pod. Raises ValueError when its name is not one that the plan gives."""
    metadata, status = raw["metadata"], raw.get("status") or {}
    ordinal = names.ordinal_of(metadata.get("labels", {}).get(LABEL_JOB, ""), metadata["name"])
    if ordinal is None:
        raise ValueError(f"pod {metadata['name']} carries a worker's labels, but not a worker's name")
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled", {})
    unschedulable = scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"
    terminated, waiting = _worker_states(raw.get("spec") or {}, status)
    reason, message = _most_telling(status, terminated, waiting)
    return PodView(
        name=metadata["name"],
        uid=metadata["uid"],
        ordinal=ordinal,
        phase=_PHASES.get(status.get("phase", ""), PodPhase.UNKNOWN if status.get("phase") else PodPhase.PENDING),
        ip=status.get("podIP", ""),
        node=(raw.get("spec") or {}).get("nodeName", ""),
        ready=conditions.get("Ready", {}).get("status") == "True",
        reason=reason,
        message=message,
        exit_code=terminated.get("exitCode"),
        deleting="deletionTimestamp" in metadata,
        disrupted=conditions.get("DisruptionTarget", {}).get("status") == "True",
        created=seconds(metadata.get("creationTimestamp")) or 0.0,
        scheduled=scheduled.get("status") == "True" or bool((raw.get("spec") or {}).get("nodeName")),
        unschedulable_message=scheduled.get("message", "") if unschedulable else "",
        finished=seconds(terminated.get("finishedAt")),
        template_hash=(metadata.get("annotations") or {}).get(ANNOTATION_TEMPLATE_HASH, ""),
    )


def node_view(raw: Json) -> NodeView:
    """A node."""
    spec, status = raw.get("spec") or {}, raw.get("status") or {}
    condition: Json = next((each for each in status.get("conditions") or () if each["type"] == "Ready"), {})
    ready = _READINESS.get(condition.get("status", ""), NodeReadiness.UNKNOWN)
    return NodeView(
        name=raw["metadata"]["name"],
        ready=ready,
        schedulable=not spec.get("unschedulable", False),
        taints=tuple(taint["key"] for taint in spec.get("taints") or ()),
        unready_since=None if ready is NodeReadiness.TRUE else seconds(condition.get("lastTransitionTime")),
    )


def child_record(raw: Json) -> ChildRecord:
    """A Service or ConfigMap of a job; a membership that cannot be read counts as none, and is then written anew."""
    metadata = raw["metadata"]
    content_hash = (metadata.get("annotations") or {}).get(names.ANNOTATION_CONTENT_HASH, "")
    return ChildRecord(content_hash, membership_of(raw))


def membership_of(raw: Json) -> Membership | None:
    """The membership in a ConfigMap; None when it holds none, or none that can be read."""
    text = (raw.get("data") or {}).get(names.MEMBERSHIP_KEY) if isinstance(raw.get("data"), dict) else None
    if text is None:
        return None
    try:
        return Membership.model_validate(json.loads(text))
    except ValueError:
        return None


def seconds(timestamp: Any) -> float | None:
    """Unix seconds of an RFC 3339 time stamp; None stands for itself."""
    return datetime.fromisoformat(timestamp).timestamp() if timestamp else None


def _worker_states(spec: Json, status: Json) -> tuple[Json, Json]:
    """Terminated and waiting state of the worker container, the first of the spec; empty when not in that state."""
    first = next((container["name"] for container in spec.get("containers") or ()), None)
    statuses = status.get("containerStatuses") or ()
    state: Json = next((each.get("state") or {} for each in statuses if each["name"] == first), {})
    return state.get("terminated") or {}, state.get("waiting") or {}


def _most_telling(status: Json, terminated: Json, waiting: Json) -> tuple[str, str]:
    """Reason and message; init containers count while they are what holds the pod up or ended it."""
    if status.get("reason"):
        return status["reason"], status.get("message", "")
    for container in status.get("initContainerStatuses") or ():
        state = container.get("state") or {}
        ended = state.get("terminated") or {}
        if ended.get("exitCode", 0) != 0:
            return ended.get("reason", "Error"), f"init container {container['name']}: {ended.get('message', '')}"
        held = state.get("waiting") or {}
        if held.get("reason") not in (None, "PodInitializing"):
            return held["reason"], f"init container {container['name']}: {held.get('message', '')}"
    for state in (terminated, waiting):
        if state.get("reason"):
            return state["reason"], state.get("message", "")
    return "", ""
