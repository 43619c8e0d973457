"""Inject a fault into a stable job, follow and measure the recovery, and compare it with the expectation."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trainium_devcluster.jobs import recovery as measured

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Mapping

    from benchmarks.faults.environment import FaultEnvironment
    from benchmarks.faults.record import RunResult
    from benchmarks.faults.target import TargetJob
    from trainium_devcluster.jobs.recovery import InjectedFault, JobSnapshot, Recovery

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedRecovery:
    """Expected consequences of a fault; empty values accept anything."""

    causes: tuple[str, ...] = ()
    responses: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    """Fields of the interruption that must name a victim: `pod`, `node`."""
    suspects: str | None = None
    """Whose node the failure must be attributed to: `victim` or `nobody`; None if it is not checked."""
    steps_lost: int = 1
    """Largest number of steps that are computed again."""
    pods_joined: int | None = None
    """Number of pods that join; 0 also requires that every pod keeps its uid. None if it is not checked."""
    interruptions: int = 1
    """Largest number of entries in the history; more means that one fault was counted as several."""
    detected_within: float | None = None
    """Limit of the detection in seconds, if the row has one."""
    timeout: float = 60.0
    """Limit of each wait for the recovery in seconds."""
    pause: float = 0.0
    """Seconds after the recovery in which further interruptions may follow."""
    last: Mapping[str, Any] = field(default_factory=dict)
    """Expected `causes`, `responses` and `names` of the last interruption, if there may be several."""


@dataclass(slots=True)
class Run:
    """A run of a row: the cluster, the job, and a random generator that depends only on seed, row and run."""

    env: FaultEnvironment
    target: TargetJob
    rng: random.Random
    recovery: ExpectedRecovery
    result: RunResult
    """Measurements of the run so far."""

    def expect(self, condition: object, sentence: str) -> bool:
        """Add the sentence to the deviations unless the condition is true; return whether it is."""
        if not condition:
            self.result.deviations += (sentence,)
        return bool(condition)

    def choose_member(self) -> Json:
        """Choose a member, and wait for a random moment."""
        member = self.rng.choice(self.target.list_members())
        time.sleep(self.rng.uniform(0.0, 0.5))
        return member

    def record_state(self) -> JobSnapshot:
        """Record the state of the job."""
        return measured.take_snapshot(self.target)

    def inject(self, action: Callable[[], object]) -> InjectedFault:
        """Inject a fault by an action, which may return the time of the fault."""
        return measured.inject(self.target, action)

    def delete_member(self) -> tuple[InjectedFault, Json]:
        """Delete a random member by force; return the fault and the member."""
        member = self.choose_member()
        return self.inject(lambda: self.target.delete_pod(member["podName"], force=True)), member

    def measure(self, action: Callable[[], object], *victims: Json, note: str = "", **changes: Any) -> None:
        """Inject a fault into some members by an action, and follow the recovery."""
        self.follow(self.inject(action), *victims, note=note, **changes)

    def follow(self, fault: InjectedFault, *victims: Json, note: str = "", **changes: Any) -> None:
        """Follow the recovery from a fault in some members, and check it; `changes` are of the row's expectation."""
        expected = replace(self.recovery, **changes)
        recovery = measured.follow(self.target, fault, expected.timeout, expected.pause)
        self._check(recovery, fault.before, expected, victims)
        self.result.detection_seconds = recovery.detection_seconds
        self.result.recovery_seconds = recovery.recovery_seconds
        self.result.steps_lost = recovery.steps_lost
        self.result.note = note or " and ".join(str(victim["podName"]) for victim in victims)

    @contextlib.contextmanager
    def move_operator_off_node(self, member: Json, *, keep_operator: bool = False) -> Iterator[str]:
        """Move the operator off the node of a member, which the block makes faulty; replace the node afterwards."""
        node: str = member["nodeName"]
        if not keep_operator and self.env.move_operator_off(node):
            self.target.wait_until_stable()
        try:
            yield node
        finally:
            self.env.replace_node(node)

    def _check(
        self, recovery: Recovery, before: JobSnapshot, expected: ExpectedRecovery, victims: tuple[Json, ...]
    ) -> None:
        entries = recovery.entries
        lost, allowed = recovery.steps_lost, expected.steps_lost
        self.result.blame_correct = self._check_blame(recovery, before, expected, victims)
        self.expect(lost <= allowed, f"{lost} steps lost, expected at most {allowed}")
        causes = ", ".join(f"{entry['cause']}/{entry['response']}" for entry in entries)
        self.expect(len(entries) <= expected.interruptions, f"one fault made {len(entries)} interruptions: {causes}")
        detection, limit = recovery.detection_seconds, expected.detected_within
        if limit is not None and detection is not None:
            self.expect(detection <= limit, f"detection took {detection:.1f} s, expected at most {limit:g} s")
        if expected.pods_joined is not None:
            joined = recovery.pods_joined
            self.expect(joined == expected.pods_joined, f"{joined} pods joined, expected {expected.pods_joined}")
        if expected.pods_joined == 0:
            self.expect(self.target.list_uids() == before.pod_uids, "pods were replaced, all should have been kept")

    def _check_blame(
        self, recovery: Recovery, before: JobSnapshot, expected: ExpectedRecovery, victims: tuple[Json, ...]
    ) -> bool:
        previous_deviations = len(self.result.deviations)
        self._check_entry("first", recovery.entries[0], victims, expected.causes, expected.responses, expected.names)
        if expected.last:
            self._check_entry("last", recovery.entries[-1], victims, **expected.last)
        if expected.suspects is not None:
            suspected = {str(victim["nodeName"]) for victim in victims} if expected.suspects == "victim" else set()
            failures = self.target.read_status().get("failures") or []
            # Times of failures are from the operator's clock, some in whole seconds.
            nodes = {record.get("node", "") for record in failures if record["at"] >= before.taken_at - 1} - {""}
            self.expect(nodes == suspected, f"suspected nodes are {_join(nodes)}, expected {_join(suspected)}")
        return len(self.result.deviations) == previous_deviations

    def _check_entry(
        self,
        which: str,
        entry: Json,
        victims: tuple[Json, ...],
        causes: tuple[str, ...] = (),
        responses: tuple[str, ...] = (),
        names: tuple[str, ...] = (),
    ) -> None:
        """Check an interruption: its cause, its response, and that its named fields name a victim."""
        cause = f"{entry['cause']} ({entry['message'][:160]})"
        self.expect(not causes or entry["cause"] in causes, f"the cause of the {which} interruption is {cause}")
        self.expect(
            not responses or entry["response"] in responses,
            f"the response of the {which} interruption is {entry['response']}",
        )
        for kind in names:
            expected, named = {str(victim[f"{kind}Name"]) for victim in victims}, entry.get(kind, "")
            self.expect(named in expected, f"the {kind} named {which} is {named or 'none'}, it was {_join(expected)}")


def _join(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"
