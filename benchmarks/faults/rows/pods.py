"""Define the rows in which a pod fails: deleted, evicted, on a node with a notice, or while it takes over."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

from benchmarks.faults.environment import FaultEnvironment
from benchmarks.faults.recovery import SPARE_OR_REPLACE, ExpectedRecovery, Run
from benchmarks.faults.row import Row

if TYPE_CHECKING:
    from benchmarks.faults.record import RunResult

DELETED = frozenset({"PodLost", "Preempted"})
"""Causes of a forced deletion: milliseconds decide whether the operator observes the pod terminating."""
NOTICES = (
    "aws-node-termination-handler/spot-itn",
    "aws-node-termination-handler/scheduled-maintenance",
    "karpenter.sh/disrupted",
)


def expect_deleted(pod: str, **fields: object) -> ExpectedRecovery:
    """Expect a spare or a new pod after a forced deletion, without a suspected node."""
    defaults: dict[str, Any] = {"causes": DELETED, "rungs": SPARE_OR_REPLACE, "pod": pod, "suspect": ""}
    return ExpectedRecovery(**(defaults | fields))


def _delete_pod(run: Run) -> RunResult:
    method = run.rng.choice(("delete", "evict", "delete by force"))
    pod = run.random_member()["podName"]
    forced = method == "delete by force"
    expected = expect_deleted(pod, pods_joined=1)
    if not forced:
        expected = expect_deleted(pod, pods_joined=1, causes=frozenset({"Preempted"}), max_steps_lost=0)
    target = run.target
    delete = (lambda: target.evict(pod)) if method == "evict" else (lambda: target.delete_pod(pod, force=forced))
    return run.measure_recovery(delete, expected, note=f"{method} {pod}")


def _kill_agent(run: Run) -> RunResult:
    member = run.random_member()
    pod, node = member["podName"], member["nodeName"]
    expected = ExpectedRecovery(causes=frozenset({"PodLost"}), rungs=SPARE_OR_REPLACE, pod=pod, pods_joined=1)
    return run.measure_recovery(lambda: run.env.kill_agent(run.target.job.namespace, pod, node), expected, note=pod)


def terminate_agents(run: Run, expected: ExpectedRecovery) -> RunResult:
    """Send SIGTERM to one agent or to all, whose pods nobody deletes."""
    seconds_apart = run.rng.choice((None, 0.0, 1.6))
    members = [run.random_member()] if seconds_apart is None else run.target.members()

    def terminate() -> None:
        for member in members:
            run.env.kill_agent(run.target.job.namespace, member["podName"], member["nodeName"], signal.SIGTERM)
            time.sleep(seconds_apart or 0.0)

    note = f"one of them, {members[0]['podName']}" if seconds_apart is None else f"all, {seconds_apart:g} s apart"
    return run.measure_recovery(terminate, expected, note=note, pause=5.0)


def _terminate_trainers(run: Run) -> RunResult:
    expected = ExpectedRecovery(
        causes=frozenset({"PodLost"}), rungs=SPARE_OR_REPLACE, suspect="", max_interruptions=4, timeout_seconds=120
    )
    return terminate_agents(run, expected)


def _announce_termination(run: Run) -> RunResult:
    key = run.rng.choice(NOTICES)
    node = run.random_member()["nodeName"]
    expected = ExpectedRecovery(
        causes=frozenset({"Preempted"}),
        rungs=SPARE_OR_REPLACE,
        node=node,
        suspect="",
        max_steps_lost=0,
        pods_joined=1,
    )
    try:
        return run.measure_recovery(lambda: run.env.taint(node, key, "NoSchedule"), expected, note=f"{key} on {node}")
    finally:
        run.env.untaint(node, key)


def _delete_activated_spare(run: Run) -> RunResult:
    target = run.target
    pod = run.random_member()["podName"]
    target.wait_until(lambda: target.status().get("spares", 0) >= 2, "two ready spares", 120)
    members = target.member_uids()
    fault = run.inject(lambda: target.delete_pod(pod, force=True))

    def joined_pods() -> list[str]:
        return [member["podName"] for member in target.members() if member["podUid"] not in members]

    spare = target.wait_until(joined_pods, "spare among the members", 30)[0]
    time.sleep(run.rng.uniform(0.0, 0.3))
    target.delete_pod(spare, force=True)
    expected = expect_deleted(pod, max_interruptions=2)
    return run.follow_recovery(fault, expected, note=f"{pod}, then the spare {spare}", pause=1.0)


ROWS = (
    Row(
        number=4,
        fault="pod deleted or evicted",
        injected="one of: delete with its grace period, the eviction API, delete by force (random)",
        expected="the spare takes the rank; no step lost with a grace period, else at most 1; no node blamed",
        checked="history: Preempted (by force: or PodLost), rung Spare or Replace, that pod, no node suspected; curve",
        run_once=_delete_pod,
        spares=2,
    ),
    Row(
        number=4,
        part="b",
        fault="agent killed, its pod fails",
        injected="SIGKILL of the worker's main process from outside",
        expected="the kubelet does not restart it (restartPolicy Never); the spare takes the rank; at most 1 step lost",
        checked="history: PodLost, Spare or Replace, that pod; curve",
        run_once=_kill_agent,
        spares=2,
        max_runs=5,
    ),
    Row(
        number=4,
        part="c",
        fault="agents asked to end, their pods not deleted",
        injected="SIGTERM to the main process of one worker, of all at once, or of all 1.6 s apart (random)",
        expected="the ranks save, the pods fail with 75 and are replaced; the job never counts as complete",
        checked="history: PodLost, Spare or Replace, no node suspected; at most 1 step lost; curve",
        run_once=_terminate_trainers,
        max_runs=6,
    ),
    Row(
        number=18,
        fault="spot or maintenance notice",
        injected="a taint of the node termination handler or of Karpenter on a member's node",
        expected="all save and the spare takes the rank within the notice; no step lost, nothing counted",
        checked="history: Preempted, Spare or Replace, that node, no node suspected, 0 steps lost; curve",
        run_once=_announce_termination,
        spares=2,
    ),
    Row(
        number=19,
        fault="spare dies on activation",
        injected="a member deleted by force; the spare too, up to 0.3 s after the generation names it",
        expected="the next spare takes the rank; at most 1 step lost, no deadlock",
        checked="history: PodLost or Preempted, twice at most, Spare or Replace, no node suspected; curve",
        run_once=_delete_activated_spare,
        require=FaultEnvironment.require_full_size,
        spares=2,
        max_runs=10,
    ),
)
