"""Decide on quarantine and probation of machines across jobs, with a circuit breaker. Pure.

A machine (by provider ID, so that a node's new name hides nothing; by node name where there is none) gets a strike when
a job's failure is attributed to its node, or when its node reports a broken device. With enough strikes it is in
quarantine, and no new worker is placed there. Afterwards it is on probation, and the next strike puts it back at once
and for longer; three strikes in a day are permanent. A person releases a machine by deleting its entry. Reports of the
jobs of one namespace keep only the workers of that namespace away.

Invariants:
- Level-triggered and idempotent: every failure record of a job is processed once (`Memory.accounted`).
- One fault is one strike, however many report it.
- At most `MAX_BAD_SHARE` of the fleet is in quarantine for all, and at most as much for one namespace by its own
  reports.
- While more is bad at once, no node is acted on and no machine is blamed: so many do not break by chance.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from trainium_contract.accelerators import INSTANCES, NEURON
from trainium_contract.faults.causes import Cause
from trainium_contract.faults.node_polarity import Severity
from trainium_contract.rfc3339 import format_rfc3339
from trainium_operator.plan.faults.node_signals import NodeProblem, find_node_problems
from trainium_operator.plan.fleet.memory import (
    LEMON_STRIKES,
    Machine,
    MachineState,
    Memory,
    Strike,
    add_strike,
    compute_next_quarantine,
    expire_strikes,
    limit_machines,
    list_quarantined_machines,
)
from trainium_operator.plan.model.names import LABEL_INSTANCE_TYPE, TAINT_QUARANTINED
from trainium_operator.plan.model.observed import (
    MAX_BAD_SHARE,
    FleetView,
    NodeReadiness,
    NodeView,
    Taint,
    compute_max_bad_nodes,
)
from trainium_operator.plan.model.text import format_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_contract.status.internal import FailureRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecords:
    """Failures that one job attributes to nodes."""

    uid: str
    name: str
    """`namespace/name`."""
    failures: tuple[FailureRecord, ...]
    takes_part: bool = True
    """Whether its records may count against machines."""
    debounce_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetObserved:
    """All inputs of the fleet's plan."""

    nodes: Mapping[str, NodeView]
    worker_nodes: frozenset[str]
    """Names of nodes with a worker."""
    jobs: tuple[JobRecords, ...]
    """Failures of all jobs."""
    memory: Memory | None
    """None if there is none, as before the first time, or if a person deleted it."""
    now: float
    deleted_provider_ids: Mapping[str, str] = field(default_factory=dict)
    """By node name, of the deleted nodes that this process saw."""
    taints_nodes: bool = False
    """Whether the operator may write to nodes."""


@dataclass(frozen=True, slots=True)
class TaintNode:
    """Add the quarantine taint to a node, or remove it."""

    node: str
    taint: Taint | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """The memory to write, the view for jobs, and the actions, in this order."""

    memory: Memory
    view: FleetView
    taints: tuple[TaintNode, ...] = ()
    requeue_after: float | None = None
    """Seconds until something changes without a new signal."""
    changes: tuple[str, ...] = ()
    """Changes of the memory, as sentences."""


def plan_fleet(observed: FleetObserved) -> FleetPlan:
    """Return the next state of the memory and its consequences."""
    # Without a memory, failures recorded so far count as processed.
    before = observed.memory or Memory(
        accounted={job.uid: newest for job in observed.jobs if (newest := _find_newest_failure_time(job)) > 0.0}
    )
    memory = expire_strikes(before, observed.now)
    fleet = _FleetNodes(observed, memory)
    memory = _update_names(observed, fleet, memory)
    frozen = _describe_freeze(len(fleet.find_unusable()), fleet.size)
    memory = _record_faults(observed, fleet, memory, blame=not frozen)
    if not frozen:
        memory = _put_in_quarantine(observed, fleet, memory)
    memory = limit_machines(memory)
    quarantined = _select_quarantined(fleet, memory, "")
    namespaces = sorted({memory.machines[machine].suspected_by for machine in list_quarantined_machines(memory)} - {""})
    broken = frozenset() if frozen else fleet.broken
    return FleetPlan(
        memory=memory,
        view=FleetView(
            quarantined=quarantined | broken,
            frozen=frozen,
            suspected=tuple((namespace, _select_quarantined(fleet, memory, namespace)) for namespace in namespaces),
        ),
        taints=() if frozen or not observed.taints_nodes else _plan_taints(observed, fleet, memory, quarantined),
        requeue_after=_compute_seconds_until_change(observed, fleet, memory),
        changes=_describe_changes(before, memory),
    )


class _FleetNodes:
    """The nodes, sorted once."""

    def __init__(self, observed: FleetObserved, memory: Memory) -> None:
        self._nodes = observed.nodes
        self._deleted_provider_ids = observed.deleted_provider_ids
        self._remembered = {entry.node: machine for machine, entry in memory.machines.items() if entry.node}
        self.problems: dict[str, tuple[NodeProblem, ...]] = {}
        self.problems_count_at: list[float] = []
        self.broken: frozenset[str] = frozenset()
        self._names: dict[str, set[str]] = {}
        for name in observed.nodes:
            self._names.setdefault(self.find_machine(name), set()).add(name)
        quarantined = self.find_names(list_quarantined_machines(memory))
        self.members = quarantined | {
            name for name, node in observed.nodes.items() if name in observed.worker_nodes or _has_devices(node)
        }
        debounce = max((job.debounce_seconds for job in observed.jobs), default=0.0)
        broken = set()
        for name in self.members:
            problems = find_node_problems(observed.nodes[name])
            if problems:
                self.problems[name] = problems
                if self._is_broken(problems[0], observed.now, debounce):
                    broken.add(name)
        self.broken = frozenset(broken)

    @property
    def size(self) -> int:
        return len(self.members)

    def _is_broken(self, worst: NodeProblem, now: float, debounce: float) -> bool:
        if worst.severity < Severity.DRAIN:
            return False
        counts_at = now if worst.since is None or worst.severity is Severity.FATAL else worst.since + debounce
        if now < counts_at <= now + debounce:
            self.problems_count_at.append(counts_at)
            return False
        return True

    def find_machine(self, name: str) -> str:
        """Return the machine of a node, also of a deleted one."""
        node = self._nodes.get(name)
        machine = (
            node.provider_id if node is not None else self._deleted_provider_ids.get(name) or self._remembered.get(name)
        )
        return machine or name

    def find_names(self, machines: frozenset[str]) -> frozenset[str]:
        """Return the nodes that run on these machines now."""
        return frozenset(name for machine in machines for name in self._names.get(machine, ()))

    def find_unusable(self) -> frozenset[str]:
        """Return nodes that cannot be used now, except those that leave on purpose and those with past faults."""
        return frozenset(
            name
            for name, problems in self.problems.items()
            if any(problem.severity >= Severity.DRAIN and problem.cause is not Cause.PREEMPTED for problem in problems)
            or self._nodes[name].ready is not NodeReadiness.TRUE
        )


def _has_devices(node: NodeView) -> bool:
    return NEURON in node.capacity or node.labels.get(LABEL_INSTANCE_TYPE, "") in INSTANCES


def _describe_freeze(bad: int, fleet: int) -> str:
    if bad <= compute_max_bad_nodes(fleet):
        return ""
    return (
        f"{bad} of {fleet} nodes are bad at once, more than {MAX_BAD_SHARE:.0%}: no worker is moved away from a node "
        "and no node is put in quarantine until fewer are; workers that are lost for certain are replaced"
    )


def _update_names(observed: FleetObserved, fleet: _FleetNodes, memory: Memory) -> Memory:
    """Return the memory with each machine's present node name, if it returned under another one."""
    renamed = {
        machine: replace(entry, node=min(names))
        for machine, entry in memory.machines.items()
        if entry.node not in observed.nodes and (names := fleet.find_names(frozenset({machine})))
    }
    return replace(memory, machines={**memory.machines, **renamed}) if renamed else memory


def _find_newest_failure_time(job: JobRecords) -> float:
    return max((record.at for record in job.failures if record.node), default=0.0)


def _record_faults(observed: FleetObserved, fleet: _FleetNodes, memory: Memory, *, blame: bool) -> Memory:
    """Add strikes for new failures; without `blame` they are only marked as processed."""
    machines = dict(memory.machines)
    accounted: dict[str, float] = {}
    for job in observed.jobs:
        processed_until = memory.accounted.get(job.uid, 0.0)
        for record in sorted(job.failures, key=lambda failure: failure.at):
            if record.at > processed_until and record.node and blame and job.takes_part:
                strike = Strike(min(record.at, observed.now), record.cause, job.name)
                _add_strike(machines, fleet.find_machine(record.node), record.node, strike)
        if max(processed_until, _find_newest_failure_time(job)) > 0.0:
            accounted[job.uid] = max(processed_until, _find_newest_failure_time(job))
    _record_reports(observed, fleet, machines, blame=blame)
    return Memory(machines=machines, accounted=accounted)


def _record_reports(observed: FleetObserved, fleet: _FleetNodes, machines: dict[str, Machine], *, blame: bool) -> None:
    """Add one strike for a device that a node reports as broken, for as long as it is reported."""
    for name, problems in fleet.problems.items():
        fatal = next((problem for problem in problems if problem.severity is Severity.FATAL), None)
        machine = fleet.find_machine(name)
        machine_record = machines.get(machine)
        if fatal is None or not blame or (machine_record is not None and machine_record.reported):
            continue
        at = fatal.since if fatal.since is not None and fatal.since <= observed.now else observed.now
        _add_strike(machines, machine, name, Strike(at, fatal.cause, str(fatal)))
        machines[machine] = replace(machines[machine], reported=True)
    for machine, entry in list(machines.items()):
        if entry.reported and not any(
            problem.severity is Severity.FATAL
            for name in fleet.find_names(frozenset({machine}))
            for problem in fleet.problems.get(name, ())
        ):
            machines[machine] = replace(entry, reported=False)


def _add_strike(machines: dict[str, Machine], machine: str, node: str, strike: Strike) -> None:
    machines[machine] = add_strike(machines.get(machine) or Machine(machine=machine, node=node), node, strike)


def _put_in_quarantine(observed: FleetObserved, fleet: _FleetNodes, memory: Memory) -> Memory:
    """Put machines in quarantine by their strikes, the most often reported first, up to the cap.

    Suspicions of one namespace have a separate cap, so they take no capacity from others.
    """
    machines = dict(memory.machines)
    nodes_by_namespace: dict[str, frozenset[str]] = {}
    for machine in list_quarantined_machines(memory):
        namespace = machines[machine].suspected_by
        nodes_by_namespace[namespace] = nodes_by_namespace.get(namespace, frozenset()) | fleet.find_names(
            frozenset({machine})
        )
    for machine in sorted(machines, key=lambda name: (-len(machines[name].strikes), name)):
        entry = machines[machine]
        verdict = compute_next_quarantine(entry, observed.now)
        if verdict is None:
            continue
        nodes, quarantined_nodes = (
            fleet.find_names(frozenset({machine})),
            nodes_by_namespace.get(entry.suspected_by, frozenset()),
        )
        if nodes <= quarantined_nodes or len(quarantined_nodes | nodes) <= compute_max_bad_nodes(fleet.size):
            machines[machine] = verdict
            nodes_by_namespace[entry.suspected_by] = quarantined_nodes | nodes
    return replace(memory, machines=machines)


def _select_quarantined(fleet: _FleetNodes, memory: Memory, namespace: str) -> frozenset[str]:
    """Return nodes of the machines in quarantine by the reports of one namespace, or for all (empty).

    The worst come first, and never more than the cap, because nodes may have come or gone.
    """
    selected: frozenset[str] = frozenset()
    entries = [memory.machines[machine] for machine in list_quarantined_machines(memory)]
    entries = [entry for entry in entries if entry.suspected_by == namespace]
    for entry in sorted(
        entries, key=lambda machine: (machine.until is not None, -len(machine.strikes), machine.machine)
    ):
        names = fleet.find_names(frozenset({entry.machine}))
        if len(selected | names) <= compute_max_bad_nodes(fleet.size):
            selected |= names
    return selected


def _plan_taints(
    observed: FleetObserved, fleet: _FleetNodes, memory: Memory, quarantined: frozenset[str]
) -> tuple[TaintNode, ...]:
    taints = []
    for name, node in sorted(observed.nodes.items()):
        cause = memory.machines[fleet.find_machine(name)].cause if name in quarantined else None
        desired = Taint(TAINT_QUARANTINED, cause.value) if cause is not None else None
        present = next((taint for taint in node.taints if taint.key == TAINT_QUARANTINED), None)
        if desired != present and not node.deleting:
            taints.append(TaintNode(name, desired))
    return tuple(taints)


def _compute_seconds_until_change(observed: FleetObserved, fleet: _FleetNodes, memory: Memory) -> float | None:
    times = [*fleet.problems_count_at, *(entry.until for entry in memory.machines.values() if entry.until is not None)]
    future = [at for at in times if at > observed.now]
    return min(future) - observed.now if future else None


def _describe_changes(before: Memory, after: Memory) -> tuple[str, ...]:
    sentences = []
    for machine in sorted(before.machines.keys() | after.machines.keys()):
        old, new = before.machines.get(machine), after.machines.get(machine)
        if new is None or (old is not None and old.state is new.state and old.until == new.until):
            continue
        if new.state is MachineState.WATCHED:
            continue
        until = f" for namespace {new.suspected_by}" if new.suspected_by else ""
        until += f" until {format_rfc3339(new.until)}" if new.until is not None else ""
        strikes = format_names(tuple(f"{strike.cause.value} ({strike.by})" for strike in new.strikes[-LEMON_STRIKES:]))
        sentences.append(f"node {new.node} ({machine}) is {new.state.value}{until}: {strikes}")
    return tuple(sentences)
