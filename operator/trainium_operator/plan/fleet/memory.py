"""Keep the strikes of each machine, and turn them into quarantine, probation and release. Pure.

What a job states of a machine is the report of its namespace, whose users decide what runs in its pods. It is a
suspicion, for that namespace alone, until the node itself or another namespace reports it too. Invariants: nothing
but time or a person makes a machine's state milder; strikes are forgotten after a day, a quarantine for good never
is, and no namespace alone causes it; the memory is bounded, and what is forgotten first is what matters least.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause

if TYPE_CHECKING:
    from collections.abc import Mapping

DAY = 86_400.0
LEMON_STRIKES = 3
"""So many strikes within a day are for good."""
FIRST_QUARANTINE_SECONDS = 3600.0
GROWTH = 4.0
"""Each further quarantine is longer by this factor, up to a day."""
PROBATION_SECONDS = DAY
SAME_FAULT_SECONDS = 600.0
"""Strikes within this time of an earlier one report the same fault."""
MOST_STRIKES = 8
MOST_MACHINES = 512

_CERTAIN = frozenset({Cause.DEVICE})
"""Causes of which a single strike is enough."""
_PERHAPS_THE_PROGRAM = frozenset({Cause.CRASH, Cause.HANG, Cause.RUNTIME})
"""Causes that a program can have on any node: they count when more than one job, or something else, reports it too."""


class MachineState(StrEnum):
    """From mild to severe, but for Probation, which follows Quarantined."""

    WATCHED = "Watched"
    """It was reported, not often enough."""
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
    """The jobs (`namespace/name`) and signals that report it, with `+` between them: the first of each namespace."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Return all that report it."""
        return tuple(self.by.split("+"))

    @property
    def namespaces(self) -> frozenset[str]:
        """Return the namespaces of the reports; that of the node's own report is empty."""
        return frozenset("" if " " in source else source.partition("/")[0] for source in self.sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Memory of one machine."""

    machine: str
    node: str
    """Its last known name."""
    state: MachineState = MachineState.WATCHED
    until: float | None = None
    """When the quarantine or the probation is over."""
    quarantines: int = 0
    strikes: tuple[Strike, ...] = ()
    """Oldest first."""
    judged: float = 0.0
    """Time of the newest strike that the state takes into account."""
    reported: bool = False
    """The node reports a broken device now, and got its strike for it."""

    @property
    def suspected_by(self) -> str:
        """The only namespace that speaks against it; empty when it is confirmed, or was written by a person."""
        if self.state is MachineState.PERMANENT or not self.strikes:
            return ""
        accusers = frozenset[str]().union(*(strike.namespaces for strike in self.strikes))
        return next(iter(accusers)) if len(accusers) == 1 else ""

    @property
    def cause(self) -> Cause:
        """Cause of the newest strike; an entry that a person writes need not give one."""
        return self.strikes[-1].cause if self.strikes else Cause.HOST


@dataclass(frozen=True, slots=True)
class Memory:
    """All machines, by their identity, and how far the failure records of each job have been taken."""

    machines: Mapping[str, Machine] = field(default_factory=dict)
    accounted: Mapping[str, float] = field(default_factory=dict)
    """Job uid -> time of the newest record that was taken."""


def quarantined(memory: Memory) -> frozenset[str]:
    """Return machines that no new worker may go to."""
    confined = (MachineState.QUARANTINED, MachineState.PERMANENT)
    return frozenset(machine for machine, entry in memory.machines.items() if entry.state in confined)


def add_strike(entry: Machine, node: str, strike: Strike) -> Machine:
    """Add a strike to the machine; one that reports the same fault as an earlier one only confirms that."""
    for at, old in enumerate(entry.strikes):
        if abs(strike.at - old.at) < SAME_FAULT_SECONDS:
            joined = old if strike.namespaces <= old.namespaces else replace(old, by=f"{old.by}+{strike.by}")
            return replace(entry, node=node, strikes=(*entry.strikes[:at], joined, *entry.strikes[at + 1 :]))
    strikes = tuple(sorted((*entry.strikes, strike), key=lambda each: each.at))
    return replace(entry, node=node, strikes=_newest(strikes))


def _newest(strikes: tuple[Strike, ...]) -> tuple[Strike, ...]:
    """Return at most `MOST_STRIKES`; of those that state no more than others do the oldest goes first."""
    while len(strikes) > MOST_STRIKES:
        accusers = Counter(name for strike in strikes for name in strike.namespaces)
        spare = (at for at, strike in enumerate(strikes) if all(accusers[name] > 1 for name in strike.namespaces))
        index = next(spare, 0)
        strikes = strikes[:index] + strikes[index + 1 :]
    return strikes


def is_due(entry: Machine, now: float) -> Machine | None:
    """Return the machine in the quarantine that its strikes ask for; None when they ask for nothing new."""
    recent = [strike for strike in entry.strikes if strike.at > now - DAY]
    new = [strike for strike in recent if strike.at > entry.judged]
    if entry.state is MachineState.PERMANENT or not new:
        return None
    counted = _counted(recent)
    if counted >= LEMON_STRIKES and not entry.suspected_by:
        return replace(entry, state=MachineState.PERMANENT, until=None, judged=new[-1].at)
    certain = any(strike.cause in _CERTAIN for strike in new)
    if counted == 0 or not (certain or counted >= 2 or entry.state is not MachineState.WATCHED):
        return None
    seconds = min(DAY, FIRST_QUARANTINE_SECONDS * GROWTH ** min(entry.quarantines, 8))
    until = max(now + seconds, entry.until or 0.0 if entry.state is MachineState.QUARANTINED else 0.0)
    return replace(
        entry,
        state=MachineState.QUARANTINED,
        until=until,
        quarantines=entry.quarantines + 1,
        judged=new[-1].at,
    )


def _counted(strikes: list[Strike]) -> int:
    """Return how many of the strikes count: those that a program may have caused do not when one job alone has them."""
    jobs = {source for strike in strikes for source in strike.sources}
    if len(jobs) == 1 and all(strike.cause in _PERHAPS_THE_PROGRAM for strike in strikes):
        return 0
    return len(strikes)


def aged(memory: Memory, now: float) -> Memory:
    """Apply the passing of time: quarantine becomes probation, probation ends, old strikes are dropped."""
    machines = {}
    for machine, entry in memory.machines.items():
        older = _aged(entry, now)
        if older is not None:
            machines[machine] = older
    return replace(memory, machines=machines)


def _aged(entry: Machine, now: float) -> Machine | None:
    if entry.state is MachineState.PERMANENT:
        return entry
    held = entry.state is MachineState.QUARANTINED and entry.until is not None and now < entry.until
    # Who spoke against it is known for as long as that has consequences.
    strikes = tuple(strike for strike in entry.strikes if held or strike.at > now - DAY)
    entry = entry if strikes == entry.strikes else replace(entry, strikes=strikes)
    over = entry.until is not None and now >= entry.until
    if entry.state is MachineState.QUARANTINED and over and entry.until is not None:
        entry = replace(entry, state=MachineState.PROBATION, until=entry.until + PROBATION_SECONDS)
        over = entry.until is not None and now >= entry.until
    if entry.state is MachineState.PROBATION and over:
        entry = replace(entry, state=MachineState.WATCHED, until=None, quarantines=0)
    keeps = entry.state is not MachineState.WATCHED or entry.strikes or entry.reported
    return entry if keeps else None


def bounded(memory: Memory) -> Memory:
    """Return at most `MOST_MACHINES`; suspicions, then the mildest and oldest are forgotten first."""
    if len(memory.machines) <= MOST_MACHINES:
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
    return replace(memory, machines={entry.machine: entry for entry in ranked[-MOST_MACHINES:]})
