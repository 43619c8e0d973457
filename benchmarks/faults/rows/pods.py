"""Rows in which a pod goes: deleted, evicted, warned of, or lost while it takes over."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from benchmarks.faults.patient import newcomers
from benchmarks.faults.row import Row, Session, in_one_job
from benchmarks.faults.rows.processes import somebody
from benchmarks.faults.trial import Before, Expect, follow, strike

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from benchmarks.faults.patient import Patient
    from benchmarks.faults.record import FaultRun
    from benchmarks.faults.stage import Stage

ONE_SPARE = "workers: {spares: 1}"
TWO_SPARES = "workers: {spares: 2}"
"""The second one warms up while the first is used."""
GONE = frozenset({"PodLost", "Preempted"})
"""By force: whether it was still seen leaving is a matter of milliseconds; neither blames anybody."""
TAKEN_OVER = frozenset({"Spare", "Replace"})
NOTICES = (
    ("aws-node-termination-handler/spot-itn", "NoSchedule"),
    ("aws-node-termination-handler/scheduled-maintenance", "NoSchedule"),
    ("karpenter.sh/disrupted", "NoSchedule"),
)


def _deleted(stage: Stage, session: Session) -> Iterator[FaultRun]:
    def one(patient: Patient, run: int, dice: random.Random) -> FaultRun:
        way = dice.choice(("delete", "evict", "delete by force"))
        victim = somebody(patient, dice)
        pod = victim["podName"]
        ways = {
            "delete": lambda: patient.delete_pod(pod),
            "evict": lambda: patient.evict(pod),
            "delete by force": lambda: patient.delete_pod(pod, force=True),
        }
        expect = Expect(
            causes=GONE if way == "delete by force" else frozenset({"Preempted"}),
            rungs=TAKEN_OVER,
            pod=pod,
            suspect="",
            steps_lost=1 if way == "delete by force" else 0,
            replaced=1,
        )
        return strike(patient, run, ways[way], expect, note=f"{way} {pod}")

    yield from in_one_job(stage, session, "deleted", stage.spares, one)


def _agent_killed(stage: Stage, session: Session) -> Iterator[FaultRun]:
    def one(patient: Patient, run: int, dice: random.Random) -> FaultRun:
        victim = somebody(patient, dice)
        pod, node = victim["podName"], victim["nodeName"]

        def inject() -> float:
            moment = time.time()
            stage.kill_agent(patient.job.namespace, pod, node)
            return moment

        expect = Expect(causes=frozenset({"PodLost"}), rungs=TAKEN_OVER, pod=pod, steps_lost=1, replaced=1)
        return strike(patient, run, inject, expect, note=pod)

    yield from in_one_job(stage, session, "agent", stage.spares, one)


def _notice(stage: Stage, session: Session) -> Iterator[FaultRun]:
    def one(patient: Patient, run: int, dice: random.Random) -> FaultRun:
        key, effect = dice.choice(NOTICES)
        victim = somebody(patient, dice)
        node = victim["nodeName"]

        def inject() -> float:
            moment = time.time()
            stage.taint(node, key, effect)
            return moment

        expect = Expect(
            causes=frozenset({"Preempted"}), rungs=TAKEN_OVER, node=node, suspect="", steps_lost=0, replaced=1
        )
        try:
            return strike(patient, run, inject, expect, note=f"{key} on {node}")
        finally:
            stage.untaint(node, key)

    yield from in_one_job(stage, session, "notice", stage.spares, one)


def _spare_dies(stage: Stage, session: Session) -> Iterator[FaultRun]:
    stage.needs_room()

    def one(patient: Patient, run: int, dice: random.Random) -> FaultRun:
        victim = somebody(patient, dice)["podName"]
        patient.until("two warm spares", lambda: patient.status().get("spares", 0) >= 2, 120)
        before, inside = Before.of(patient), patient.member_uids()
        generation = patient.status()["membership"]["generation"]
        moment = patient.delete_pod(victim, force=True)
        completed = patient.step()
        patient.until(
            "the generation with the spare", lambda: patient.status()["membership"]["generation"] > generation, 30
        )
        chosen = patient.until("the spare among the members", lambda: list(newcomers(inside, patient)), 30)[0]
        time.sleep(dice.uniform(0.0, 0.3))
        patient.delete_pod(chosen["podName"], force=True)
        expect = Expect(causes=GONE, rungs=TAKEN_OVER, pod=victim, suspect="", steps_lost=1, interruptions=2)
        note = f"{victim}, then the spare {chosen['podName']}"
        return follow(patient, run, before, moment, completed, expect, note=note, gap=1.0)

    yield from in_one_job(stage, session, "sparedies", TWO_SPARES, one)


ROWS = (
    Row(
        number=4,
        fault="pod deleted or evicted",
        injected="one of: delete with its grace period, the eviction API, delete by force (chosen by chance)",
        expected="the spare takes the rank; no step lost where there is a grace period, else at most 1; nobody blamed",
        judged="history: Preempted (by force: or PodLost), rung Spare or Replace, that pod, no node suspected; curve",
        play=_deleted,
        kubelet=True,
    ),
    Row(
        number=4,
        part="b",
        fault="agent killed, its pod fails",
        injected="SIGKILL of the worker's main process from outside",
        expected="the kubelet does not restart it (restartPolicy Never); the spare takes the rank; at most 1 step lost",
        judged="history: PodLost, Spare or Replace, that pod; curve",
        play=_agent_killed,
        most=5,
        kubelet=True,
    ),
    Row(
        number=18,
        fault="spot or maintenance notice",
        injected="a taint of the node termination handler or of Karpenter on a member's node",
        expected="all save and the spare takes the rank within the notice; no step lost, nothing counted",
        judged="history: Preempted, Spare or Replace, that node, no node suspected, 0 steps lost; curve",
        play=_notice,
        kubelet=True,
    ),
    Row(
        number=19,
        fault="spare dies on activation",
        injected="a member deleted by force; the spare too, up to 0.3 s after the generation names it",
        expected="the next spare takes the rank; at most 1 step lost, no deadlock",
        judged="history: PodLost or Preempted, twice at most, Spare or Replace, no node suspected; curve",
        play=_spare_dies,
        most=10,
        kubelet=True,
    ),
)
