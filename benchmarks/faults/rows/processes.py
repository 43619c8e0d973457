"""Rows in which training processes die or stand still; pods and nodes stay."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from benchmarks.faults.row import Row, Session, in_one_job
from benchmarks.faults.trial import Before, Expect, follow, strike

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from benchmarks.faults.patient import Json, Patient
    from benchmarks.faults.record import FaultRun, Findings
    from benchmarks.faults.stage import Stage

BASE = "workers: {spares: 1}"
HANG_LIMIT_SECONDS = 15.0


def somebody(patient: Patient, dice: random.Random) -> Json:
    """A member by chance, at a moment by chance."""
    victim = dice.choice(patient.members())
    time.sleep(dice.uniform(0.0, 0.5))
    return victim


def in_place(cause: str, pod: str, suspect: str = "") -> Expect:
    """A restart in place: one cause, one worker named, every pod kept; by default no node suspected."""
    return Expect(
        causes=frozenset({cause}), rungs=frozenset({"InPlace"}), pod=pod, suspect=suspect, steps_lost=1, replaced=0
    )


def _killed(stage: Stage, session: Session) -> Iterator[FaultRun]:
    def one(patient: Patient, run: int, dice: random.Random) -> FaultRun:
        victim = somebody(patient, dice)["podName"]
        return strike(patient, run, lambda: patient.signal(victim, "KILL"), in_place("Crash", victim), note=victim)

    yield from in_one_job(stage, session, "killed", BASE, one)


def _stopped(stage: Stage, session: Session) -> Iterator[FaultRun]:
    def one(patient: Patient, run: int, dice: random.Random) -> FaultRun:
        victim = somebody(patient, dice)
        pod = victim["podName"]
        return strike(
            patient, run, lambda: patient.signal(pod, "STOP"), in_place("Hang", pod, victim["nodeName"]), note=pod
        )

    yield from in_one_job(stage, session, "stopped", BASE, one)


def _hidden(stage: Stage, session: Session) -> Iterator[FaultRun]:
    def one(patient: Patient, run: int, dice: random.Random) -> FaultRun:
        victim = somebody(patient, dice)
        pod, node = victim["podName"], victim["nodeName"]

        def inject() -> float:
            patient.order("mute", pod, sticky=True)
            return patient.obeyed(pod)

        def found_out(found: Findings, last: Json) -> bool:
            named, rung = last.get("pod"), last["rung"]
            right = found.expect(named == pod, f"the culprit is {pod}, in the end {named or 'nobody'} was blamed")
            return found.expect(rung in ("Spare", "Replace"), f"in the end it was answered by {rung}") and right

        expect = Expect(
            causes=frozenset({"Hang"}),
            rungs=frozenset({"InPlace"}),
            suspect=node,
            steps_lost=1,
            interruptions=3,
            also=found_out,
            patience=180,
        )
        try:
            return strike(patient, run, inject, expect, note=pod)
        finally:
            stage.renew(node)

    yield from in_one_job(stage, session, "hidden", BASE, one)


def _segmentation_fault(stage: Stage, session: Session) -> Iterator[FaultRun]:
    def one(patient: Patient, run: int, dice: random.Random) -> FaultRun:
        victim = somebody(patient, dice)["podName"]

        def inject() -> float:
            patient.order("segv", victim)
            return patient.obeyed(victim)

        return strike(patient, run, inject, in_place("Crash", victim), note=victim)

    yield from in_one_job(stage, session, "segv", BASE, one)


def _again_during_recovery(stage: Stage, session: Session) -> Iterator[FaultRun]:
    def one(patient: Patient, run: int, dice: random.Random) -> FaultRun:
        first, second = (dice.choice(patient.members())["podName"] for _ in range(2))
        before = Before.of(patient)
        moment = patient.signal(first, "KILL")
        completed = patient.step()
        attempt = patient.status()["membership"].get("attempt", 0)
        time.sleep(dice.uniform(0.1, 0.8))
        patient.signal(second, "KILL")
        expect = Expect(
            causes=frozenset({"Crash"}),
            rungs=frozenset({"InPlace"}),
            suspect="",
            steps_lost=1,
            replaced=0,
            interruptions=2,
        )
        note = f"{first}, then {second}, attempt {attempt}"
        return follow(patient, run, before, moment, completed, expect, note=note, gap=1.5)

    yield from in_one_job(stage, session, "again", BASE, one, steps=4)


ROWS = (
    Row(
        number=1,
        fault="SIGKILL of one rank",
        injected="`kill -9` of a training process by chance, at a moment by chance",
        expected="all ranks restart in place, pods keep their uid; at most 1 step lost",
        judged="history: cause Crash, rung InPlace, that pod, no node suspected; uids; curve bit for bit",
        play=_killed,
        kubelet=True,
    ),
    Row(
        number=2,
        fault="SIGSTOP of one rank (hang)",
        injected="`kill -STOP` of a training process; step floor of the hang limit 3 s (default 15)",
        expected="found by its agent, stacks dumped, restart in place; at most 1 step lost",
        judged="as row 1, with cause Hang and the stopped rank's pod; its node gets a strike (watch)",
        play=_stopped,
        kubelet=True,
    ),
    Row(
        number=3,
        fault="SIGSEGV in a collective",
        injected="a read of address 0 in a thread while the main thread is in an all-reduce",
        expected="as row 1; the peers, whose collective broke, are not blamed",
        judged="as row 1",
        play=_segmentation_fault,
        kubelet=True,
    ),
    Row(
        number=8,
        fault="collective stuck on all ranks, culprit hidden",
        injected="one node's all-reduces send nothing any more, while its rank looks as if it waited like the others",
        expected="restarted in place; stuck again: nodes tested in pairs, the culprit's rank to the spare; 1 step",
        judged="history: Hang, InPlace; last that pod, Spare or Replace; only that node suspected; curve bit for bit",
        play=_hidden,
        most=3,
        kubelet=True,
    ),
    Row(
        number=20,
        fault="failure during recovery",
        injected="SIGKILL of a rank, and 0.1 to 0.8 s later SIGKILL of another (or the same) one",
        expected="restarts again, no deadlock; at most 1 step lost",
        judged="causes Crash, rung InPlace, no pod replaced, training calm afterwards; curve bit for bit",
        play=_again_during_recovery,
        kubelet=True,
    ),
)
