"""Rows in which a node goes, is cut off, or is said to be bad; a spoilt node is replaced by a new one."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.faults.record import FaultRun, Findings
from benchmarks.faults.row import Row, Session, in_one_job
from benchmarks.faults.rows.pods import TAKEN_OVER, TWO_SPARES
from benchmarks.faults.rows.processes import somebody
from benchmarks.faults.stage import SkipRowError
from benchmarks.faults.trial import Before, Expect, strike

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from benchmarks.faults.patient import Json, Patient
    from benchmarks.faults.stage import Stage

KERNEL_LOG = "/dev/shm/kernel"
"""A file in a volume of the pod that stands for the node's /dev/kmsg."""
SILENT = frozenset({"NodeLost"})
NOT_READY_AFTER_SECONDS = 40.0
"""Kubernetes calls a silent node NotReady no sooner (its default grace is 40 to 50 s)."""
KERNEL_LINES = tuple(
    f"neuron:nd0: NEURON_HW_ERR={kind} instance-id=i-0 hostname=node nd-id=0 nc-id=1 serial-num=0 action=TERMINATE"
    for kind in ("SRAM_UNCORRECTABLE_ERROR", "NC_UNCORRECTABLE_ERROR", "HBM_UNCORRECTABLE_ERROR", "DMA_ERROR")
)


def lost(node: str, **more: object) -> Expect:
    """A node that is lost: named and suspected, its rank with a spare, at most one step computed again."""
    fields: dict[str, object] = {
        "causes": SILENT,
        "rungs": TAKEN_OVER,
        "node": node,
        "suspect": node,
        "steps_lost": 1,
        "replaced": 1,
        **more,
    }
    return Expect(**fields)  # type: ignore[arg-type]


def _power_off(stage: Stage, session: Session, *, rank: int | None = None) -> Iterator[FaultRun]:
    def one(patient: Patient, run: int, dice: random.Random) -> FaultRun:
        victim = somebody(patient, dice) if rank is None else patient.members()[rank]
        node = victim["nodeName"]
        if stage.keep_operator(node):
            patient.settle()
        hung = stage.local and dice.random() < 0.3
        act = stage.faults.freeze_node if hung else stage.site.power_off

        def inject() -> float:
            moment = time.time()
            act(node)
            return moment

        note = f"{'hung' if hung else 'power off'} {node}, rank {victim['nodeRank']}"
        expect = lost(node, pod=victim["podName"], detect_within=NOT_READY_AFTER_SECONDS)
        try:
            return strike(patient, run, inject, expect, note=note)
        finally:
            stage.renew(node)

    yield from in_one_job(stage, session, "power", stage.spares, one)


def _store_host(stage: Stage, session: Session) -> Iterator[FaultRun]:
    yield from _power_off(stage, session, rank=0)


def _kernel_line(stage: Stage, session: Session) -> Iterator[FaultRun]:
    def one(patient: Patient, run: int, dice: random.Random) -> FaultRun:
        line = dice.choice(KERNEL_LINES)
        victim = somebody(patient, dice)
        node, pod = victim["nodeName"], victim["podName"]
        record = f"3,{run + 1},{int(time.monotonic() * 1e6)},-;{line}"

        def inject() -> float:
            moment, *_ = patient.shell(pod, f"date +%s.%N; echo '{record}' >> {KERNEL_LOG}").split()
            return float(moment)

        try:
            return strike(
                patient, run, inject, lost(node, causes=frozenset({"Device"}), pod=pod), note=f"{line[12:50]} on {node}"
            )
        finally:
            stage.renew(node)

    environment = {"TRAINIUM_KERNEL_LOG": KERNEL_LOG}
    yield from in_one_job(stage, session, "kernel", stage.spares, one, environment=environment)


KERNEL_LOG = "/dev/shm/kmsg"


def _two_at_once(
    stage: Stage, session: Session, change: str, *, tolerance: float = 0.0, **more: object
) -> Iterator[FaultRun]:
    stage.needs_room()

    def one(patient: Patient, run: int, dice: random.Random) -> FaultRun:
        victims = dice.sample(patient.members(), 2)
        time.sleep(dice.uniform(0.0, 0.5))
        nodes = [victim["nodeName"] for victim in victims]

        def inject() -> float:
            moment = time.time()
            for node in nodes:
                stage.site.power_off(node)
            return moment

        names = {victim["podName"] for victim in victims}

        def named(found: Findings, entry: Json) -> bool:
            return found.expect(entry.get("pod") in names, f"the pod named is {entry.get('pod')}, lost were {names}")

        expect = Expect(
            causes=SILENT,
            rungs=TAKEN_OVER,
            interruptions=2,
            also=named,
            patience=120,
            **more,  # type: ignore[arg-type]
        )
        try:
            return strike(patient, run, inject, expect, note=" and ".join(nodes), gap=1.0)
        finally:
            for node in nodes:
                stage.renew(node)

    yield from in_one_job(stage, session, "two", change, one, tolerance=tolerance)


def _two_sharded(stage: Stage, session: Session) -> Iterator[FaultRun]:
    change = f"{TWO_SPARES}\ntrainer: {{dataParallel: FullySharded}}\ncheckpoint: {{durable: {{everySteps: 10}}}}"
    yield from _two_at_once(stage, session, change, tolerance=1e-5, steps_lost=20)


def _two_replicated(stage: Stage, session: Session) -> Iterator[FaultRun]:
    yield from _two_at_once(stage, session, TWO_SPARES, steps_lost=1)


def _no_capacity(stage: Stage, session: Session) -> Iterator[FaultRun]:
    change = "workers: {minReplicas: 1}\nrecovery: {rescaleAfterSeconds: 3}"

    def one(patient: Patient, run: int, dice: random.Random) -> FaultRun:
        victim = somebody(patient, dice)
        node = victim["nodeName"]
        if stage.keep_operator(node):
            patient.settle()
        idle = set(stage.site.worker_nodes()) - {member["nodeName"] for member in patient.members()}
        for other in idle:
            stage.cordon(other)

        def inject() -> float:
            moment = time.time()
            stage.site.power_off(node)
            return moment

        def smaller(found: Findings, _: Json) -> bool:
            return found.expect(patient.size() == stage.size - 1, "the job did not shrink")

        try:
            expect = lost(node, rungs=frozenset({"Shrink"}), replaced=None, also=smaller)
            outcome = strike(patient, run, inject, expect, note=node)
        finally:
            for other in idle:
                stage.cordon(other, on=False)
            stage.renew(node)
        patient.until("the full size again", lambda: patient.size() == stage.size, 90)
        return outcome

    yield from in_one_job(stage, session, "capacity", change, one, tolerance=1e-5)


def _uneven(stage: Stage, session: Session) -> Iterator[FaultRun]:
    batch = 8
    change = (
        "workers: {replicas: 4, minReplicas: 2}\nrecovery: {rescaleAfterSeconds: 3}\n"
        f"trainer: {{batch: {{globalSize: {batch}, microSize: 1}}}}"
    )
    if len(stage.site.worker_nodes()) < 4:
        raise SkipRowError("four nodes are needed")

    def one(patient: Patient, run: int, dice: random.Random) -> FaultRun:
        idle = set(stage.site.worker_nodes()) - {member["nodeName"] for member in patient.members()}
        for other in idle:
            stage.cordon(other)
        outcomes, gone = list[FaultRun](), list[str]()
        try:
            for size, passes in ((3, 3), (2, 4)):
                node = somebody(patient, dice)["nodeName"]
                if stage.keep_operator(node):
                    patient.until_step(patient.step() + 2)
                gone.append(node)
                outcomes.append(_shrunk(stage, patient, run, node, size, passes))
        finally:
            for other in idle:
                stage.cordon(other, on=False)
            for node in gone:
                stage.renew(node)
        patient.until("the full size again", lambda: patient.size() == 4, 90)
        slowest = max(outcomes, key=lambda outcome: outcome.recover or 0.0)
        return replace(slowest, wrong=tuple(text for outcome in outcomes for text in outcome.wrong))

    yield from in_one_job(stage, session, "uneven", change, one, tolerance=1e-5, batch=batch)


def _shrunk(stage: Stage, patient: Patient, run: int, node: str, size: int, passes: int) -> FaultRun:
    """A node loses its power and nobody takes its rank: on how many the job goes on, and in how many passes."""

    def inject() -> float:
        moment = time.time()
        stage.site.power_off(node)
        return moment

    def smaller(found: Findings, _: Json) -> bool:
        now = patient.status()["membership"]
        told = f"it trains on {now['size']} nodes with {now['passes']} passes"
        return found.expect((now["size"], now["passes"]) == (size, passes), told)

    expect = lost(node, rungs=frozenset({"Shrink"}), replaced=None, also=smaller)
    return strike(patient, run, inject, expect, note=f"{node}, then {size} nodes")


def _partition(stage: Stage, session: Session) -> Iterator[FaultRun]:
    if not stage.local and not {"cutOff", "mend"} <= stage.site.settings.keys():
        raise SkipRowError("the site's settings have no cutOff and mend commands")

    def one(patient: Patient, run: int, dice: random.Random) -> FaultRun:
        victim = somebody(patient, dice)
        node, pod = victim["nodeName"], victim["podName"]

        def inject() -> float:
            moment = time.time()
            stage.cut_off(node)
            return moment

        def shut_out(found: Findings, last: Json) -> bool:
            named = (last["cause"], last.get("pod"), last.get("node"))
            right = found.expect(named == ("NodeLost", pod, node), f"in the end this was named: {named}")
            return found.expect(last["rung"] in TAKEN_OVER, f"in the end it was answered by {last['rung']}") and right

        # Sockets that are made behind the cut live until they are found (0.02 s): the node is heard now and then, and
        # until it is silent for good the agents may try in place what they can.
        expect = replace(
            lost(node),
            causes=SILENT | {"Hang"},
            rungs=TAKEN_OVER | {"InPlace"},
            node=None,
            interruptions=5,
            also=shut_out,
        )
        try:
            outcome = strike(patient, run, inject, expect, note=node)
        finally:
            stage.cut_off(node, off=False)
        # What was cut off comes back and must find itself shut out.
        before = patient.step()
        patient.until_step(before + 10)
        found = Findings(list(outcome.wrong))
        found.expect(victim["podUid"] not in patient.member_uids(), "the worker behind the cut is a member again")
        stage.renew(node)
        return replace(outcome, wrong=tuple(found.wrong))

    yield from in_one_job(stage, session, "partition", stage.spares, one)


def _storm(stage: Stage, session: Session) -> Iterator[FaultRun]:
    """Near half of the fleet is called bad, one node after the other: the breaker lets through a fifth of it."""
    stage.needs_room()
    fleet = len(stage.site.worker_nodes())

    def one(patient: Patient, run: int, dice: random.Random) -> FaultRun:
        inside = [member["nodeName"] for member in patient.members()]
        others = [node for node in stage.site.worker_nodes() if node not in inside]
        bad = [*dice.sample(inside, 2), dice.choice(others)]
        dice.shuffle(bad)
        # A node that turned good last in the run before may have been acted on, rightly, when it was the only bad one.
        patient.until("healthy nodes", lambda: patient.condition("NodesHealthy").get("reason") == "NodesHealthy", 30)
        patient.settle(5)
        before = Before.of(patient)
        where = {pod["metadata"]["uid"]: pod["spec"].get("nodeName", "") for pod in patient.pods()}
        begun = patient.step()
        moment = time.time()
        for node in bad:
            stage.call_bad(node)
        found = Findings()
        try:
            patient.until("word of the breaker", lambda: _is_frozen(patient), 30)
            told = time.time() - moment
            time.sleep(8)
            patient.until_step(begun + 20)
            left = before.uids - {pod["metadata"]["uid"] for pod in patient.pods()}
            most = max(1, int(fleet * 0.2))
            if not found.expect(
                len(left) <= most, f"{len(left)} pods were replaced on a mass diagnosis, allowed is {most}"
            ):
                found.wrong += [
                    f"{e['cause']}/{e['rung']} {e['pod']} {e['node']}: {e['message']}" for e in patient.history()[-3:]
                ]
            found.expect(not stage.cordoned(), f"nodes were cordoned: {stage.cordoned()}")
        finally:
            for node in bad:
                stage.call_bad(node, bad=False)
        patient.until("an end of the alarm", lambda: not _is_frozen(patient), 30)
        moved = ", ".join(sorted(where[uid] for uid in left)) or "none"
        note = f"bad {', '.join(bad)}; left {moved}"
        return FaultRun(run, round(told, 3), None, 0, not found.wrong, tuple(found.wrong), note)

    yield from in_one_job(stage, session, "storm", stage.spares, one)


def _is_frozen(patient: Patient) -> bool:
    return patient.condition("NodesHealthy").get("reason") == "NodeActionsFrozen"


ROWS = (
    Row(
        number=5,
        fault="node loses its power or hangs, not yet NotReady",
        injected="the node's processes killed (7 of 10) or frozen (3 of 10), the API told nothing",
        expected="the spare is active before the node is NotReady; at most 1 step lost; the node suspected",
        judged="history: NodeLost, Spare or Replace, that pod and node, suspected; detected within 40 s; curve",
        play=_power_off,
        kubelet=True,
    ),
    Row(
        number=6,
        fault="kernel line of an SRAM, HBM, NeuronCore or DMA error",
        injected="`NEURON_HW_ERR=...` in the kernel log that the agent reads",
        expected="handed over to the spare, the node suspected; 0 or 1 step lost",
        judged="history: Device, Spare or Replace, that pod and node; curve",
        play=_kernel_line,
        kubelet=True,
    ),
    Row(
        number=15,
        fault="two nodes at once, their memory gone too",
        injected="two of three nodes of a fully sharded job lose their power (no copies on buddies yet)",
        expected="resumed from the newest committed checkpoint (one each 10 steps); at most 20 steps lost",
        judged="history: NodeLost, Spare or Replace, one of the two named; curve within 1e-5 of the replicated one",
        play=_two_sharded,
        most=5,
        kubelet=True,
    ),
    Row(
        number=16,
        fault="two nodes at once, a copy survives",
        injected="two of three nodes of a replicated job lose their power: the third holds the whole state",
        expected="resumed from its memory; at most 1 step lost",
        judged="history: NodeLost, Spare or Replace, one of the two named; curve",
        play=_two_replicated,
        most=10,
        kubelet=True,
    ),
    Row(
        number=17,
        fault="no spare, no capacity",
        injected="idle nodes cordoned, a member's node loses its power; capacity back afterwards",
        expected="shrinks to 2 of 3 after `rescaleAfterSeconds` (3 here), grows back; at most 1 step lost",
        judged="history: NodeLost, Shrink, that node; size 2, later 3; curve within 1e-5; samples",
        play=_no_capacity,
        most=5,
        kubelet=True,
    ),
    Row(
        number=17,
        part="b",
        fault="no spare, the batch does not come out even",
        injected="4 nodes, global batch 8: two nodes lose their power one after the other; both back later",
        expected="4 -> 3 -> 2 -> 4 nodes with 2, 3, 4 and 2 passes a step; at most 1 step lost each time",
        judged="history: NodeLost, Shrink, that node; sizes and passes; curve within 1e-5; samples",
        play=_uneven,
        most=3,
        kubelet=True,
    ),
    Row(
        number=24,
        fault="host of the rendezvous store lost",
        injected="as row 5, always the node of rank 0, which hosts the store",
        expected="another host is chosen; at most 1 step lost",
        judged="as row 5",
        play=_store_host,
        most=10,
        kubelet=True,
    ),
    Row(
        number=28,
        fault="workers cut off from API server and operator",
        injected="a node's link to the API and to its peers is cut, and mended after the recovery",
        expected="at the latest when the node is NotReady its rank is with the spare; before that tries in place",
        judged="history: last NodeLost, that pod and node; what was cut off is no member afterwards; curve, samples",
        play=_partition,
        most=3,
        kubelet=True,
    ),
    Row(
        number=31,
        fault="failure storm: three of seven nodes bad at once",
        injected="NeuronHealth=True on three of seven nodes, two of them with a member",
        expected="the circuit breaker opens: told in status, at most a fifth of the nodes (1) is left, none cordoned",
        judged="condition NodesHealthy (its reason, as detection); uids; nodes; curve",
        play=_storm,
        most=5,
        kubelet=True,
    ),
)
