"""Define the rows in which training processes fail or hang, while pods and nodes remain."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from benchmarks.faults.recovery import SPARE_OR_REPLACE, ExpectedRecovery, Run, expect_in_place
from benchmarks.faults.row import Row

if TYPE_CHECKING:
    from benchmarks.faults.record import Findings, RunResult
    from benchmarks.faults.target import Json


def kill_rank(run: Run) -> RunResult:
    """Send SIGKILL to a random rank, and measure the recovery."""
    pod = run.random_member()["podName"]
    return run.measure_recovery(lambda: run.target.signal(pod, "KILL"), expect_in_place("Crash", pod), note=pod)


def _stop_rank(run: Run) -> RunResult:
    member = run.random_member()
    pod = member["podName"]
    expected = expect_in_place("Hang", pod, member["nodeName"])
    return run.measure_recovery(lambda: run.target.signal(pod, "STOP"), expected, note=pod)


def _mute_node(run: Run) -> RunResult:
    member = run.random_member()
    pod, node = member["podName"], member["nodeName"]

    def names_culprit(findings: Findings, last: Json) -> bool:
        named, rung = last.get("pod"), last["rung"]
        blame_correct = findings.expect(named == pod, f"the culprit is {pod}, the last entry names {named or 'none'}")
        return findings.expect(rung in SPARE_OR_REPLACE, f"the last rung is {rung}") and blame_correct

    expected = ExpectedRecovery(
        causes=frozenset({"Hang"}),
        rungs=frozenset({"InPlace"}),
        suspect=node,
        max_interruptions=3,
        check_last_entry=names_culprit,
        timeout_seconds=180,
    )
    try:
        return run.measure_recovery(lambda: run.target.inject("mute", pod, sticky=True), expected, note=pod)
    finally:
        run.env.replace_node(node)


def _segmentation_fault(run: Run) -> RunResult:
    pod = run.random_member()["podName"]
    return run.measure_recovery(lambda: run.target.inject("segv", pod), expect_in_place("Crash", pod), note=pod)


def _kill_during_recovery(run: Run) -> RunResult:
    target = run.target
    first, second = (run.rng.choice(target.members())["podName"] for _ in range(2))
    fault = run.inject(lambda: target.signal(first, "KILL"))
    time.sleep(run.rng.uniform(0.1, 0.8))
    target.signal(second, "KILL")
    expected = ExpectedRecovery(
        causes=frozenset({"Crash"}), rungs=frozenset({"InPlace"}), suspect="", pods_joined=0, max_interruptions=2
    )
    return run.follow_recovery(fault, expected, note=f"{first}, then {second}", pause=1.5)


ROWS = (
    Row(
        number=1,
        fault="SIGKILL of one rank",
        injected="`kill -9` of a random training process at a random time",
        expected="all ranks restart in place, pods keep their uid; at most 1 step lost",
        checked="history: cause Crash, rung InPlace, that pod, no node suspected; uids; curve bit for bit",
        run_once=kill_rank,
    ),
    Row(
        number=2,
        fault="SIGSTOP of one rank (hang)",
        injected="`kill -STOP` of a training process; step floor of the hang limit 3 s (default 15)",
        expected="found by its agent, stacks dumped, restart in place; at most 1 step lost",
        checked="as row 1, with cause Hang and the stopped rank's pod; its node gets a strike",
        run_once=_stop_rank,
    ),
    Row(
        number=3,
        fault="SIGSEGV in a collective",
        injected="a read of address 0 in a thread while the main thread is in an all-reduce",
        expected="as row 1; the peers, whose collective failed, are not blamed",
        checked="as row 1",
        run_once=_segmentation_fault,
    ),
    Row(
        number=8,
        fault="collective stuck on all ranks, culprit hidden",
        injected="one node's all-reduces send nothing, while its rank seems to wait like the others",
        expected="restart in place; stuck again: nodes tested in pairs, the spare takes the culprit's rank; 1 step",
        checked="history: Hang, InPlace; last that pod, Spare or Replace; only that node suspected; curve bit for bit",
        run_once=_mute_node,
        max_runs=3,
    ),
    Row(
        number=20,
        fault="failure during recovery",
        injected="SIGKILL of a rank, and 0.1 to 0.8 s later SIGKILL of another (or the same) one",
        expected="restarts again, no deadlock; at most 1 step lost",
        checked="causes Crash, rung InPlace, no pod replaced, stable training afterwards; curve bit for bit",
        run_once=_kill_during_recovery,
    ),
)
