"""Builders of observations: a job, its pods, nodes and agents, with defaults for what a test does not set."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tests.testing.operator import wire_messages
from tests.testing.operator.job_views import job_spec, job_view
from trainium_contract.faults.causes import Cause
from trainium_contract.job import TrainingJobSpec, TrainingJobStatus
from trainium_contract.status.interruptions import Interruption, RecoveryResponse
from trainium_contract.status.public import MembershipStatus
from trainium_contract.wire import messages
from trainium_operator.plan.features import registry
from trainium_operator.plan.manifests import config_maps
from trainium_operator.plan.model import names
from trainium_operator.plan.model.observed import (
    AgentView,
    JobView,
    NodeReadiness,
    NodeView,
    Observed,
    PlanSettings,
    PodPhase,
    PodView,
)
from trainium_operator.plan.pods import disruption_budget
from trainium_operator.plan.view.context import PlanContext, build_context
from trainium_operator.plan.view.size import decide_size

NOW = 1_800_000_000.0
SETTINGS = PlanSettings(
    image="trainer:1",
    coordinator="coordinator.system.svc:8443",
    extra_priority_class="idle-nodes",
    pod_fields=tuple(feature.pod_fields for feature in registry.FEATURES),
)
CA = "-----BEGIN CERTIFICATE-----\n"


spec = job_spec


def program_spec(**changes: Any) -> TrainingJobSpec:
    """Return a CPU job of 4 workers and no spare that runs a program."""
    workers = {"replicas": 4, "accelerator": {"device": "cpu"}, **changes.pop("workers", {})}
    program = {"image": "team/own:5", "command": ["python", "train.py"], **changes.pop("program", {})}
    return TrainingJobSpec.model_validate({"workers": workers, "program": program, **changes})


def job(job_spec: TrainingJobSpec | None = None, status: TrainingJobStatus | None = None, **changes: Any) -> JobView:
    return job_view(job_spec, status, **{"created": NOW - 100, **changes})


def pod(ordinal: int, **changes: Any) -> PodView:
    """Return a running pod `demo-w-<ordinal>` on `node-<ordinal>`."""
    view = PodView(
        name=f"demo-w-{ordinal}",
        uid=f"uid-{ordinal}",
        ordinal=ordinal,
        phase=PodPhase.RUNNING,
        ip=pod_ip(ordinal),
        node=f"node-{ordinal}",
        ready=True,
        created=NOW - 60,
        scheduled=True,
    )
    return replace(view, **changes)


def finished_pod(ordinal: int, **changes: Any) -> PodView:
    """Return a pod whose agent ended because its ranks had finished generation 1."""
    report = heartbeat(ordinal, messages.WorkerPhase.FINISHED, generation=1, **changes)
    return pod(ordinal, phase=PodPhase.SUCCEEDED, exit_code=0, reason="Completed", ready=False, last_report=report)


def heartbeat(
    ordinal: int, phase: messages.WorkerPhase = messages.WorkerPhase.STANDBY, **changes: Any
) -> messages.HeartbeatRequest:
    done = {"progress": messages.Progress(step=100)} if phase is messages.WorkerPhase.FINISHED else {}
    fields = {"generation": 0, "ready": True, "pod_uid": f"uid-{ordinal}", **done, **changes}
    return wire_messages.heartbeat(f"demo-w-{ordinal}", namespace="default", job="demo", phase=phase, **fields)


def agent(
    ordinal: int, phase: messages.WorkerPhase = messages.WorkerPhase.STANDBY, *, silent: float = 0.5, **changes: Any
) -> AgentView:
    """Return an agent that was last observed `silent` seconds ago."""
    view = {
        name: changes.pop(name)
        for name in ("progressed_at", "step_seconds", "joining_since", "refused_at")
        if name in changes
    }
    return AgentView(
        registration=wire_messages.registration(_member(ordinal), "default", "demo"),
        last_seen=NOW - silent,
        first_seen=NOW - 50,
        heartbeat=heartbeat(ordinal, phase, **changes),
        **view,
    )


def training_agent(ordinal: int, step: int = 20, generation: int = 1, **changes: Any) -> AgentView:
    """Return the agent of a member that trains."""
    progress = messages.Progress(step=step, loss=2.0, memory_step=step, durable_step=10, updated=NOW - 0.5)
    return agent(ordinal, messages.WorkerPhase.TRAINING, generation=generation, **{"progress": progress, **changes})


def agents(
    ordinals: Iterable[int], phase: messages.WorkerPhase = messages.WorkerPhase.STANDBY, **changes: Any
) -> dict[int, AgentView]:
    return {ordinal: agent(ordinal, phase, **changes) for ordinal in ordinals}


def training_agents(ordinals: Iterable[int], **changes: Any) -> dict[int, AgentView]:
    return {ordinal: training_agent(ordinal, **changes) for ordinal in ordinals}


def by_pod_uid(agents: dict[int, AgentView]) -> dict[str, AgentView]:
    return {f"uid-{ordinal}": agent for ordinal, agent in agents.items()}


def failure(code: int, *, attempt: int = 0, step: int = 20, rank: int = 0, **changes: Any) -> messages.ProcessFailure:
    fields = {"message": "Traceback ... boom", "at": NOW - 2, **changes}
    return wire_messages.process_failure(code, attempt=attempt, step=step, rank=rank, **fields)


def failed_agent(ordinal: int, code: int, **changes: Any) -> AgentView:
    """Return the agent of a member that has given up with a verdict."""
    verdict = failure(code, **changes)
    return agent(ordinal, messages.WorkerPhase.FAILED, generation=1, verdict=verdict, failures=(verdict,))


def restart_record(attempt: int, cause: Cause = Cause.CRASH, **changes: Any) -> messages.RestartRecord:
    fields = {"sequence": 0, "generation": 1, "failed_at": NOW - 3, "detected_at": NOW - 2.9, **changes}
    return messages.RestartRecord(attempt=attempt, cause=cause, **fields)


def membership(*ordinals: int, generation: int = 1) -> messages.Membership:
    return wire_messages.membership(generation, *map(_member, ordinals))


def _member(ordinal: int) -> messages.Member:
    return wire_messages.member(
        f"demo-w-{ordinal}", pod_uid=f"uid-{ordinal}", pod_ip=pod_ip(ordinal), node_name=f"node-{ordinal}"
    )


def pod_ip(ordinal: int) -> str:
    return f"10.{ordinal >> 16}.{ordinal >> 8 & 255}.{ordinal & 255}"


def node(name: str, ready: NodeReadiness = NodeReadiness.TRUE) -> NodeView:
    return NodeView(name=name, ready=ready)


def observation(
    view: JobView,
    pods: tuple[PodView, ...] = (),
    agents: dict[int, AgentView] | None = None,
    **changes: Any,
) -> Observed:
    """Return an observation long after the start of the operator, with all nodes ready and all children applied."""
    applied = [config_maps.build_config_map(view, CA)]
    size = view.status.membership.size
    if size:
        applied.append(disruption_budget.build_budget(view, size if view.spec.workers.spares else size - 1))
    base = Observed(
        job=view,
        pods=pods,
        nodes={pod.node: node(pod.node) for pod in pods if pod.node},
        agents=by_pod_uid(agents or {}),
        membership=None,
        published=0,
        children={
            f"{manifest['kind']}/{manifest['metadata']['name']}": manifest["metadata"]["annotations"][
                names.ANNOTATION_CONTENT_HASH
            ]
            for manifest in applied
        },
        ca_bundle=CA,
        coordinator_since=NOW - 1000,
        now=NOW,
    )
    return replace(base, **changes)


def running_job(
    count: int = 4,
    *,
    spares: int = 0,
    job_spec: TrainingJobSpec | None = None,
    agents: dict[int, AgentView] | None = None,
    status: dict[str, Any] | None = None,
    **changes: Any,
) -> Observed:
    """Return a job that trains in generation 1 on pods 0 to count-1, with warm spares after them."""
    fields: dict[str, Any] = {
        "desired": count,
        "next_pod_ordinal": count + spares,
        "membership": MembershipStatus(generation=1, size=count, data_parallel=count),
        **(status or {}),
    }
    ordinals = range(count + spares)
    all_agents = training_agents(ordinals[:count]) | {ordinal: agent(ordinal) for ordinal in ordinals[count:]}
    view = job(job_spec or spec(workers={"replicas": count, "spares": spares}), TrainingJobStatus(**fields))
    defaults = {"pods": tuple(map(pod, ordinals)), "membership": membership(*range(count)), "published": 1}
    return observation(view, agents=all_agents | (agents or {}), **{**defaults, **changes})


def without_pods(observed: Observed, *ordinals: int, keep_agents: bool = False) -> Observed:
    """Return the observation without these pods and, unless they are kept, without their agents."""
    deleted = {f"uid-{ordinal}" for ordinal in ordinals}
    return replace(
        observed,
        pods=tuple(pod for pod in observed.pods if pod.uid not in deleted),
        agents={uid: agent for uid, agent in observed.agents.items() if keep_agents or uid not in deleted},
    )


def with_pod(observed: Observed, changed: PodView) -> Observed:
    """Return the observation with one pod replaced."""
    return replace(observed, pods=tuple(changed if pod.uid == changed.uid else pod for pod in observed.pods))


def with_node(observed: Observed, changed: NodeView) -> Observed:
    """Return the observation with one node added or replaced."""
    return replace(observed, nodes={**observed.nodes, changed.name: changed})


def with_agents(observed: Observed, agents: dict[int, AgentView]) -> Observed:
    """Return the observation with these agents added or replaced."""
    return replace(observed, agents={**observed.agents, **by_pod_uid(agents)})


def with_heartbeats(observed: Observed, **changes: Any) -> Observed:
    """Return the observation with these fields of all heartbeats replaced."""
    return replace(
        observed,
        agents={
            uid: replace(agent, heartbeat=agent.heartbeat.model_copy(update=changes))
            for uid, agent in observed.agents.items()
            if agent.heartbeat is not None
        },
    )


def with_job(observed: Observed, **changes: Any) -> Observed:
    """Return the observation with these fields of the job replaced."""
    return replace(observed, job=replace(observed.job, **changes))


def with_status(observed: Observed, status: TrainingJobStatus | None = None, **fields: Any) -> Observed:
    """Return the observation with another status, or with some fields of it replaced."""
    base = status or observed.job.status
    return with_job(observed, status=base.model_copy(update=fields) if fields else base)


def context(observed: Observed) -> PlanContext:
    """Return the context that policies get of an observation."""
    return build_context(observed, SETTINGS, decide_size(observed.job.spec), registry.FEATURES)


def interruption(response: RecoveryResponse, *, ago: float, took: float | None = 10.0, **changes: Any) -> Interruption:
    """Return an interruption that ended `ago` seconds ago and took `took` seconds."""
    failed_at = NOW - ago - (took or 0.0)
    fields = {"cause": Cause.CRASH, "failed_at": failed_at, "decided_at": failed_at, "recovered_seconds": took}
    return Interruption(generation=1, time="2027-01-15T08:00:00Z", response=response, **{**fields, **changes})
