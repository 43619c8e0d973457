"""Compute a pod's status from the state of its containers.

Guarantees:
- Phase, conditions, reasons and messages are those of a kubelet.
- A pod never leaves Succeeded or Failed.
- A condition's transition time changes only with its status.
- Conditions of other controllers are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from trainium_contract.rfc3339 import format_rfc3339
from trainium_devcluster.node.api.objects import EPOCH, Json, find, get_containers, get_init_containers, is_sidecar


class ContainerKind(StrEnum):
    """Kind of a container in its pod."""

    INIT = "init"
    SIDECAR = "sidecar"
    MAIN = "main"


@dataclass(frozen=True, slots=True)
class Waiting:
    """Not running, for `reason`."""

    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Running:
    """Running since `started_at` (seconds since the epoch)."""

    started_at: float


@dataclass(frozen=True, slots=True)
class Terminated:
    """Ended. A `started_at` of 0 means that it never ran."""

    exit_code: int
    reason: str
    message: str
    started_at: float
    finished_at: float
    container_id: str
    signal: int = 0


State = Waiting | Running | Terminated


@dataclass(frozen=True, slots=True)
class ContainerSnapshot:
    """The state of a container for its status."""

    name: str
    image: str
    kind: ContainerKind
    state: State
    last_termination: Terminated | None = None
    restart_count: int = 0
    ready: bool = False
    started: bool = False
    container_id: str = ""
    volume_mounts: tuple[Json, ...] = ()


@dataclass(frozen=True, slots=True)
class PodSnapshot:
    """The state of a pod for its status; `failure`: reason and message of a pod that the node ended."""

    pod: Json
    containers: Sequence[ContainerSnapshot]
    host_ip: str
    pod_ip: str
    sandbox_ready: bool
    start_time: str
    terminal: bool = False
    failure: tuple[str, str] | None = None


def find_container_kind(pod: Json, container: Json) -> ContainerKind:
    """Return the kind of `container` in `pod`: init, sidecar or main."""
    if find(get_init_containers(pod), "name", container["name"]) is None:
        return ContainerKind.MAIN
    return ContainerKind.SIDECAR if is_sidecar(container) else ContainerKind.INIT


def restart_policy(pod: Json, container: Json) -> str:
    """Return the restart policy of a container; for a main container the pod's."""
    own = container.get("restartPolicy")
    if own:
        return str(own)
    policy = pod["spec"].get("restartPolicy", "Always")
    # An init container that succeeded never runs again, with any policy.
    if policy == "Always" and find_container_kind(pod, container) is ContainerKind.INIT:
        return "OnFailure"
    return str(policy)


def should_restart(pod: Json, container: Json, exit_code: int) -> bool:
    """Return whether a container that ended with `exit_code` restarts."""
    policy = restart_policy(pod, container)
    return policy == "Always" or (policy == "OnFailure" and exit_code != 0)


def exit_reason(exit_code: int) -> str:
    """Return the reason that a container runtime gives for an exit code."""
    return "Completed" if exit_code == 0 else "Error"


def compute_phase(pod: Json, views: Sequence[ContainerSnapshot], *, terminal: bool) -> str:
    """Return the phase of a pod; `terminal` if no container runs or will start."""
    by_name = {view.name: view for view in views}
    specs = {c["name"]: c for c in [*get_init_containers(pod), *get_containers(pod)]}
    init_failed = init_pending = False
    for view in (v for v in by_name.values() if v.kind is ContainerKind.INIT):
        ended = _end_of(view)
        if ended is None:
            init_pending = True
        elif ended.exit_code != 0:
            if should_restart(pod, specs[view.name], ended.exit_code) and not terminal:
                init_pending = True
            else:
                init_failed = True
    if init_failed:
        return "Failed"
    main = [by_name[c["name"]] for c in get_containers(pod) if c["name"] in by_name]
    has_started = [v for v in main if not isinstance(v.state, Waiting) or v.last_termination is not None]
    if not terminal:
        if (init_pending or _are_sidecars_pending(by_name)) and not has_started:
            return "Pending"
        if any(isinstance(v.state, Waiting) and v.last_termination is None for v in main):
            return "Pending"
        if any(isinstance(v.state, Running) for v in by_name.values() if v.kind is not ContainerKind.INIT):
            return "Running"
    ends = [_end_of(v) for v in main]
    if not terminal and any(
        e is not None and should_restart(pod, specs[v.name], e.exit_code) for v, e in zip(main, ends, strict=True)
    ):
        return "Running"
    if all(e is not None and e.exit_code == 0 for e in ends):
        return "Succeeded"
    return "Failed"


def build_pod_status(view: PodSnapshot, now: str) -> Json:
    """Return the status to write; `now` is the time of transitions."""
    old = view.pod.get("status") or {}
    chosen = compute_phase(view.pod, view.containers, terminal=view.terminal)
    reason = message = None
    if view.failure is not None:
        chosen, (reason, message) = "Failed", view.failure
    if old.get("phase") in {"Succeeded", "Failed"}:
        chosen, reason, message = old["phase"], old.get("reason"), old.get("message")
    status: Json = {
        "phase": chosen,
        "reason": reason or None,
        "message": message or None,
        "hostIP": view.host_ip,
        "hostIPs": [{"ip": view.host_ip}],
        "startTime": view.start_time,
        "observedGeneration": _observe_generation(view.pod),
        "containerStatuses": [_build_container_status(v) for v in view.containers if v.kind is ContainerKind.MAIN],
        "conditions": _build_conditions(view, chosen, now),
    }
    inits = [_build_container_status(v) for v in view.containers if v.kind is not ContainerKind.MAIN]
    if inits:
        status["initContainerStatuses"] = inits
    if view.pod_ip:
        status["podIP"] = view.pod_ip
        status["podIPs"] = [{"ip": view.pod_ip}]
    return status


def _observe_generation(pod: Json) -> int | None:
    """Return the observed generation; that of a pod that has ended does not change."""
    old = pod.get("status") or {}
    ended = old.get("phase") in {"Succeeded", "Failed"}
    observed: int | None = old.get("observedGeneration") if ended else pod["metadata"].get("generation")
    return observed


def _end_of(view: ContainerSnapshot) -> Terminated | None:
    if isinstance(view.state, Terminated):
        return view.state
    return view.last_termination if isinstance(view.state, Waiting) else None


def _are_sidecars_pending(by_name: dict[str, ContainerSnapshot]) -> bool:
    return any(
        v.kind is ContainerKind.SIDECAR
        and not v.started
        and not isinstance(v.state, Terminated)
        and v.last_termination is None
        for v in by_name.values()
    )


def _build_container_status(view: ContainerSnapshot) -> Json:
    status: Json = {
        "name": view.name,
        "image": view.image,
        "imageID": f"process://{view.image}" if view.container_id else "",
        "restartCount": view.restart_count,
        "ready": view.ready,
        "started": view.started,
        "state": _build_state(view.state),
        "lastState": {} if view.last_termination is None else _build_state(view.last_termination),
    }
    if view.container_id:
        status["containerID"] = view.container_id
    if view.volume_mounts:
        status["volumeMounts"] = list(view.volume_mounts)
    return status


def _build_state(state: State) -> Json:
    match state:
        case Waiting(reason, message):
            return {"waiting": {"reason": reason, **({"message": message} if message else {})}}
        case Running(started_at):
            return {"running": {"startedAt": format_rfc3339(started_at)}}
        case Terminated():
            body: Json = {
                "exitCode": state.exit_code,
                "reason": state.reason,
                "startedAt": format_rfc3339(state.started_at) if state.started_at else EPOCH,
                "finishedAt": format_rfc3339(state.finished_at) if state.finished_at else EPOCH,
            }
            if state.message:
                body["message"] = state.message
            if state.container_id:
                body["containerID"] = state.container_id
            return {"terminated": body}


def _build_conditions(view: PodSnapshot, chosen: str, now: str) -> list[Json]:
    pod = view.pod
    generation = _observe_generation(pod)
    ready = _are_containers_ready(view, chosen)
    conditions: list[tuple[str, str, str, str]] = [
        ("PodReadyToStartContainers", "True" if view.sandbox_ready else "False", "", ""),
        ("Initialized", *_are_init_containers_complete(view, chosen)),
        ("Ready", *ready),
        ("ContainersReady", *ready),
        ("PodScheduled", "True", "", ""),
    ]
    entries = []
    for kind, status, reason, message in conditions:
        former = find((pod.get("status") or {}).get("conditions"), "type", kind) or {}
        since = former.get("lastTransitionTime") if former.get("status") == status else None
        entries.append(
            {
                "type": kind,
                "status": status,
                "reason": reason or None,
                "message": message or None,
                "lastProbeTime": None,
                "lastTransitionTime": since or now,
                "observedGeneration": generation,
            }
        )
    return entries


def _are_containers_ready(view: PodSnapshot, chosen: str) -> tuple[str, str, str]:
    if chosen == "Succeeded":
        return "False", "PodCompleted", ""
    if chosen == "Failed":
        return "False", "PodFailed", ""
    unready = [v.name for v in view.containers if v.kind is not ContainerKind.INIT and not v.ready]
    if unready:
        return "False", "ContainersNotReady", f"containers with unready status: [{' '.join(unready)}]"
    return "True", "", ""


def _are_init_containers_complete(view: PodSnapshot, chosen: str) -> tuple[str, str, str]:
    if chosen == "Succeeded":
        return "True", "PodCompleted", ""
    if any(
        v.kind is ContainerKind.MAIN and (not isinstance(v.state, Waiting) or v.last_termination is not None)
        for v in view.containers
    ):
        return "True", "", ""
    incomplete = [
        v.name
        for v in view.containers
        if (v.kind is ContainerKind.INIT and not v.ready) or (v.kind is ContainerKind.SIDECAR and not v.started)
    ]
    if incomplete:
        return "False", "ContainersNotInitialized", f"containers with incomplete status: [{' '.join(incomplete)}]"
    return "True", "", ""
