"""Rows in which operator or API server go, or the job is changed at a bad moment; with real processes."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.faults.record import FaultRun, Findings
from benchmarks.faults.row import EXPECTED_ERRORS, Row, Session, in_one_job
from benchmarks.faults.rows.nodes import lost
from benchmarks.faults.rows.pods import GONE, ONE_SPARE, TAKEN_OVER
from benchmarks.faults.rows.processes import BASE, in_place, somebody
from benchmarks.faults.trial import Before, Expect, follow, strike
from tests.testing.suite import patience

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from benchmarks.faults.patient import Patient
    from benchmarks.faults.stage import Stage

OUTAGE_SECONDS = 20.0
TAKE_OVER_SECONDS = 20.0
"""Goal for a second replica to lead after the first one stopped."""
NOT_FOUND_SECONDS = 10.0
"""What agents may take to find the new leader, and it to believe that one is lost."""


def _operator_killed(stage: Stage, session: Session) -> Iterator[FaultRun]:
    def one(patient: Patient, run: int, dice: random.Random) -> FaultRun:
        victim = somebody(patient, dice)["podName"]
        before = Before.of(patient)
        moment = patient.delete_pod(victim, force=True)
        completed = patient.step()
        delay = dice.uniform(0.0, 1.5)
        time.sleep(delay)
        stage.operator.kill()
        expect = Expect(causes=GONE, rungs=TAKEN_OVER, pod=victim, suspect="", steps_lost=1, patience=90)
        return follow(patient, run, before, moment, completed, expect, note=f"operator killed {delay:.1f} s later")

    yield from in_one_job(stage, session, "opkilled", stage.spares, one)


def _operator_away(stage: Stage, session: Session) -> Iterator[FaultRun]:
    def one(patient: Patient, run: int, dice: random.Random) -> FaultRun:
        victim = somebody(patient, dice)["podName"]
        before = Before.of(patient)
        stage.operator.scale(0)
        try:
            begun = patient.step()
            patient.until_step(begun + 10)
            moment = patient.signal(victim, "KILL")
            completed = patient.step()
            patient.until_step(completed + 10, 30)
            first = patient.records()[completed + 1]["time"]
        finally:
            stage.operator.scale(1)
        outcome = follow(patient, run, before, moment, completed, in_place("Crash", victim), note=victim)
        return replace(outcome, recover=round(first - moment, 3))

    yield from in_one_job(stage, session, "opaway", ONE_SPARE, one)


def _api_away(stage: Stage, session: Session) -> Iterator[FaultRun]:
    faults = stage.faults

    def one(patient: Patient, run: int, dice: random.Random) -> FaultRun:
        before = Before.of(patient)
        time.sleep(dice.uniform(0.0, 1.0))
        begun = patient.step()
        faults.stop_apiserver()
        try:
            time.sleep(OUTAGE_SECONDS)
            during = patient.step() - begun
        finally:
            faults.start_apiserver()
        patient.until("an operator that leads again", lambda: patient.status()["progress"]["step"] > begun + during)
        patient.settle(10)
        found = Findings()
        found.expect(during > OUTAGE_SECONDS / 0.5, f"only {during} steps during the outage")
        found.expect(len(patient.history()) == len(before.entries), "the outage was taken for a fault of the job")
        uids = {pod["metadata"]["uid"] for pod in patient.pods()}
        found.expect(uids == before.uids, "pods were replaced")
        return FaultRun(run, steps_lost=0, wrong=tuple(found.wrong), note=f"{during} steps during the outage")

    yield from in_one_job(stage, session, "apiaway", ONE_SPARE, one)


def _names_away(stage: Stage, session: Session) -> Iterator[FaultRun]:
    stage.needs_name_servers()

    def one(patient: Patient, run: int, dice: random.Random) -> FaultRun:
        victim = somebody(patient, dice)["podName"]
        with stage.silent_names():
            time.sleep(dice.uniform(0.0, 2.0))
            return strike(patient, run, lambda: patient.signal(victim, "KILL"), in_place("Crash", victim), note=victim)

    yield from in_one_job(stage, session, "dnsaway", BASE, one)


def _two_operators(stage: Stage, session: Session) -> Iterator[FaultRun]:
    faults = stage.faults

    def one(patient: Patient, run: int, dice: random.Random) -> FaultRun:
        before = Before.of(patient)
        leader = stage.operator.leader()
        name = next(pod["metadata"]["name"] for pod in stage.operator.pods() if pod["metadata"]["name"] in leader)
        time.sleep(dice.uniform(0.0, 1.0))
        faults.freeze_container("trainium-system", name)
        moment = time.time()
        try:
            patient.until("another leader", lambda: stage.operator.leader() not in ("", leader), 60)
            taken = time.time() - moment
        finally:
            faults.thaw_container("trainium-system", name)
        # Two processes believe that they lead for a moment; a fault must be answered once.
        victim = somebody(patient, dice)["podName"]
        struck = patient.delete_pod(victim, force=True)
        completed = patient.step()
        expect = Expect(causes=GONE, rungs=TAKEN_OVER, pod=victim, suspect="", patience=90)
        outcome = follow(patient, run, before, struck, completed, expect, note=f"the other leads after {taken:.1f} s")
        found = Findings(list(outcome.wrong))
        found.expect(taken <= TAKE_OVER_SECONDS, f"the other replica led after {taken:.1f} s")
        return replace(outcome, detect=round(taken, 3), wrong=tuple(found.wrong))

    stage.operator.scale(2)
    try:
        yield from in_one_job(stage, session, "twoops", stage.spares, one)
    finally:
        stage.operator.scale(1)


def _leader_with_member(stage: Stage, session: Session) -> Iterator[FaultRun]:
    def one(patient: Patient, run: int, dice: random.Random) -> FaultRun:
        with stage.operator.among([member["nodeName"] for member in patient.members()]):
            patient.settle()
            node = stage.operator.leader_node()
            victim = next(member for member in patient.members() if member["nodeName"] == node)
            time.sleep(dice.uniform(0.0, 2.0))

            def inject() -> float:
                moment = time.time()
                stage.site.power_off(node)
                return moment

            try:
                within = TAKE_OVER_SECONDS + NOT_FOUND_SECONDS
                expect = lost(node, pod=victim["podName"], detect_within=within, patience=120)
                return strike(patient, run, inject, expect, note=f"{node}, rank {victim['nodeRank']}")
            finally:
                stage.renew(node)

    yield from in_one_job(stage, session, "leader", stage.spares, one)


def _edited(stage: Stage, session: Session) -> Iterator[FaultRun]:
    def one(patient: Patient, run: int, dice: random.Random) -> FaultRun:
        victim = somebody(patient, dice)["podName"]
        before = Before.of(patient)
        moment = patient.delete_pod(victim, force=True)
        completed = patient.step()
        time.sleep(dice.uniform(0.0, 1.0))
        patient.patch({"spec": {"workers": {"replicas": stage.size - 1}}})
        try:
            expect = Expect(causes=GONE, rungs=frozenset(), pod=victim, suspect="", interruptions=3, patience=90)
            outcome = follow(patient, run, before, moment, completed, expect, note=f"{victim}, then 2 nodes")
            patient.until("the size asked for last", lambda: patient.size() == stage.size - 1, 60)
        finally:
            patient.patch({"spec": {"workers": {"replicas": stage.size}}})
        patient.until("the old size again", lambda: patient.size() == stage.size, 90)
        return outcome

    change = "workers: {spares: 1, minReplicas: 1}"
    yield from in_one_job(stage, session, "edited", change, one, tolerance=1e-5)


def _deleted(stage: Stage, session: Session) -> Iterator[FaultRun]:
    for run in session.runs:
        try:
            with stage.job("gone", ONE_SPARE) as patient:
                yield _delete_one(stage, patient, run, session.random(run))
        except EXPECTED_ERRORS as error:
            yield FaultRun(run, wrong=(str(error),))


def _delete_one(stage: Stage, patient: Patient, run: int, dice: random.Random) -> FaultRun:
    patient.settle(3, 120)
    patient.delete_pod(dice.choice(patient.members())["podName"], force=True)
    time.sleep(dice.uniform(0.0, 1.5))
    namespace, name = patient.job.namespace, patient.job.name
    moment = time.time()
    stage.site.kubectl(
        "delete", "trainingjob", name, "-n", namespace, f"--timeout={patience.patient(60):.0f}s", seconds=70
    )
    patient.until("the end of its pods", lambda: not patient.pods(), 60)
    seconds = time.time() - moment
    time.sleep(1)  # the garbage collector has more to remove than pods
    found = Findings()
    kinds = "configmaps,services,poddisruptionbudgets,secrets"
    left = stage.site.get(kinds, "-n", namespace)["items"]
    names = [item["metadata"]["name"] for item in left if item["metadata"]["name"].startswith(name)]
    found.expect(not names, f"left behind: {', '.join(names)}")
    return FaultRun(run, recover=round(seconds, 3), wrong=tuple(found.wrong))


ROWS = (
    Row(
        number=25,
        part="b",
        fault="operator killed in the middle of a recovery",
        injected="a member deleted by force, the operator's pod too, 0 to 1.5 s later",
        expected="the same end as without: one interruption, the spare has the rank; at most 1 step lost",
        judged="history: PodLost or Preempted once, Spare or Replace, that pod; curve",
        play=_operator_killed,
        most=5,
        kubelet=True,
    ),
    Row(
        number=26,
        part="a",
        fault="operator away, with a fault",
        injected="the operator scaled to 0; SIGKILL of a rank; the operator back",
        expected="training goes on, the agents restart in place by themselves; the operator learns of it later",
        judged="first new step while it is away; afterwards as row 1",
        play=_operator_away,
        most=5,
        kubelet=True,
    ),
    Row(
        number=27,
        part="a",
        fault="API server away",
        injected=f"the API server killed, back after {OUTAGE_SECONDS:.0f} s",
        expected="training goes on; no pod replaced, no interruption",
        judged="steps during the outage; uids; history; curve",
        play=_api_away,
        most=2,
    ),
    Row(
        number=30,
        part="a",
        fault="two operators active",
        injected="of two replicas the leader is frozen, thawed when the other leads, and a member deleted by force",
        expected="the other leads within 20 s; the fault is answered once",
        judged="the Lease (as detection); history: PodLost or Preempted once, Spare or Replace; curve",
        play=_two_operators,
        most=3,
    ),
    Row(
        number=30,
        part="b",
        fault="the leading operator and a member lost with one node",
        injected="two replicas on nodes of members; the leader's node loses its power, the API told nothing",
        expected="the other replica leads within 20 s, and then the spare has the rank; at most 1 step lost",
        judged=f"as row 5; detected within {TAKE_OVER_SECONDS + NOT_FOUND_SECONDS:.0f} s of the loss itself",
        play=_leader_with_member,
        most=5,
        kubelet=True,
    ),
    Row(
        number=34,
        part="a",
        fault="spec changed in the middle of a recovery",
        injected="a member deleted by force, and 0 to 1 s later 2 workers asked for in place of 3",
        expected="the newest spec wins: the smaller size, training goes on",
        judged="history: PodLost or Preempted first, that pod; the smaller size, later the old one; curve within 1e-5",
        play=_edited,
        most=5,
        kubelet=True,
    ),
    Row(
        number=42,
        fault="name server silent, with a fault",
        injected="the cluster's name servers frozen by SIGSTOP, and SIGKILL of one rank",
        expected="as row 1",
        judged="as row 1",
        play=_names_away,
        kubelet=True,
    ),
    Row(
        number=34,
        part="b",
        fault="job deleted in the middle of a recovery",
        injected="a member deleted by force, and 0 to 1.5 s later the job",
        expected="nothing of it is left",
        judged="pods, ConfigMaps, Services, budgets, Secrets. Its time is that until the last pod is gone",
        play=_deleted,
        most=3,
        kubelet=True,
    ),
)
