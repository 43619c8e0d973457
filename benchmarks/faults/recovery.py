"""Inject a fault into a stable job, follow and measure the recovery, and compare it with the expectation."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.faults.record import Findings, RunResult

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
    max_steps_lost: int = 1
    pods_joined: int | None = None
    """Number of pods that joined; 0 also requires that every pod keeps its uid. None if it is not checked."""
    max_interruptions: int = 1
    """Maximum number of entries in the history; more means that one fault was counted as several."""
    detect_within_seconds: float | None = None
    """Limit of the detection, if the row has one."""
    timeout_seconds: float = 60.0
    """Limit of each wait for the recovery."""
    check_last_entry: Callable[[Findings, Json], bool] | None = None
    """Further check of the last history entry; returns whether the blame is correct."""


def expect_in_place(cause: str, pod: str, suspect: str = "") -> ExpectedRecovery:
    """Expect a restart in place that names one worker, keeps all pods and by default suspects no node."""
    rungs = frozenset({"InPlace"})
    return ExpectedRecovery(causes=frozenset({cause}), rungs=rungs, pod=pod, suspect=suspect, pods_joined=0)


def expect_node_lost(node: str, **fields: object) -> ExpectedRecovery:
    """Expect a failed node to be named and suspected, and its rank to go to a spare or to a new pod."""
    defaults: dict[str, Any] = {"causes": frozenset({"NodeLost"}), "rungs": SPARE_OR_REPLACE, "pods_joined": 1}
    return ExpectedRecovery(**(defaults | {"node": node, "suspect": node} | fields))


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """State of the job right before the fault."""

    interruptions: frozenset[tuple[Any, ...]]
    """Keys of the entries of its history."""
    pod_uids: frozenset[str]
    taken_at: float = field(default_factory=time.time)
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault in a job."""

    before: JobSnapshot
    injected_at: float
    """Unix seconds."""
    completed_step: int
    """Newest step that was complete right after the fault."""


def interruption_key(entry: Json) -> tuple[Any, ...]:
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
        return JobSnapshot(frozenset(map(interruption_key, self.target.history())), uids)

    def result(self, findings: Findings, **fields: Any) -> RunResult:
        """Return the result of a run whose recovery is not measured."""
        return RunResult(self.number, deviations=tuple(findings.deviations), **fields)

    def inject(self, action: Callable[[], float | None]) -> InjectedFault:
        """Inject a fault by an action, which may return the time of the fault."""
        before, started_at = self.snapshot(), time.time()
        return InjectedFault(before, action() or started_at, self.target.newest_step())

    def measure_recovery(
        self, action: Callable[[], float | None], expected: ExpectedRecovery, *, note: str = "", pause: float = 0.0
    ) -> RunResult:
        """Inject a fault by an action, and follow the recovery."""
        return self.follow_recovery(self.inject(action), expected, note=note, pause=pause)

    def follow_recovery(
        self, fault: InjectedFault, expected: ExpectedRecovery, *, note: str = "", pause: float = 0.0
    ) -> RunResult:
        """Follow the recovery from a fault, and check it.

        After the first recovery, wait `pause` seconds for further interruptions by the same fault.
        """
        target, completed = self.target, fault.completed_step

        def recovered_entries() -> list[Json]:
            entries = [entry for entry in target.history() if interruption_key(entry) not in fault.before.interruptions]
            return entries if all(entry.get("recoveredSeconds") is not None for entry in entries) else []

        target.wait_until(recovered_entries, "recovery and new step", expected.timeout_seconds)
        if pause:
            time.sleep(pause)
        entries = target.wait_until(recovered_entries, "recovery from all interruptions", expected.timeout_seconds)
        first, last = entries[0], entries[-1]
        findings = Findings()
        blame_correct = self._check_blame(fault.before, first, expected, findings)
        resumed = min(entry.get("resumeStep", completed) for entry in entries)
        lost = max(0, completed - resumed, *(entry.get("stepsLost") or 0 for entry in entries))
        findings.expect(
            lost <= expected.max_steps_lost, f"{lost} steps lost, expected at most {expected.max_steps_lost}"
        )
        causes = ", ".join(f"{entry['cause']}/{entry['rung']}" for entry in entries)
        findings.expect(
            len(entries) <= expected.max_interruptions, f"one fault made {len(entries)} interruptions: {causes}"
        )
        failed_at = first.get("failedAt")
        detection = failed_at + first["detectedSeconds"] - fault.injected_at if failed_at else None
        if expected.detect_within_seconds is not None and detection is not None:
            limit = expected.detect_within_seconds
            findings.expect(detection <= limit, f"detection took {detection:.1f} s, expected at most {limit:g} s")
        self._check_pods(fault.before, entries, expected, findings)
        if expected.check_last_entry is not None:
            blame_correct = expected.check_last_entry(findings, last) and blame_correct
        first_new_step = (
            max(completed, *(entry.get("stepBefore", 0) for entry in entries), last.get("resumeStep") or 0) + 1
        )
        target.wait_for_step(first_new_step, expected.timeout_seconds)
        ended_at = target.records().get(first_new_step, {}).get("time")
        return RunResult(
            run=self.number,
            detection_seconds=None if detection is None else round(max(0.0, detection), 3),
            recovery_seconds=None if ended_at is None else round(ended_at - fault.injected_at, 3),
            steps_lost=lost,
            blame_correct=blame_correct,
            deviations=tuple(findings.deviations),
            note=note,
        )

    def _check_blame(self, before: JobSnapshot, entry: Json, expected: ExpectedRecovery, findings: Findings) -> bool:
        previous_deviations = len(findings.deviations)
        cause = f"{entry['cause']} ({entry['message'][:160]})"
        findings.expect(not expected.causes or entry["cause"] in expected.causes, f"the cause named is {cause}")
        findings.expect(not expected.rungs or entry["rung"] in expected.rungs, f"the rung is {entry['rung']}")
        for kind, name in (("pod", expected.pod), ("node", expected.node)):
            if name is not None:
                named = entry.get(kind, "")
                findings.expect(named == name, f"the {kind} named is {named or 'none'}, it was {name or 'none'}")
        if expected.suspect is not None:
            failures = self.target.status().get("failures") or []
            # Times of failures are from the operator's clock, some in whole seconds.
            suspects = {record.get("node", "") for record in failures if record["at"] >= before.taken_at - 1} - {""}
            findings.expect(
                suspects == {expected.suspect} - {""},
                f"suspected nodes are {', '.join(sorted(suspects)) or 'none'}, expected {expected.suspect or 'none'}",
            )
        return len(findings.deviations) == previous_deviations

    def _check_pods(
        self, before: JobSnapshot, entries: list[Json], expected: ExpectedRecovery, findings: Findings
    ) -> None:
        if expected.pods_joined is None:
            return
        joined = sum(entry.get("podsReplaced", 0) for entry in entries)
        findings.expect(joined == expected.pods_joined, f"{joined} pods joined, expected {expected.pods_joined}")
        if expected.pods_joined == 0:
            uids = {pod["metadata"]["uid"] for pod in self.target.pods()}
            findings.expect(uids == before.pod_uids, "pods were replaced, all should have been kept")
