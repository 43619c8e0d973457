"""Inject faults into the operator, alone or together with a member."""

from __future__ import annotations

import contextlib
import time
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

from tests.testing.cluster.installed import NAMESPACE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.faults.environment import FaultEnvironment
    from benchmarks.faults.recovery import Run
    from benchmarks.faults.target import Json

_MISSING_SECONDS = 5.0
"""Allowed difference between the time of the run and its goodput's, because a status is some seconds old."""
_TAKE_OVER_SECONDS = 5.0
"""Goal of the time until a second replica leads after the first one stops."""


def kill_operator_during_recovery(run: Run) -> None:
    """Delete a member, and the operator during the recovery."""
    fault, victim = run.delete_member()
    delay = run.rng.uniform(0.0, 1.5)
    time.sleep(delay)
    run.env.operator.kill()
    run.follow(fault, victim, note=f"operator killed {delay:.1f} s later")


def signal_rank_without_operator(run: Run) -> None:
    """Kill a rank while there is no operator; training must resume without it."""
    target, victim = run.target, run.choose_member()
    run.env.operator.scale(0)
    try:
        target.wait_for_step(target.read_newest_step() + 10)
        fault = run.inject(partial(target.signal_rank, victim["podName"]))
        target.wait_for_step(fault.completed_step + 10, 30)
        recovered_at = target.read_records()[fault.completed_step + 1]["time"]
    finally:
        run.env.operator.scale(1)
    run.follow(fault, victim)
    run.result.recovery_seconds = round(recovered_at - fault.injected_at, 3)


def end_without_operator(run: Run) -> None:
    """Kill a rank and let the job end while there is no operator, which must find all of it afterwards."""
    target, last_step = run.target, run.target.manifest["spec"]["trainer"]["steps"]
    seconds_before, taken_at = target.read_status()["goodput"]["wallSeconds"], time.time()
    run.env.operator.scale(0)
    try:
        target.signal_rank(run.choose_member()["podName"])
        target.wait_for("end", lambda: {pod["status"]["phase"] for pod in target.list_pods()} == {"Succeeded"}, 180)
        ended_at = max(_read_end(pod) for pod in target.list_pods())
    finally:
        run.env.operator.scale(1)
    started_at = time.time()
    status = target.wait_for_phase("Completed", 60)
    run.result.detection_seconds, run.result.steps_lost = round(time.time() - started_at, 3), 0
    missing_seconds = seconds_before + ended_at - taken_at - status["goodput"]["wallSeconds"]
    figures = (status["progress"]["step"], status["checkpoint"].get("durableStep"), status["restarts"]["total"])
    interruptions = [(entry["response"], entry["cause"]) for entry in status["history"]]
    run.expect(figures == (last_step, last_step, 1), f"step, checkpoint and restarts are {figures}")
    run.expect(interruptions == [("InPlace", "Crash")], f"the history is {interruptions}")
    run.expect(abs(missing_seconds) < _MISSING_SECONDS, f"{missing_seconds:.1f} s are missing in the goodput")


def _read_end(pod: Json) -> float:
    """Return when the container of a worker ended (Unix seconds)."""
    (container,) = pod["status"]["containerStatuses"]
    return datetime.fromisoformat(container["state"]["terminated"]["finishedAt"]).timestamp()


@contextlib.contextmanager
def run_two_replicas(env: FaultEnvironment) -> Iterator[None]:
    """Run two replicas of the operator."""
    env.require("devcluster")
    env.operator.scale(2)
    try:
        yield
    finally:
        env.operator.scale(1)


def freeze_leader(run: Run) -> None:
    """Freeze the leader until the other replica leads; for a moment two processes act, and handle one fault."""
    operator, faults, target = run.env.operator, run.env.faults, run.target
    leader = operator.read_leader()
    name = next(pod["metadata"]["name"] for pod in operator.list_pods() if pod["metadata"]["name"] in leader)
    time.sleep(run.rng.uniform(0.0, 1.0))
    faults.freeze_container(NAMESPACE, name)
    frozen_at = time.time()
    try:
        target.wait_for("new leader", lambda: operator.read_leader() not in ("", leader), 60)
        takeover_seconds = time.time() - frozen_at
    finally:
        faults.thaw_container(NAMESPACE, name)
    sentence = f"the other replica led after {takeover_seconds:.1f} s"
    fault, victim = run.delete_member()
    run.follow(fault, victim, note=sentence)
    run.expect(takeover_seconds <= _TAKE_OVER_SECONDS, sentence)
    run.result.detection_seconds = round(takeover_seconds, 3)


def fail_node_of_leader(run: Run, replicas: int) -> None:
    """Run replicas of the operator on the nodes of members, and power the leader's node off."""
    env, target = run.env, run.target
    with env.operator.run_on_nodes([member["nodeName"] for member in target.list_members()], replicas=replicas):
        target.wait_until_stable()
        leader_node = env.operator.find_leader_node()
        victim = next(member for member in target.list_members() if member["nodeName"] == leader_node)
        if replicas > 1:
            time.sleep(run.rng.uniform(0.0, 2.0))
        with run.move_operator_off_node(victim, keep_operator=True) as node:
            run.measure(partial(env.cluster.power_off, node), victim, note=f"{node}, rank {victim['nodeRank']}")
