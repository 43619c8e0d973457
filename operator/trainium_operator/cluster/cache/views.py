"""Parse objects of the API server into the small frozen views of plans.

Invariant: no other module reads that JSON.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from dataclasses import dataclass, replace
from sys import intern
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from pydantic_core import to_json

from trainium_contract.rfc3339 import parse_rfc3339
from trainium_contract.spec.managed_by import MAX_MANAGER, is_managed_here
from trainium_contract.wire import worker_env
from trainium_contract.wire.last_report import parse_last_report
from trainium_contract.wire.log_line import LINE_BYTES, format_log_text
from trainium_contract.wire.recorded_membership import parse_refused_status
from trainium_operator.cluster.cache.device_views import read_claim_template, read_device_health
from trainium_operator.cluster.cache.lenient import read_spec, read_status
from trainium_operator.cluster.cache.membership_record import MembershipRecord, read_membership_record
from trainium_operator.cluster.cache.ownership import find_controlling_job
from trainium_operator.cluster.cache.parts import as_integer, as_mapping, as_mappings, as_name, as_text, as_texts
from trainium_operator.plan.faults.node_signals import get_bad_status
from trainium_operator.plan.manifests.worker_needs import WORKER_CONTAINER
from trainium_operator.plan.model import names, observed
from trainium_operator.plan.model.names import ANNOTATION_GROUP, LABEL_POD_SET, RESOURCES_READ, JobId, is_label_read

if TYPE_CHECKING:
    from trainium_contract.api_server.responses import Json
    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.wire.messages import Membership

logger = logging.getLogger(__name__)

MAX_REASON_CHARACTERS, MAX_MESSAGE_CHARACTERS = 64, 256
MAX_POD_REASON_CHARACTERS, MAX_TERMINATION_MESSAGE_CHARACTERS = 256, 8192
"""Limits for a pod: twice the size of a container's last output that a kubelet keeps."""
left_out: Counter[str] = Counter()
"""Counts of malformed parts of pods and nodes, by the kind of part."""
_CHANGED = "lastTransitionTime"
_ENDED = ("Succeeded", "Failed")
_PHASES = {phase.value: phase for phase in observed.PodPhase}
_READINESS = {readiness.value: readiness for readiness in observed.NodeReadiness}


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One TrainingJob: its view, or the reason why it has none.

    Either it cannot be parsed (an object from before the CRD's rules, or a newer one), or another controller manages
    it.
    """

    namespace: str
    name: str
    uid: str
    view: observed.JobView | None
    error: str = ""
    managed_elsewhere: str = ""
    """The other controller (`spec.managedBy`). The operator then neither reads nor writes the job, nor answers its
    pods."""

    @property
    def id(self) -> JobId:
        """Key of its objects and agents."""
        return JobId(self.namespace, self.name, self.uid)


@dataclass(frozen=True, slots=True)
class ChildRecord:
    """One ConfigMap, PodDisruptionBudget, NetworkPolicy or Service of a job."""

    content_hash: str
    """Digest of the request, from its annotation; empty without one."""
    stored: str = ""
    """Digest of the stored content."""
    record: MembershipRecord | None = None
    """Not parsed yet: only the plan of its job needs the content."""
    refused_status: TrainingJobStatus | None = None
    """The job's status that the API server has refused so far."""

    @property
    def membership(self) -> Membership | None:
        """The recorded membership; None when there is none, or none that can be parsed."""
        return self.record.membership if self.record is not None else None


def parse_job(raw: Json) -> JobRecord:
    """Parse a TrainingJob; a spec that does not parse becomes `error`.

    This version does not start a job with parts that only a newer version knows, but keeps one running.
    """
    metadata = raw["metadata"]
    identity = (metadata["namespace"], metadata["name"], metadata["uid"])
    manager = as_mapping(raw.get("spec")).get("managedBy")
    if not is_managed_here(manager):
        return JobRecord(*identity, None, managed_elsewhere=str(manager)[:MAX_MANAGER])
    try:
        spec, unknown = read_spec(raw.get("spec"))
        view = observed.JobView(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=metadata["uid"],
            generation=as_integer(metadata.get("generation")) or 0,
            deleting="deletionTimestamp" in metadata,
            spec=spec,
            status=read_status(raw.get("status"), f"{metadata['namespace']}/{metadata['name']}"),
            created=_parse_seconds(metadata, "creationTimestamp") or 0.0,
            resource_version=metadata["resourceVersion"],
            finalizers=tuple(filter(None, map(as_text, metadata.get("finalizers") or ()))),
            labels={
                key: value for key, value in as_texts(metadata.get("labels")).items() if names.is_inherited_label(key)
            },
            unknown=unknown,
        )
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        return JobRecord(*identity, None, f"{path}: {first['msg']}")
    if unknown and view.status.next_pod_ordinal == 0:
        return JobRecord(*identity, None, f"{', '.join(unknown[:3])}: not known to this version of the operator")
    return JobRecord(*identity, view)


def parse_worker_pod(raw: Json) -> observed.PodView:
    """Parse a worker pod without malformed parts. Raises ValueError when its name is not a worker's."""
    metadata = raw["metadata"]
    job = as_text(as_mapping(metadata.get("labels")).get(worker_env.LABEL_JOB))
    ordinal = names.parse_ordinal(job, metadata["name"])
    if ordinal is None:
        raise ValueError(f"pod {metadata['name']} carries a worker's labels, but not a worker's name")
    return _parse_pod(raw, ordinal)


def find_stray(raw: Json) -> observed.StrayPod | None:
    """Return the running pod if it has a worker's name and is none, because nothing controls it or a label is gone."""
    metadata, owner = raw["metadata"], find_controlling_job(raw)
    labels = as_mapping(metadata.get("labels"))
    job = as_text(labels.get(worker_env.LABEL_JOB)) if owner is None else owner.name
    if names.parse_ordinal(job, metadata["name"]) is None:
        return None
    if as_mapping(raw.get("status")).get("phase") in _ENDED:
        return None
    expected = names.build_selector_labels(job)
    missing = next((key for key, value in expected.items() if labels.get(key) != value), "")
    if owner is not None and not missing:
        return None
    node = as_name(as_mapping(raw.get("spec")).get("nodeName"))
    return observed.StrayPod(job, metadata["name"], metadata["uid"], node, "" if owner is None else missing)


def parse_other_pod(raw: Json) -> observed.PodView:
    """Parse a pod of a role, or the one that measures a milestone's model, without malformed parts.

    Raises ValueError when its name is not one of its role's.
    """
    metadata = raw["metadata"]
    labels = as_mapping(metadata.get("labels"))
    role = as_text(labels.get(worker_env.LABEL_ROLE))
    if role == worker_env.ROLE_EVALUATION:
        return replace(_parse_pod(raw, 0), role=role)
    prefix = names.format_role_object_name(as_text(labels.get(worker_env.LABEL_JOB)), role)
    ordinal = names.parse_number(metadata["name"], f"{prefix}-")
    if ordinal is None:
        raise ValueError(f"pod {metadata['name']} has the labels of role {role}, but no name of its pods")
    containers = as_mappings(as_mapping(raw.get("spec")).get("containers"))
    serving = next((as_text(container.get("name")) for container in containers), "")
    return replace(_parse_pod(raw, ordinal, container=serving), role=role)


def _parse_pod(raw: Json, ordinal: int, *, container: str = WORKER_CONTAINER) -> observed.PodView:
    metadata, spec, status = raw["metadata"], as_mapping(raw.get("spec")), as_mapping(raw.get("status"))
    labels, annotations = as_mapping(metadata.get("labels")), as_mapping(metadata.get("annotations"))
    conditions = {
        as_text(condition.get("type")): condition for condition in _list_items(status.get("conditions"), "condition")
    }
    scheduled, disruption = conditions.get("PodScheduled", {}), conditions.get("DisruptionTarget", {})
    unschedulable = scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"
    statuses = _list_items(status.get("containerStatuses"), "container status")
    states = {as_text(entry.get("name")): as_mapping(entry.get("state")) for entry in reversed(statuses)}
    worker = states.get(container, {})
    terminated = as_mapping(worker.get("terminated"))
    init = InitState() if worker.get("running") or terminated else _parse_init_state(spec, status)
    reason, message = _find_reason_and_message(status, scheduled, worker, init)
    exit_code, termination_message = as_integer(terminated.get("exitCode")), as_text(terminated.get("message"))
    last_report, text = parse_last_report(termination_message, metadata["uid"], exit_code)
    if message == termination_message:
        message = text
    phase, node = as_text(status.get("phase")), as_name(spec.get("nodeName"))
    return observed.PodView(
        name=metadata["name"],
        uid=metadata["uid"],
        ordinal=ordinal,
        phase=_PHASES.get(phase, observed.PodPhase.UNKNOWN if phase else observed.PodPhase.PENDING),
        ip=as_text(status.get("podIP")),
        node=node,
        ready=conditions.get("Ready", {}).get("status") == "True",
        reason=reason[:MAX_POD_REASON_CHARACTERS],
        message=format_log_text(message[:LINE_BYTES])[:MAX_TERMINATION_MESSAGE_CHARACTERS],
        exit_code=exit_code,
        deleting="deletionTimestamp" in metadata,
        deletion_deadline=_parse_seconds(metadata, "deletionTimestamp"),
        finalizers=tuple(filter(None, map(as_text, metadata.get("finalizers") or ()))),
        disrupted=disruption.get("status") == "True",
        disruption=as_text(disruption.get("reason"))[:MAX_REASON_CHARACTERS],
        created=_parse_seconds(metadata, "creationTimestamp") or 0.0,
        scheduled=scheduled.get("status") == "True" or bool(node),
        scheduler=as_name(spec.get("schedulerName")),
        unschedulable_message=as_text(scheduled.get("message"))[:MAX_TERMINATION_MESSAGE_CHARACTERS]
        if unschedulable
        else "",
        finished=_parse_seconds(terminated, "finishedAt"),
        template_hash=as_text(annotations.get(worker_env.ANNOTATION_TEMPLATE_HASH)),
        avoided_nodes=frozenset(filter(None, as_text(annotations.get(worker_env.ANNOTATION_AVOIDED_NODES)).split(","))),
        image=intern(as_text(annotations.get(worker_env.ANNOTATION_IMAGE))),
        init_container=init.name,
        init_since=init.since,
        init_exit_code=init.exit_code,
        gang=as_text(annotations.get(ANNOTATION_GROUP)),
        pod_set=as_text(labels.get(LABEL_POD_SET)),
        extra=worker_env.LABEL_EXTRA in labels,
        unit=as_text(labels.get(worker_env.LABEL_UNIT)),
        claim_template=read_claim_template(raw),
        evaluates=as_text(annotations.get(names.ANNOTATION_EVALUATES)),
        device_health=read_device_health(raw),
        last_report=last_report,
        grace_seconds=as_integer(spec.get("terminationGracePeriodSeconds")),
        limits=_parse_limits(spec),
    )


def _parse_limits(spec: Json) -> tuple[tuple[str, str], ...]:
    containers = as_mappings(spec.get("containers"))
    worker = next((container for container in containers if container.get("name") == WORKER_CONTAINER), {})
    limits = as_texts(as_mapping(worker.get("resources")).get("limits"))
    return tuple((name, intern(limits[name][:32])) for name in ("cpu", "ephemeral-storage", "memory") if name in limits)


def parse_node(raw: Json) -> observed.NodeView:
    """Parse a node, reduced to what plans need and without malformed parts.

    Kubelets and detectors write to it every few seconds: the view changes only with what a plan reads.
    """
    metadata, spec, status = as_mapping(raw["metadata"]), as_mapping(raw.get("spec")), as_mapping(raw.get("status"))
    conditions = [
        condition for condition in _list_items(status.get("conditions"), "condition") if as_text(condition.get("type"))
    ]
    ready_condition: Json = next((condition for condition in conditions if condition["type"] == "Ready"), {})
    ready = _READINESS.get(as_text(ready_condition.get("status")), observed.NodeReadiness.UNKNOWN)
    labels = as_mapping(metadata.get("labels"))
    return observed.NodeView(
        name=raw["metadata"]["name"],
        ready=ready,
        schedulable=spec.get("unschedulable") is not True,
        taints=tuple(_parse_taint(raw) for raw in _list_items(spec.get("taints"), "taint") if as_text(raw.get("key"))),
        unready_since=None if ready is observed.NodeReadiness.TRUE else _parse_seconds(ready_condition, _CHANGED),
        conditions=tuple(_parse_condition(condition) for condition in conditions if _is_bad(condition)),
        deleting="deletionTimestamp" in metadata,
        provider_id=as_name(spec.get("providerID")),
        labels={
            intern(key): intern(text) for key, text in labels.items() if is_label_read(key) and isinstance(text, str)
        },
        capacity=_parse_capacity(as_mapping(status.get("allocatable"))),
    )


def _is_bad(condition: Json) -> bool:
    """Return whether a condition is bad. Others are dropped, so that all healthy nodes have equal views."""
    return condition["type"] != "Ready" and condition.get("status") == get_bad_status(condition["type"]).value


def _parse_condition(raw: Json) -> observed.NodeCondition:
    return observed.NodeCondition(
        type=intern(raw["type"]),
        status=_READINESS[raw["status"]],
        reason=as_text(raw.get("reason"))[:MAX_REASON_CHARACTERS],
        message=as_text(raw.get("message"))[:MAX_MESSAGE_CHARACTERS],
        since=_parse_seconds(raw, _CHANGED),
    )


def _parse_taint(raw: Json) -> observed.Taint:
    return observed.Taint(intern(raw["key"]), intern(as_text(raw.get("value"))), intern(as_text(raw.get("effect"))))


def _parse_capacity(allocatable: Json) -> dict[str, int]:
    """Parse extended resources that plans read; a device plugin counts them in whole numbers."""
    capacity = {}
    for name in RESOURCES_READ & allocatable.keys():
        text = str(allocatable[name])
        if text.isascii() and text.isdecimal() and len(text) < 10:
            capacity[name] = int(text)
        else:
            _leave_out("quantity", f"{name}: {text}")
    return capacity


def _parse_seconds(part: Json, key: str) -> float | None:
    stamp = part.get(key)
    seconds = parse_rfc3339(stamp)
    if stamp and seconds is None:
        _leave_out("time stamp", stamp)
    return seconds


def _list_items(value: Any, what: str) -> list[Json]:
    entries = value if isinstance(value, list) else []
    if any(not isinstance(entry, dict) for entry in entries):
        _leave_out(what, next(entry for entry in entries if not isinstance(entry, dict)))
    return as_mappings(entries)


def _leave_out(what: str, value: Any) -> None:
    """Count malformed parts, and log the first of each kind."""
    left_out[what] += 1
    if left_out[what] == 1:
        text = repr(value)[:100]
        logger.warning("an object has a malformed %s (%s); it is left out, as will be others like it", what, text)


def parse_child(raw: Json) -> ChildRecord:
    """Parse a ConfigMap, PodDisruptionBudget, NetworkPolicy or Service of a job."""
    metadata = raw["metadata"]
    content_hash = as_mapping(metadata.get("annotations")).get(names.ANNOTATION_CONTENT_HASH)
    refused = parse_refused_status(raw)
    status = None if refused is None else read_status(refused, f"{metadata['namespace']}/{metadata['name']}")
    return ChildRecord(as_text(content_hash), compute_stored_digest(raw), read_membership_record(raw), status)


def compute_stored_digest(raw: Json) -> str:
    """Return a digest of what a write of ours determines; others may add labels and annotations of theirs."""
    labels = as_mapping(as_mapping(raw.get("metadata")).get("labels"))
    content = [raw.get("data"), raw.get("binaryData"), raw.get("spec"), labels.get(worker_env.LABEL_JOB)]
    return hashlib.sha256(to_json(content)).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class InitState:
    """The init container that delays the worker: it runs, waits or has failed."""

    name: str = ""
    since: float | None = None
    exit_code: int | None = None
    reason: str = ""
    message: str = ""


def _parse_init_state(spec: Json, status: Json) -> InitState:
    """Return the first init container that delays the worker. A failed sidecar (restartPolicy Always) fails no pod."""
    sidecars = {
        as_text(sidecar.get("name"))
        for sidecar in _list_items(spec.get("initContainers"), "container")
        if sidecar.get("restartPolicy") == "Always"
    }
    for container in _list_items(status.get("initContainerStatuses"), "container status"):
        state, name = as_mapping(container.get("state")), as_text(container.get("name"))[:MAX_REASON_CHARACTERS]
        ended, held = as_mapping(state.get("terminated")), as_mapping(state.get("waiting"))
        running = state.get("running")
        code = as_integer(ended.get("exitCode"))
        if name not in sidecars and code not in (None, 0):
            message = f"init container {name} ended with exit code {code}: {as_text(ended.get('message'))}"
            reason = as_text(ended.get("reason")) or "Error"
            return InitState(name, exit_code=code, reason=reason, message=message.removesuffix(": "))
        if (reason := as_text(held.get("reason"))) not in ("", "PodInitializing"):
            return InitState(name, reason=reason, message=f"init container {name}: {as_text(held.get('message'))}")
        if running is not None and (name not in sidecars or container.get("started") is not True):
            return InitState(name, since=_parse_seconds(as_mapping(running), "startedAt"))
    return InitState()


def _find_reason_and_message(status: Json, scheduled: Json, worker: Json, init: InitState) -> tuple[str, str]:
    """Return reason and message of the pod, of the worker, or of the container that delays the worker."""
    if reason := as_text(status.get("reason")):
        return reason, as_text(status.get("message")).strip()  # a kubelet ends its sentence with a space
    if init.reason:
        return init.reason, init.message
    for state in (as_mapping(worker.get("terminated")), as_mapping(worker.get("waiting"))):
        if reason := as_text(state.get("reason")):
            return reason, as_text(state.get("message"))
    if scheduled.get("status") == "False" and (reason := as_text(scheduled.get("reason"))) != "Unschedulable":
        return reason, as_text(scheduled.get("message"))  # SchedulingGated, SchedulerError
    return "", ""
