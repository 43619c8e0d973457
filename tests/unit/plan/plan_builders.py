"""Builders of observations: a job, its pods, nodes and agents, with defaults for what a test does not set."""

from dataclasses import replace
from typing import Any

import pytest

from tests.testing.operator import wire_messages
from trainium_contract.faults.causes import Cause
from trainium_contract.job import GoodputStatus, TrainingJobSpec, TrainingJobStatus
from trainium_contract.status.conditions import Condition, ConditionType
from trainium_contract.status.internal import WINDOW
from trainium_contract.status.interruptions import Interruption, Rung
from trainium_contract.status.ledger import MAX_SIZES
from trainium_contract.status.public import MembershipStatus, PublicStatus
from trainium_contract.wire import messages
from trainium_operator.plan.features import registry
from trainium_operator.plan.manifests import config_maps
from trainium_operator.plan.model import names
from trainium_operator.plan.model.actions import Action, CreatePod, DeletePod, Plan, PublishMembership
from trainium_operator.plan.model.conditions import find_condition
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
from trainium_operator.plan.plan import plan
from trainium_operator.plan.pods import disruption_budget
from trainium_operator.plan.view.facts import Facts, build_facts
from trainium_operator.plan.view.size import decide_size

NOW = 1_800_000_000.0
SETTINGS = PlanSettings(
    image="trainer:1",
    coordinator="coordinator.system.svc:8443",
    extra_priority_class="idle-nodes",
    features=registry.FEATURES,
)
CA = "-----BEGIN CERTIFICATE-----\n"


def spec(**changes: Any) -> TrainingJobSpec:
    """Return a CPU job of 4 workers and no spare whose batch divides evenly at sizes 1 to 4, 6, 8, 12 and 24."""
    workers = {"replicas": 4, "accelerator": {"device": "cpu"}, **changes.pop("workers", {})}
    trainer = {"batch": {"globalSize": 24}, "steps": 100, **changes.pop("trainer", {})}
    return TrainingJobSpec.model_validate({"workers": workers, "trainer": trainer, **changes})


def program_spec(**changes: Any) -> TrainingJobSpec:
    """Return a CPU job of 4 workers and no spare that runs a program."""
    workers = {"replicas": 4, "accelerator": {"device": "cpu"}, **changes.pop("workers", {})}
    program = {"image": "team/own:5", "command": ["python", "train.py"], **changes.pop("program", {})}
    return TrainingJobSpec.model_validate({"workers": workers, "program": program, **changes})


def job(job_spec: TrainingJobSpec | None = None, status: TrainingJobStatus | None = None, **changes: Any) -> JobView:
    view = JobView(
        namespace="default",
        name="demo",
        uid="job-uid",
        generation=1,
        deleting=False,
        spec=job_spec or spec(),
        status=status or TrainingJobStatus(),
        created=NOW - 100,
    )
    return replace(view, **changes)


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


def heartbeat(
    ordinal: int, phase: messages.WorkerPhase = messages.WorkerPhase.STANDBY, **changes: Any
) -> messages.HeartbeatRequest:
    fields = {"generation": 0, "ready": True, "pod_uid": f"uid-{ordinal}", **changes}
    return wire_messages.heartbeat(f"demo-w-{ordinal}", namespace="default", job="demo", phase=phase, **fields)


def agent(
    ordinal: int, phase: messages.WorkerPhase = messages.WorkerPhase.STANDBY, *, silent: float = 0.5, **changes: Any
) -> AgentView:
    """Return an agent that was last seen `silent` seconds ago."""
    view = {
        name: changes.pop(name)
        for name in ("progressed", "step_seconds", "joining_since", "refused")
        if name in changes
    }
    return AgentView(
        registration=wire_messages.registration(_member(ordinal), "default", "demo"),
        last_seen=NOW - silent,
        first_seen=NOW - 50,
        heartbeat=heartbeat(ordinal, phase, **changes),
        **view,
    )


def training(ordinal: int, step: int = 20, generation: int = 1, **changes: Any) -> AgentView:
    """Return the agent of a member that trains."""
    progress = messages.Progress(step=step, loss=2.0, memory_step=step, durable_step=10, updated=NOW - 0.5)
    return agent(ordinal, messages.WorkerPhase.TRAINING, generation=generation, **{"progress": progress, **changes})


def failure(code: int, *, attempt: int = 0, step: int = 20, rank: int = 0, **changes: Any) -> messages.ProcessFailure:
    fields = {"sequence": 0, "generation": 1, "message": "Traceback ... boom", "at": NOW - 2, **changes}
    return messages.ProcessFailure(attempt=attempt, exit_code=code, step=step, rank=rank, **fields)


def restart(attempt: int, cause: Cause = Cause.CRASH, **changes: Any) -> messages.RestartRecord:
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


def observed(
    view: JobView,
    pods: tuple[PodView, ...] = (),
    agents: dict[int, AgentView] | None = None,
    **changes: Any,
) -> Observed:
    """Return an observation long after the start of the operator, with all nodes ready and all children applied."""
    applied = [config_maps.config_map(view, CA)]
    size = view.status.membership.size
    if size:
        applied.append(disruption_budget.budget_manifest(view, size if view.spec.workers.spares else size - 1))
    base = Observed(
        job=view,
        pods=pods,
        nodes={each.node: node(each.node) for each in pods if each.node},
        agents={f"uid-{ordinal}": known for ordinal, known in (agents or {}).items()},
        membership=None,
        published=0,
        children={
            f"{each['kind']}/{each['metadata']['name']}": each["metadata"]["annotations"][names.ANNOTATION_CONTENT_HASH]
            for each in applied
        },
        ca_bundle=CA,
        coordinator_since=NOW - 1000,
        now=NOW,
    )
    return replace(base, **changes)


def running(
    count: int = 4,
    *,
    spares: int = 0,
    job_spec: TrainingJobSpec | None = None,
    agents: dict[int, AgentView] | None = None,
    status: dict[str, Any] | None = None,
    **changes: Any,
) -> Observed:
    """Return a job that trains in generation 1 on pods 0 to count-1, with warm spares after them."""
    base = job_spec or spec(workers={"replicas": count, "spares": spares})
    fields: dict[str, Any] = {
        "desired": count,
        "next_pod_ordinal": count + spares,
        "membership": MembershipStatus(generation=1, size=count, data_parallel=count),
        **(status or {}),
    }
    total = count + spares
    known = {at: training(at) if at < count else agent(at) for at in range(total)}
    known.update(agents or {})
    defaults: dict[str, Any] = {"membership": membership(*range(count)), "published": 1}
    pods = changes.pop("pods", tuple(pod(at) for at in range(total)))
    return observed(job(base, TrainingJobStatus(**fields)), pods, known, **{**defaults, **changes})


def without(seen: Observed, *ordinals: int) -> Observed:
    """Return the observation without these pods and their agents."""
    missing = {f"uid-{ordinal}" for ordinal in ordinals}
    return replace(
        seen,
        pods=tuple(each for each in seen.pods if each.uid not in missing),
        agents={uid: known for uid, known in seen.agents.items() if uid not in missing},
    )


def with_pod(seen: Observed, changed: PodView) -> Observed:
    """Return the observation with one pod replaced."""
    return replace(seen, pods=tuple(changed if each.uid == changed.uid else each for each in seen.pods))


def facts_of(seen: Observed) -> Facts:
    """Return the facts that policies get of an observation."""
    return build_facts(seen, SETTINGS, decide_size(seen.job.spec))


def interruption(rung: Rung, *, ago: float, took: float | None = 10.0, **changes: Any) -> Interruption:
    """Return an interruption that ended `ago` seconds ago and took `took` seconds."""
    failed_at = NOW - ago - (took or 0.0)
    fields = {"cause": Cause.CRASH, "failed_at": failed_at, "decided_at": failed_at, "recovered_seconds": took}
    return Interruption(generation=1, time="2027-01-15T08:00:00Z", rung=rung, **{**fields, **changes})


def planned(seen: Observed) -> Plan:
    return plan(seen, SETTINGS)


def with_status(seen: Observed, status: TrainingJobStatus | None = None, **fields: Any) -> Observed:
    """Return the observation with another status, or with some fields of it replaced."""
    base = status or seen.job.status
    return replace(seen, job=replace(seen.job, status=base.model_copy(update=fields) if fields else base))


def written(seen: Observed) -> Observed:
    """Return the observation after the status of its plan was written."""
    return with_status(seen, planned(seen).status)


def condition_of(status: PublicStatus, kind: ConditionType) -> Condition:
    condition = find_condition(status, kind)
    assert condition is not None
    return condition


def check_ledger(goodput: GoodputStatus) -> None:
    """Assert the invariants of any ledger."""
    lost = sum(goodput.lost_seconds.values())
    assert goodput.productive_seconds + lost == pytest.approx(goodput.wall_seconds, abs=0.01)
    assert sum(goodput.lost_by_stage.values()) == pytest.approx(lost, abs=0.01)
    seconds = (goodput.lost_seconds, goodput.lost_by_stage, goodput.stage_seconds)
    assert all(each >= 0.0 for figures in seconds for each in figures.values())
    for ratio in (goodput.ratio, goodput.uptime_ratio, goodput.fleet_ratio):
        assert 0.0 <= ratio <= 1.0
    assert goodput.ratio <= goodput.uptime_ratio + 1e-4, "productive time is uptime"
    assert len(goodput.sizes) <= MAX_SIZES
    assert len(goodput.window.samples) < WINDOW


def published(result: Plan) -> messages.Membership | None:
    """Return the membership that a plan publishes."""
    publications = [action for action in result.actions if isinstance(action, PublishMembership)]
    assert len(publications) <= 1
    return publications[0].membership if publications else None


def created(result: Plan) -> list[str]:
    return [action.manifest["metadata"]["name"] for action in result.actions if isinstance(action, CreatePod)]


def deleted(result: Plan) -> dict[str, int | None]:
    return {action.name: action.grace_seconds for action in result.actions if isinstance(action, DeletePod)}


def kinds(actions: tuple[Action, ...]) -> list[str]:
    return [type(action).__name__ for action in actions]


def newest(result: Plan) -> Interruption:
    return result.status.history[-1]


def ranks(found: messages.Membership | None) -> list[str]:
    assert found is not None
    return [member.pod_name for member in found.members]
