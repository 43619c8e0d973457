"""Inject a fault into a stable job, follow the recovery, measure it, and compare it with what is expected."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.faults.record import FaultRun, Findings

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from benchmarks.faults.environment import FaultEnvironment
    from benchmarks.faults.target import TargetJob

Json = dict[str, Any]
SPARE_OR_REPLACE = frozenset({"Spare", "Replace"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Expect:
    """Expected consequences of a fault; empty sets accept anything."""

    causes: frozenset[str]
    rungs: frozenset[str]
    pod: str | None = None
    """Worker that the history must name; "" for none, None for any."""
    node: str | None = None
    suspect: str | None = None
    """Node that the failure must be attributed to; "" for none, None if it is not checked."""
    steps_lost: int = 1
    replaced: int | None = None
    """Pods that joined for it; 0 also means that every pod keeps its uid. None if it is not checked."""
    interruptions: int = 1
    """Maximum number of entries in the history; more means that one fault was counted as several."""
    detect_within: float | None = None
    """Limit in seconds, where it is a part of the row."""
    seconds: float = 60.0
    """Limit of each wait for the recovery."""
    also: Callable[[Findings, Json], bool] | None = None
    """Further check of the last history entry; returns whether the blame is right."""


def expect_in_place(cause: str, pod: str, suspect: str = "") -> Expect:
    """Expect a restart in place that names one worker, keeps all pods and by default suspects no node."""
    rungs = frozenset({"InPlace"})
    return Expect(causes=frozenset({cause}), rungs=rungs, pod=pod, suspect=suspect, replaced=0)


def expect_node_lost(node: str, **fields: object) -> Expect:
    """Expect a failed node to be named and suspected, and its rank to go to a spare or to a new pod."""
    usual = {"causes": frozenset({"NodeLost"}), "rungs": SPARE_OR_REPLACE, "node": node, "suspect": node, "replaced": 1}
    return Expect(**(usual | fields))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Before:
    """State of the job right before the fault."""

    entries: frozenset[tuple[Any, ...]]
    uids: frozenset[str]
    started: float = field(default_factory=time.time)


def entry_key(entry: Json) -> tuple[Any, ...]:
    """Return what identifies an interruption; its rung may still change."""
    return (entry["generation"], entry.get("attempt", 0), entry.get("failedAt"))


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a row: the cluster, the job, and a random generator that depends on seed, row and run alone."""

    env: FaultEnvironment
    target: TargetJob
    number: int
    rng: random.Random

    def random_member(self) -> Json:
        """Choose a member, and wait for a random moment."""
        member = self.rng.choice(self.target.members())
        time.sleep(self.rng.uniform(0.0, 0.5))
        return member

    def before(self) -> Before:
        """Record the state of the job."""
        uids = frozenset(pod["metadata"]["uid"] for pod in self.target.pods())
        return Before(frozenset(entry_key(entry) for entry in self.target.history()), uids)

    def result(self, findings: Findings, **fields: Any) -> FaultRun:
        """Return the result of a run that is not measured by `follow`."""
        return FaultRun(self.number, wrong=tuple(findings.wrong), **fields)

    def inject(self, act: Callable[[], float | None], expect: Expect, *, note: str = "", gap: float = 0.0) -> FaultRun:
        """Inject a fault by an action, which may return the time of the fault, and follow the recovery."""
        before, moment = self.before(), time.time()
        moment = act() or moment
        return self.follow(before, moment, self.target.step(), expect, note=note, gap=gap)

    def command(self, what: str, expect: Expect, pod: str, **fields: Any) -> FaultRun:
        """Have the fault injector of a pod act, and follow the recovery."""
        return self.inject(lambda: self.target.inject(what, pod, **fields), expect, note=pod)

    def follow(
        self, before: Before, moment: float, completed: int, expect: Expect, *, note: str = "", gap: float = 0.0
    ) -> FaultRun:
        """Follow the recovery from a fault at `moment`, when `completed` steps were done, and check it."""
        target = self.target

        def recovered() -> list[Json]:
            entries = [entry for entry in target.history() if entry_key(entry) not in before.entries]
            return entries if all(entry.get("recoveredSeconds") is not None for entry in entries) else []

        target.until("recovery and new step", recovered, expect.seconds)
        if gap:
            time.sleep(gap)
        entries = target.until("recovery from all interruptions", recovered, expect.seconds)
        first, last = entries[0], entries[-1]
        found = Findings()
        blame = self._check_blame(before, first, expect, found)
        resumed = min(entry.get("resumeStep", completed) for entry in entries)
        lost = max(0, completed - resumed, *(entry.get("stepsLost") or 0 for entry in entries))
        found.expect(lost <= expect.steps_lost, f"{lost} steps lost, expected at most {expect.steps_lost}")
        found.expect(
            len(entries) <= expect.interruptions,
            f"one fault made {len(entries)} interruptions: {', '.join(e['cause'] + '/' + e['rung'] for e in entries)}",
        )
        detect = first["failedAt"] + first["detectedSeconds"] - moment if first.get("failedAt") else None
        if expect.detect_within is not None and detect is not None:
            found.expect(detect <= expect.detect_within, f"it took {detect:.1f} s to detect")
        self._check_pods(before, entries, expect, found)
        if expect.also is not None:
            blame = expect.also(found, last) and blame
        new = max(completed, *(entry.get("stepBefore", 0) for entry in entries), last.get("resumeStep") or 0) + 1
        target.until_step(new, expect.seconds)
        ended = target.records().get(new, {}).get("time")
        return FaultRun(
            run=self.number,
            detect=None if detect is None else round(max(0.0, detect), 3),
            recover=None if ended is None else round(ended - moment, 3),
            steps_lost=lost,
            blame=blame,
            wrong=tuple(found.wrong),
            note=note,
        )

    def _check_blame(self, before: Before, entry: Json, expect: Expect, found: Findings) -> bool:
        start = len(found.wrong)
        text = f"{entry['cause']} ({entry['message'][:160]})"
        found.expect(not expect.causes or entry["cause"] in expect.causes, f"the cause named is {text}")
        found.expect(not expect.rungs or entry["rung"] in expect.rungs, f"the rung is {entry['rung']}")
        for what, wanted in (("pod", expect.pod), ("node", expect.node)):
            if wanted is not None:
                named = entry.get(what, "")
                found.expect(named == wanted, f"the {what} named is {named or 'none'}, it was {wanted or 'none'}")
        if expect.suspect is not None:
            failures = self.target.status().get("failures") or []
            # Failures have times of the operator's clock, some of them whole seconds.
            suspects = {record.get("node", "") for record in failures if record["at"] >= before.started - 1} - {""}
            found.expect(
                suspects == {expect.suspect} - {""},
                f"suspected nodes are {', '.join(sorted(suspects)) or 'none'}, expected {expect.suspect or 'none'}",
            )
        return len(found.wrong) == start

    def _check_pods(self, before: Before, entries: list[Json], expect: Expect, found: Findings) -> None:
        if expect.replaced is None:
            return
        joined = sum(entry.get("podsReplaced", 0) for entry in entries)
        found.expect(joined == expect.replaced, f"{joined} pods joined for it, expected {expect.replaced}")
        if expect.replaced == 0:
            uids = {pod["metadata"]["uid"] for pod in self.target.pods()}
            found.expect(uids == before.uids, "pods were replaced, all should have been kept")
