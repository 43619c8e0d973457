"""Keep the strikes of each machine, and derive quarantine, probation and release from them. Pure.

A job's statement about a machine counts as the report of its namespace, whose users decide what runs in its pods. It is
a suspicion for that namespace alone, until the node itself or another namespace reports the machine too.

Invariants: only time or a person makes a machine's state milder. Strikes expire after a day; a permanent quarantine
never does, and no single namespace causes one. The memory is bounded, and the least important entries are dropped
first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause

if TYPE_CHECKING:
    from collections.abc import Mapping

DAY_SECONDS = 86_400.0
LEMON_STRIKES = 3
"""Strikes within a day that put a machine in quarantine permanently."""
FIRST_QUARANTINE_SECONDS = 3600.0
QUARANTINE_GROWTH = 4.0
"""Factor by which each further quarantine is longer, up to a day."""
PROBATION_SECONDS = DAY_SECONDS
SAME_FAULT_SECONDS = 600.0
"""Strikes within this time of an earlier one report the same fault."""
MAX_STRIKES = 8
MAX_MACHINES = 512

_CERTAIN_CAUSES = frozenset({Cause.DEVICE})
"""Causes for which a single strike is enough."""
_AMBIGUOUS_CAUSES = frozenset({Cause.CRASH, Cause.HANG, Cause.ACCELERATOR_RUNTIME})
"""Causes that a program can produce on any node; they count if more than one job, or another signal, reports them
too."""


class MachineState(StrEnum):
    """From mild to severe, except Probation, which follows Quarantined."""

    WATCHED = "Watched"
    """It was reported, but not often enough."""
    PROBATION = "Probation"
    """It may be used again; the next strike counts at once."""
    QUARANTINED = "Quarantined"
    PERMANENT = "Permanent"
    """In quarantine until a person releases it."""


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault that was attributed to a machine."""

    at: float
    cause: Cause
    by: str
    """The jobs (`namespace/name`) and signals that report it, joined by `+`: the first of each namespace."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Return all its sources."""
        return tuple(self.by.split("+"))

    @property
    def namespaces(self) -> frozenset[str]:
        """Return the namespaces of the reports; the node's own report has the empty one."""
        return frozenset("" if " " in source else source.partition("/")[0] for source in self.sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The memory of one machine."""

    machine: str
    node: str
    """Its last known name."""
    state: MachineState = MachineState.WATCHED
    until: float | None = None
    """When the quarantine or the probation ends."""
    quarantines: int = 0
    strikes: tuple[Strike, ...] = ()
    """Oldest first."""
    judged: float = 0.0
    """Time of the newest strike that the state takes into account."""
    reported: bool = False
    """Whether the node reports a broken device now, and got its strike for it."""

    @property
    def suspected_by(self) -> str:
        """The only namespace that reports it; empty if it is confirmed, or if a person wrote it."""
        if self.state is MachineState.PERMANENT or not self.strikes:
            return ""
        namespaces = frozenset[str]().union(*(strike.namespaces for strike in self.strikes))
        return next(iter(namespaces)) if len(namespaces) == 1 else ""

    @property
    def cause(self) -> Cause:
        """Return the cause of the newest strike; an entry written by a person may have none."""
        return self.strikes[-1].cause if self.strikes else Cause.HOST


@dataclass(frozen=True, slots=True)
class Memory:
    """All machines by identity, and up to where the failure records of each job were processed."""

    machines: Mapping[str, Machine] = field(default_factory=dict)
    accounted: Mapping[str, float] = field(default_factory=dict)
    """Job uid -> time of the newest processed record."""


def list_quarantined_machines(memory: Memory) -> frozenset[str]:
    """Return machines that no new worker may go to."""
    states = (MachineState.QUARANTINED, MachineState.PERMANENT)
    return frozenset(machine for machine, entry in memory.machines.items() if entry.state in states)


def add_strike(entry: Machine, node: str, strike: Strike) -> Machine:
    """Add a strike to the machine; a strike for the same fault as an earlier one only confirms that."""
    for index, old in enumerate(entry.strikes):
        if abs(strike.at - old.at) < SAME_FAULT_SECONDS:
            confirmed = old if strike.namespaces <= old.namespaces else replace(old, by=f"{old.by}+{strike.by}")
            return replace(entry, node=node, strikes=(*entry.strikes[:index], confirmed, *entry.strikes[index + 1 :]))
    strikes = tuple(sorted((*entry.strikes, strike), key=lambda recorded: recorded.at))
    return replace(entry, node=node, strikes=_limit_strikes(strikes))


def _limit_strikes(strikes: tuple[Strike, ...]) -> tuple[Strike, ...]:
    """Return at most `MAX_STRIKES`.

    Strikes without additional information are dropped first, the oldest before others.
    """
    while len(strikes) > MAX_STRIKES:
        reports = Counter(name for strike in strikes for name in strike.namespaces)
        redundant = (
            position for position, strike in enumerate(strikes) if all(reports[name] > 1 for name in strike.namespaces)
        )
        index = next(redundant, 0)
        strikes = strikes[:index] + strikes[index + 1 :]
    return strikes


def compute_next_quarantine(entry: Machine, now: float) -> Machine | None:
    """Return the machine in the quarantine that follows from its strikes; None if nothing new does."""
    recent = [strike for strike in entry.strikes if strike.at > now - DAY_SECONDS]
    new = [strike for strike in recent if strike.at > entry.judged]
    if entry.state is MachineState.PERMANENT or not new:
        return None
    strike_count = _count_strikes(recent)
    if strike_count >= LEMON_STRIKES and not entry.suspected_by:
        return replace(entry, state=MachineState.PERMANENT, until=None, judged=new[-1].at)
    is_certain = any(strike.cause in _CERTAIN_CAUSES for strike in new)
    if strike_count == 0 or not (is_certain or strike_count >= 2 or entry.state is not MachineState.WATCHED):
        return None
    seconds = min(DAY_SECONDS, FIRST_QUARANTINE_SECONDS * QUARANTINE_GROWTH ** min(entry.quarantines, 8))
    until = max(now + seconds, entry.until or 0.0 if entry.state is MachineState.QUARANTINED else 0.0)
    return replace(
        entry,
        state=MachineState.QUARANTINED,
        until=until,
        quarantines=entry.quarantines + 1,
        judged=new[-1].at,
    )


def _count_strikes(strikes: list[Strike]) -> int:
    """Return how many strikes count: those that a program may have caused do not if only one job reports them."""
    jobs = {source for strike in strikes for source in strike.sources}
    if len(jobs) == 1 and all(strike.cause in _AMBIGUOUS_CAUSES for strike in strikes):
        return 0
    return len(strikes)


def expire_strikes(memory: Memory, now: float) -> Memory:
    """Apply the passing of time: quarantine becomes probation, probation ends, old strikes are dropped."""
    machines = {}
    for machine, entry in memory.machines.items():
        expired = _expire_machine(entry, now)
        if expired is not None:
            machines[machine] = expired
    return replace(memory, machines=machines)


def _expire_machine(entry: Machine, now: float) -> Machine | None:
    if entry.state is MachineState.PERMANENT:
        return entry
    is_held = entry.state is MachineState.QUARANTINED and entry.until is not None and now < entry.until
    # The reporters are kept as long as the strikes have consequences.
    strikes = tuple(strike for strike in entry.strikes if is_held or strike.at > now - DAY_SECONDS)
    entry = entry if strikes == entry.strikes else replace(entry, strikes=strikes)
    is_over = entry.until is not None and now >= entry.until
    if entry.state is MachineState.QUARANTINED and is_over and entry.until is not None:
        entry = replace(entry, state=MachineState.PROBATION, until=entry.until + PROBATION_SECONDS)
        is_over = entry.until is not None and now >= entry.until
    if entry.state is MachineState.PROBATION and is_over:
        entry = replace(entry, state=MachineState.WATCHED, until=None, quarantines=0)
    is_kept = entry.state is not MachineState.WATCHED or entry.strikes or entry.reported
    return entry if is_kept else None


def limit_machines(memory: Memory) -> Memory:
    """Return at most `MAX_MACHINES`; suspicions, then the mildest and oldest are dropped first."""
    if len(memory.machines) <= MAX_MACHINES:
        return memory
    severity = list(MachineState)
    ranked = sorted(
        memory.machines.values(),
        key=lambda entry: (
            not entry.suspected_by,
            severity.index(entry.state),
            entry.strikes[-1].at if entry.strikes else 0.0,
        ),
    )
    return replace(memory, machines={entry.machine: entry for entry in ranked[-MAX_MACHINES:]})
