"""From raw JSON of the API server to the plan's small frozen views.

Invariant: nobody else knows the shape of that JSON.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from sys import intern
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from trainium_contract.spec.managed_by import MAX_MANAGER, is_ours
from trainium_contract.wire.log_line import readable
from trainium_contract.wire.worker_env import ANNOTATION_KEPT_FROM, ANNOTATION_TEMPLATE_HASH, LABEL_EXTRA, LABEL_JOB
from trainium_operator.cluster.cache.device_views import claim_template_of, device_health_of
from trainium_operator.cluster.cache.lenient import readable_spec, readable_status
from trainium_operator.cluster.cache.membership_record import membership_record
from trainium_operator.plan.faults.node_signals import bad_status
from trainium_operator.plan.manifests.gang_groups import ANNOTATION_GROUP
from trainium_operator.plan.manifests.workloads import LABEL_POD_SET
from trainium_operator.plan.model import names
from trainium_operator.plan.model.job_id import JobId
from trainium_operator.plan.model.node_labels import LABELS_READ, RESOURCES_READ
from trainium_operator.plan.model.observed import (
    JobView,
    NodeCondition,
    NodeReadiness,
    NodeView,
    PodPhase,
    PodView,
    Taint,
)

if TYPE_CHECKING:
    from trainium_contract.wire.messages import Membership
    from trainium_operator.cluster.api.client import Json
    from trainium_operator.cluster.cache.membership_record import MembershipRecord

logger = logging.getLogger(__name__)

LONGEST_REASON, LONGEST_MESSAGE = 64, 256
left_out: Counter[str] = Counter()
"""How often a part of a node's object was malformed, by the kind of part."""
_CHANGED = "lastTransitionTime"
_PHASES = {phase.value: phase for phase in PodPhase}
_READINESS = {readiness.value: readiness for readiness in NodeReadiness}


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One TrainingJob: its view, or why there is none.

    It cannot be read (an object from before the CRD's rules, or a newer one), or somebody else controls it.
    """

    namespace: str
    name: str
    uid: str
    view: JobView | None
    error: str = ""
    elsewhere: str = ""
    """Who else controls it (`spec.managedBy`): then nothing here reads or writes it, or answers its pods."""

    @property
    def id(self) -> JobId:
        """What its objects and agents are kept by."""
        return JobId(self.namespace, self.name, self.uid)


@dataclass(frozen=True, slots=True)
class ChildRecord:
    """One ConfigMap or PodDisruptionBudget of a job."""

    content_hash: str
    record: MembershipRecord | None = None
    """Unread: only the plan of its job asks what it says."""

    @property
    def membership(self) -> Membership | None:
        """The membership that it records; None when it records none, or none that can be read."""
        return self.record.membership if self.record is not None else None


def job_record(raw: Json) -> JobRecord:
    """A TrainingJob; a spec that does not parse becomes `error`.

    One with parts that only a newer version knows is begun by none that does not know them, and goes on with any.
    """
    metadata = raw["metadata"]
    identity = (metadata["namespace"], metadata["name"], metadata["uid"])
    manager = _mapping(raw.get("spec")).get("managedBy")
    if not is_ours(manager):
        return JobRecord(*identity, None, elsewhere=str(manager)[:MAX_MANAGER])
    try:
        spec, unknown = readable_spec(raw.get("spec"))
        view = JobView(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=metadata["uid"],
            generation=metadata.get("generation", 0),
            deleting="deletionTimestamp" in metadata,
            spec=spec,
            status=readable_status(raw.get("status"), f"{metadata['namespace']}/{metadata['name']}"),
            created=_seconds_or_none(metadata, "creationTimestamp") or 0.0,
            resource_version=metadata["resourceVersion"],
            unknown=unknown,
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return JobRecord(*identity, None, f"{where}: {first['msg']}")
    if unknown and view.status.next_pod_ordinal == 0:
        return JobRecord(*identity, None, f"{', '.join(unknown[:3])}: not known to this version of the operator")
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
    disruption = conditions.get("DisruptionTarget", {})
    annotations = metadata.get("annotations") or {}
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
        message=readable(message),
        exit_code=terminated.get("exitCode"),
        deleting="deletionTimestamp" in metadata,
        disrupted=disruption.get("status") == "True",
        disruption=_text(disruption.get("reason"))[:LONGEST_REASON],
        created=_seconds_or_none(metadata, "creationTimestamp") or 0.0,
        scheduled=scheduled.get("status") == "True" or bool((raw.get("spec") or {}).get("nodeName")),
        unschedulable_message=scheduled.get("message", "") if unschedulable else "",
        finished=_seconds_or_none(terminated, "finishedAt"),
        template_hash=annotations.get(ANNOTATION_TEMPLATE_HASH, ""),
        kept_from=frozenset(filter(None, str(annotations.get(ANNOTATION_KEPT_FROM, "")).split(","))),
        image=_image(raw.get("spec") or {}),
        gang=annotations.get(ANNOTATION_GROUP, ""),
        pod_set=metadata.get("labels", {}).get(LABEL_POD_SET, ""),
        extra=LABEL_EXTRA in metadata.get("labels", {}),
        claim_template=claim_template_of(raw),
        device_health=device_health_of(raw),
    )


def node_view(raw: Json) -> NodeView:
    """A node, as small as plans need it; what is malformed is left out.

    Kubelets and detectors write to it every few seconds: the view changes only with what a plan reads.
    """
    metadata, spec, status = _mapping(raw["metadata"]), _mapping(raw.get("spec")), _mapping(raw.get("status"))
    conditions = [each for each in _items(status.get("conditions"), "condition") if _text(each.get("type"))]
    ready_condition: Json = next((each for each in conditions if each["type"] == "Ready"), {})
    ready = _READINESS.get(_text(ready_condition.get("status")), NodeReadiness.UNKNOWN)
    labels = _mapping(metadata.get("labels"))
    return NodeView(
        name=raw["metadata"]["name"],
        ready=ready,
        schedulable=spec.get("unschedulable") is not True,
        taints=tuple(_taint(each) for each in _items(spec.get("taints"), "taint") if _text(each.get("key"))),
        unready_since=None if ready is NodeReadiness.TRUE else _seconds_or_none(ready_condition, _CHANGED),
        conditions=tuple(_condition(each) for each in conditions if _is_bad(each)),
        deleting="deletionTimestamp" in metadata,
        provider_id=_text(spec.get("providerID")),
        labels={key: intern(labels[key]) for key in LABELS_READ if isinstance(labels.get(key), str)},
        capacity=_capacity(_mapping(status.get("allocatable"))),
    )


def _is_bad(condition: Json) -> bool:
    """Only bad conditions are kept: a good one says as little as a missing one, and all good nodes look alike."""
    return condition["type"] != "Ready" and condition.get("status") == bad_status(condition["type"]).value


def _condition(raw: Json) -> NodeCondition:
    return NodeCondition(
        type=intern(raw["type"]),
        status=_READINESS[raw["status"]],
        reason=_text(raw.get("reason"))[:LONGEST_REASON],
        message=_text(raw.get("message"))[:LONGEST_MESSAGE],
        since=_seconds_or_none(raw, _CHANGED),
    )


def _taint(raw: Json) -> Taint:
    return Taint(intern(raw["key"]), intern(_text(raw.get("value"))), intern(_text(raw.get("effect"))))


def _capacity(allocatable: Json) -> dict[str, int]:
    """Extended resources that plans read; a device plugin counts them in whole numbers."""
    found = {}
    for name in RESOURCES_READ & allocatable.keys():
        text = str(allocatable[name])
        if text.isascii() and text.isdecimal() and len(text) < 10:
            found[name] = int(text)
        else:
            _leave_out("quantity", f"{name}: {text}")
    return found


def _seconds_or_none(part: Json, key: str) -> float | None:
    try:
        return seconds(part.get(key))
    except (ValueError, TypeError, OverflowError):
        _leave_out("time stamp", part.get(key))
        return None


def _mapping(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def _items(value: Any, what: str) -> list[Json]:
    found = value if isinstance(value, list) else []
    if any(not isinstance(each, dict) for each in found):
        _leave_out(what, next(each for each in found if not isinstance(each, dict)))
    return [each for each in found if isinstance(each, dict)]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _leave_out(what: str, value: Any) -> None:
    """Count what a node's object holds that cannot be read, and say so the first time for each kind of thing."""
    left_out[what] += 1
    if left_out[what] == 1:
        logger.warning("a node has a malformed %s (%.100r); it is left out, as will be others like it", what, value)


def child_record(raw: Json) -> ChildRecord:
    """A ConfigMap or PodDisruptionBudget of a job."""
    metadata = raw["metadata"]
    content_hash = (metadata.get("annotations") or {}).get(names.ANNOTATION_CONTENT_HASH, "")
    return ChildRecord(content_hash, membership_record(raw))


def seconds(timestamp: Any) -> float | None:
    """Unix seconds of an RFC 3339 time stamp; None stands for itself."""
    return datetime.fromisoformat(timestamp).timestamp() if timestamp else None


def _worker_states(spec: Json, status: Json) -> tuple[Json, Json]:
    """Terminated and waiting state of the worker container, the first of the spec; empty when not in that state."""
    first = next((container["name"] for container in spec.get("containers") or ()), None)
    statuses = status.get("containerStatuses") or ()
    state: Json = next((each.get("state") or {} for each in statuses if each["name"] == first), {})
    return state.get("terminated") or {}, state.get("waiting") or {}


def _image(spec: Json) -> str:
    """Image of the worker container, the first of the spec."""
    return intern(next((str(container.get("image", "")) for container in spec.get("containers") or ()), ""))


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
