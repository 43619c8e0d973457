"""Inject a fault into a stable job, follow and measure the recovery, and compare it with the expectation."""

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
class ExpectedRecovery:
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
    """Number of pods that joined; 0 also requires that every pod keeps its uid. None if it is not checked."""
    interruptions: int = 1
    """Maximum number of entries in the history; more means that one fault was counted as several."""
    detect_within: float | None = None
    """Limit of the detection in seconds, if the row has one."""
    seconds: float = 60.0
    """Limit of each wait for the recovery, in seconds."""
    extra_check: Callable[[Findings, Json], bool] | None = None
    """Further check of the last history entry; returns whether the blame is right."""


def expect_in_place(cause: str, pod: str, suspect: str = "") -> ExpectedRecovery:
    """Expect a restart in place that names one worker, keeps all pods and by default suspects no node."""
    rungs = frozenset({"InPlace"})
    return ExpectedRecovery(causes=frozenset({cause}), rungs=rungs, pod=pod, suspect=suspect, replaced=0)


def expect_node_lost(node: str, **fields: object) -> ExpectedRecovery:
    """Expect a failed node to be named and suspected, and its rank to go to a spare or to a new pod."""
    usual = {"causes": frozenset({"NodeLost"}), "rungs": SPARE_OR_REPLACE, "node": node, "suspect": node, "replaced": 1}
    return ExpectedRecovery(**(usual | fields))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """State of the job right before the fault."""

    entries: frozenset[tuple[Any, ...]]
    uids: frozenset[str]
    started: float = field(default_factory=time.time)


def entry_key(entry: Json) -> tuple[Any, ...]:
    """Return the identity of an interruption, without its rung, which may still change."""
    return (entry["generation"], entry.get("attempt", 0), entry.get("failedAt"))


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a row: the cluster, the job, and a random generator that depends only on seed, row and run."""

    env: FaultEnvironment
    target: TargetJob
    number: int
    rng: random.Random

    def random_member(self) -> Json:
        """Choose a member, and wait for a random moment."""
        member = self.rng.choice(self.target.members())
        time.sleep(self.rng.uniform(0.0, 0.5))
        return member

    def snapshot(self) -> JobSnapshot:
        """Record the state of the job."""
        uids = frozenset(pod["metadata"]["uid"] for pod in self.target.pods())
        return JobSnapshot(frozenset(entry_key(entry) for entry in self.target.history()), uids)

    def result(self, findings: Findings, **fields: Any) -> FaultRun:
        """Return the result of a run that `follow` does not measure."""
        return FaultRun(self.number, deviations=tuple(findings.deviations), **fields)

    def inject(
        self, fault: Callable[[], float | None], expect: ExpectedRecovery, *, note: str = "", gap: float = 0.0
    ) -> FaultRun:
        """Inject a fault by an action, which may return the time of the fault, and follow the recovery."""
        before, moment = self.snapshot(), time.time()
        moment = fault() or moment
        return self.follow(before, moment, self.target.step(), expect, note=note, gap=gap)

    def command(self, what: str, expect: ExpectedRecovery, pod: str, **fields: Any) -> FaultRun:
        """Send a command to the fault injector of a pod, and follow the recovery."""
        return self.inject(lambda: self.target.inject(what, pod, **fields), expect, note=pod)

    def follow(
        self,
        before: JobSnapshot,
        moment: float,
        completed: int,
        expect: ExpectedRecovery,
        *,
        note: str = "",
        gap: float = 0.0,
    ) -> FaultRun:
        """Follow the recovery from a fault at `moment`, when `completed` steps were done, and check it."""
        target = self.target

        def recovered() -> list[Json]:
            entries = [entry for entry in target.history() if entry_key(entry) not in before.entries]
            return entries if all(entry.get("recoveredSeconds") is not None for entry in entries) else []

        target.until(recovered, "recovery and new step", expect.seconds)
        if gap:
            time.sleep(gap)
        entries = target.until(recovered, "recovery from all interruptions", expect.seconds)
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
        if expect.extra_check is not None:
            blame = expect.extra_check(found, last) and blame
        new = max(completed, *(entry.get("stepBefore", 0) for entry in entries), last.get("resumeStep") or 0) + 1
        target.until_step(new, expect.seconds)
        ended = target.records().get(new, {}).get("time")
        return FaultRun(
            run=self.number,
            detect=None if detect is None else round(max(0.0, detect), 3),
            recover=None if ended is None else round(ended - moment, 3),
            steps_lost=lost,
            blame=blame,
            deviations=tuple(found.deviations),
            note=note,
        )

    def _check_blame(self, before: JobSnapshot, entry: Json, expect: ExpectedRecovery, found: Findings) -> bool:
        start = len(found.deviations)
        text = f"{entry['cause']} ({entry['message'][:160]})"
        found.expect(not expect.causes or entry["cause"] in expect.causes, f"the cause named is {text}")
        found.expect(not expect.rungs or entry["rung"] in expect.rungs, f"the rung is {entry['rung']}")
        for what, wanted in (("pod", expect.pod), ("node", expect.node)):
            if wanted is not None:
                named = entry.get(what, "")
                found.expect(named == wanted, f"the {what} named is {named or 'none'}, it was {wanted or 'none'}")
        if expect.suspect is not None:
            failures = self.target.status().get("failures") or []
            # Times of failures are from the operator's clock, some in whole seconds.
            suspects = {record.get("node", "") for record in failures if record["at"] >= before.started - 1} - {""}
            found.expect(
                suspects == {expect.suspect} - {""},
                f"suspected nodes are {', '.join(sorted(suspects)) or 'none'}, expected {expect.suspect or 'none'}",
            )
        return len(found.deviations) == start

    def _check_pods(self, before: JobSnapshot, entries: list[Json], expect: ExpectedRecovery, found: Findings) -> None:
        if expect.replaced is None:
            return
        joined = sum(entry.get("podsReplaced", 0) for entry in entries)
        found.expect(joined == expect.replaced, f"{joined} pods joined for it, expected {expect.replaced}")
        if expect.replaced == 0:
            uids = {pod["metadata"]["uid"] for pod in self.target.pods()}
            found.expect(uids == before.uids, "pods were replaced, all should have been kept")
