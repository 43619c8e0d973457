"""The fleet's memory of bad machines, across jobs: strikes, quarantine, probation, and the circuit breaker. Pure.

A machine (by provider ID, so that a node's new name hides nothing; by node name where there is none) gets a strike when
a job's failure is attributed to its node, or when its node reports a broken device. Enough strikes: quarantine, and
no new worker goes there. When that is over it is on probation, and the next strike puts it back at once and for longer;
three strikes in a day are for good. A person releases a machine by deleting its entry. What only the jobs of one
namespace state keeps the workers of that namespace away, and nobody else's.
Invariants: level-triggered and idempotent (every failure record of a job is taken once, `Memory.accounted` states up to
where); one fault is one strike, however many report it; never more than `CAP` of the fleet is put in quarantine for
all, and no more for one namespace by its own word; while more than that is bad at once nothing is done to any node, and
no machine is blamed: that many do not break by chance.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.faults.node_polarity import Severity
from trainium_contract.sizes import INSTANCES
from trainium_operator.plan.faults.node_signals import NodeProblem, problems_of
from trainium_operator.plan.fleet.memory import (
    LEMON_STRIKES,
    Machine,
    MachineState,
    Memory,
    Strike,
    add_strike,
    aged,
    bounded,
    is_due,
    quarantined,
)
from trainium_operator.plan.model.names import LABEL_INSTANCE_TYPE, NEURON, TAINT_QUARANTINED
from trainium_operator.plan.model.observed import CAP, FleetView, NodeReadiness, NodeView, Taint, cap_of
from trainium_operator.plan.model.text import listed, rfc3339

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
    """Whether its records may be held against machines."""
    debounce_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetObserved:
    """Everything that the fleet's plan depends on."""

    nodes: Mapping[str, NodeView]
    carrying: frozenset[str]
    """Names of nodes that carry a worker."""
    jobs: tuple[JobRecords, ...]
    """Failures of all jobs."""
    memory: Memory | None
    """None when there is none, as before the first time, and when a person deleted it."""
    now: float
    machines: Mapping[str, str] = field(default_factory=dict)
    """Node name -> provider ID of nodes that are gone, as far as this process saw them."""
    taints_nodes: bool = False
    """Whether the operator may write to nodes."""


@dataclass(frozen=True, slots=True)
class TaintNode:
    """Set our taint on a node, or take it off."""

    node: str
    taint: Taint | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """The memory to keep, the view for jobs, and the actions, in this order."""

    memory: Memory
    view: FleetView
    taints: tuple[TaintNode, ...] = ()
    requeue_after: float | None = None
    """Seconds after which something changes by itself."""
    news: tuple[str, ...] = ()
    """Changes of the memory, as sentences."""


def plan_fleet(observed: FleetObserved) -> FleetPlan:
    """Return the next state of the memory and what follows from it."""
    # Without a memory what has been recorded so far counts as forgotten.
    before = observed.memory or Memory(
        accounted={job.uid: newest for job in observed.jobs if (newest := _newest(job)) > 0.0}
    )
    memory = aged(before, observed.now)
    fleet = _SortedNodes(observed, memory)
    memory = _with_present_names(observed, fleet, memory)
    frozen = _breaker(len(fleet.unusable()), fleet.size)
    memory = _take_faults(observed, fleet, memory, blame=not frozen)
    if not frozen:
        memory = _confine(observed, fleet, memory)
    memory = bounded(memory)
    confined = _kept_out(fleet, memory, "")
    accusers = sorted({memory.machines[machine].suspected_by for machine in quarantined(memory)} - {""})
    live = frozenset() if frozen else fleet.broken
    return FleetPlan(
        memory=memory,
        view=FleetView(
            quarantined=confined | live,
            frozen=frozen,
            suspected=tuple((namespace, _kept_out(fleet, memory, namespace)) for namespace in accusers),
        ),
        taints=() if frozen or not observed.taints_nodes else _taints(observed, fleet, memory, confined),
        requeue_after=_next_change(observed, fleet, memory),
        news=_news(before, memory),
    )


class _SortedNodes:
    """The nodes, sorted once."""

    def __init__(self, observed: FleetObserved, memory: Memory) -> None:
        self._nodes = observed.nodes
        self._machines = observed.machines
        self._remembered = {entry.node: machine for machine, entry in memory.machines.items() if entry.node}
        self.problems: dict[str, tuple[NodeProblem, ...]] = {}
        self.later: list[float] = []
        self.broken: frozenset[str] = frozenset()
        self._names: dict[str, set[str]] = {}
        for name in observed.nodes:
            self._names.setdefault(self.machine_of(name), set()).add(name)
        confined = self.names_of(quarantined(memory))
        self.members = confined | {
            name for name, node in observed.nodes.items() if name in observed.carrying or _has_devices(node)
        }
        debounce = max((job.debounce_seconds for job in observed.jobs), default=0.0)
        broken = set()
        for name in self.members:
            found = problems_of(observed.nodes[name])
            if found:
                self.problems[name] = found
                if self._is_broken(found[0], observed.now, debounce):
                    broken.add(name)
        self.broken = frozenset(broken)

    @property
    def size(self) -> int:
        return len(self.members)

    def _is_broken(self, worst: NodeProblem, now: float, debounce: float) -> bool:
        if worst.severity < Severity.DRAIN:
            return False
        counts_from = now if worst.since is None or worst.severity is Severity.FATAL else worst.since + debounce
        if now < counts_from <= now + debounce:
            self.later.append(counts_from)
            return False
        return True

    def machine_of(self, name: str) -> str:
        """Return the machine behind a node, also of a deleted one."""
        node = self._nodes.get(name)
        known = node.provider_id if node is not None else self._machines.get(name) or self._remembered.get(name)
        return known or name

    def names_of(self, machines: frozenset[str]) -> frozenset[str]:
        """Return nodes that run on these machines now."""
        return frozenset(name for machine in machines for name in self._names.get(machine, ()))

    def unusable(self) -> frozenset[str]:
        """Return nodes that cannot be used now.

        Those that leave on purpose are not meant, nor those that were bad once.
        """
        return frozenset(
            name
            for name, found in self.problems.items()
            if any(problem.severity >= Severity.DRAIN and problem.cause is not Cause.PREEMPTED for problem in found)
            or self._nodes[name].ready is not NodeReadiness.TRUE
        )


def _has_devices(node: NodeView) -> bool:
    return NEURON in node.capacity or node.labels.get(LABEL_INSTANCE_TYPE, "") in INSTANCES


def _breaker(bad: int, fleet: int) -> str:
    if bad <= cap_of(fleet):
        return ""
    return (
        f"{bad} of {fleet} nodes are bad at once, more than {CAP:.0%}: no worker is moved away from a node and no node "
        "is put in quarantine until fewer are; workers that are lost for certain are replaced"
    )


def _with_present_names(observed: FleetObserved, fleet: _SortedNodes, memory: Memory) -> Memory:
    """Return the memory with the name of the node that each machine has now, where it came back under another one."""
    renamed = {
        machine: replace(entry, node=min(names))
        for machine, entry in memory.machines.items()
        if entry.node not in observed.nodes and (names := fleet.names_of(frozenset({machine})))
    }
    return replace(memory, machines={**memory.machines, **renamed}) if renamed else memory


def _newest(job: JobRecords) -> float:
    """Return when a failure was last attributed to a node."""
    return max((record.at for record in job.failures if record.node), default=0.0)


def _take_faults(observed: FleetObserved, fleet: _SortedNodes, memory: Memory, *, blame: bool) -> Memory:
    """Strikes for what is new; without `blame` it is only noted as taken."""
    machines = dict(memory.machines)
    accounted: dict[str, float] = {}
    for job in observed.jobs:
        taken = memory.accounted.get(job.uid, 0.0)
        for record in sorted(job.failures, key=lambda each: each.at):
            if record.at > taken and record.node and blame and job.takes_part:
                strike = Strike(min(record.at, observed.now), record.cause, job.name)
                _strike(machines, fleet.machine_of(record.node), record.node, strike)
        if max(taken, _newest(job)) > 0.0:
            accounted[job.uid] = max(taken, _newest(job))
    _take_reports(observed, fleet, machines, blame=blame)
    return Memory(machines=machines, accounted=accounted)


def _take_reports(observed: FleetObserved, fleet: _SortedNodes, machines: dict[str, Machine], *, blame: bool) -> None:
    """Add one strike for a device that a node reports as broken, for as long as it is reported."""
    for name, found in fleet.problems.items():
        fatal = next((problem for problem in found if problem.severity is Severity.FATAL), None)
        machine = fleet.machine_of(name)
        known = machines.get(machine)
        if fatal is None or not blame or (known is not None and known.reported):
            continue
        at = fatal.since if fatal.since is not None and fatal.since <= observed.now else observed.now
        _strike(machines, machine, name, Strike(at, fatal.cause, str(fatal)))
        machines[machine] = replace(machines[machine], reported=True)
    for machine, entry in list(machines.items()):
        if entry.reported and not any(
            problem.severity is Severity.FATAL
            for name in fleet.names_of(frozenset({machine}))
            for problem in fleet.problems.get(name, ())
        ):
            machines[machine] = replace(entry, reported=False)


def _strike(machines: dict[str, Machine], machine: str, node: str, strike: Strike) -> None:
    machines[machine] = add_strike(machines.get(machine) or Machine(machine=machine, node=node), node, strike)


def _confine(observed: FleetObserved, fleet: _SortedNodes, memory: Memory) -> Memory:
    """Put machines in quarantine whose strikes ask for it, the most often reported first, as many as the cap allows.

    Suspicions of a namespace have a cap: they take nobody else's room.
    """
    machines = dict(memory.machines)
    confined: dict[str, frozenset[str]] = {}
    for machine in quarantined(memory):
        accuser = machines[machine].suspected_by
        confined[accuser] = confined.get(accuser, frozenset()) | fleet.names_of(frozenset({machine}))
    for machine in sorted(machines, key=lambda each: (-len(machines[each].strikes), each)):
        entry = machines[machine]
        verdict = is_due(entry, observed.now)
        if verdict is None:
            continue
        names, taken = fleet.names_of(frozenset({machine})), confined.get(entry.suspected_by, frozenset())
        if names <= taken or len(taken | names) <= cap_of(fleet.size):
            machines[machine] = verdict
            confined[entry.suspected_by] = taken | names
    return replace(memory, machines=machines)


def _kept_out(fleet: _SortedNodes, memory: Memory, accuser: str) -> frozenset[str]:
    """Return nodes of the machines in quarantine by the report of one namespace, or for all (empty).

    The worst first, never more than the cap: nodes may have come or gone.
    """
    kept: frozenset[str] = frozenset()
    entries = [memory.machines[machine] for machine in quarantined(memory)]
    entries = [entry for entry in entries if entry.suspected_by == accuser]
    for entry in sorted(entries, key=lambda each: (each.until is not None, -len(each.strikes), each.machine)):
        names = fleet.names_of(frozenset({entry.machine}))
        if len(kept | names) <= cap_of(fleet.size):
            kept |= names
    return kept


def _taints(
    observed: FleetObserved, fleet: _SortedNodes, memory: Memory, confined: frozenset[str]
) -> tuple[TaintNode, ...]:
    found = []
    for name, node in sorted(observed.nodes.items()):
        cause = memory.machines[fleet.machine_of(name)].cause if name in confined else None
        wanted = Taint(TAINT_QUARANTINED, cause.value) if cause is not None else None
        present = next((taint for taint in node.taints if taint.key == TAINT_QUARANTINED), None)
        if wanted != present and not node.deleting:
            found.append(TaintNode(name, wanted))
    return tuple(found)


def _next_change(observed: FleetObserved, fleet: _SortedNodes, memory: Memory) -> float | None:
    times = [*fleet.later, *(entry.until for entry in memory.machines.values() if entry.until is not None)]
    ahead = [at for at in times if at > observed.now]
    return min(ahead) - observed.now if ahead else None


def _news(before: Memory, after: Memory) -> tuple[str, ...]:
    sentences = []
    for machine in sorted(before.machines.keys() | after.machines.keys()):
        old, new = before.machines.get(machine), after.machines.get(machine)
        if new is None or (old is not None and old.state is new.state and old.until == new.until):
            continue
        if new.state is MachineState.WATCHED:
            continue
        until = f" for namespace {new.suspected_by}" if new.suspected_by else ""
        until += f" until {rfc3339(new.until)}" if new.until is not None else ""
        why = listed(tuple(f"{strike.cause.value} ({strike.by})" for strike in new.strikes[-LEMON_STRIKES:]))
        sentences.append(f"node {new.node} ({machine}) is {new.state.value}{until}: {why}")
    return tuple(sentences)
