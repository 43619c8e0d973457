"""Define the rows in which the operator or the API server fails, or the job changes during a recovery."""

from __future__ import annotations

import contextlib
import shutil
import time
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.faults.environment import FaultEnvironment
from benchmarks.faults.record import Findings, RunResult
from benchmarks.faults.recovery import Run, expect_in_place, expect_node_lost
from benchmarks.faults.row import Row
from benchmarks.faults.rows.pods import expect_deleted
from benchmarks.faults.rows.processes import kill_rank
from tests.testing.suite import timeouts
from trainium_devcluster.controlplane.components import Component

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.faults.target import Json, TargetJob
    from trainium_devcluster.faults import Faults

OUTAGE_SECONDS = 20.0
LAST_STEP = 100
_MISSING_SECONDS = 5.0
"""Allowed difference between the time of the run and its goodput's, because a status is some seconds old."""
TAKE_OVER_SECONDS = 5.0
"""Goal of the time until a second replica leads after the first one stops."""
ONE_REPLICA_SECONDS = 90.0
"""Time to recreate the only replica: 40 s without a report of the node, `lostNodeSeconds`, the start."""
NODE_LOST_SECONDS = 10.0
"""Time for agents to find the new leader, and for the leader to detect a missing agent."""


def _kill_operator_during_recovery(run: Run) -> RunResult:
    target = run.target
    pod = run.random_member()["podName"]
    fault = run.inject(lambda: target.delete_pod(pod, force=True))
    delay = run.rng.uniform(0.0, 1.5)
    time.sleep(delay)
    run.env.operator.kill()
    note = f"operator killed {delay:.1f} s later"
    return run.follow_recovery(fault, expect_deleted(pod, timeout_seconds=90), note=note)


def _kill_rank_without_operator(run: Run) -> RunResult:
    target = run.target
    pod = run.random_member()["podName"]
    run.env.operator.scale(0)
    try:
        target.wait_for_step(target.newest_step() + 10)
        fault = run.inject(lambda: target.signal(pod, "KILL"))
        target.wait_for_step(fault.completed_step + 10, 30)
        recovered_at = target.records()[fault.completed_step + 1]["time"]
    finally:
        run.env.operator.scale(1)
    result = run.follow_recovery(fault, expect_in_place("Crash", pod), note=pod)
    return replace(result, recovery_seconds=round(recovered_at - fault.injected_at, 3))


def _end_without_operator(run: Run) -> RunResult:
    target = run.target
    target.wait_until_stable(3, seconds=120)
    seconds_before, taken_at = target.status()["goodput"]["wallSeconds"], time.time()
    run.env.operator.scale(0)
    try:
        target.signal(run.random_member()["podName"], "KILL")
        target.wait_until(lambda: {pod["status"]["phase"] for pod in target.pods()} == {"Succeeded"}, "end", 180)
        ended_at = max(_read_end(pod) for pod in target.pods())
    finally:
        run.env.operator.scale(1)
    started_at = time.time()
    target.wait_until(lambda: target.status()["phase"] == "Completed", "completion", 60)
    detection_seconds = round(time.time() - started_at, 3)
    status = target.status()
    missing_seconds = seconds_before + ended_at - taken_at - status["goodput"]["wallSeconds"]
    figures = (status["progress"]["step"], status["checkpoint"].get("durableStep"), status["restarts"]["total"])
    interruptions = [(entry["rung"], entry["cause"]) for entry in status["history"]]
    findings = Findings()
    findings.expect(figures == (LAST_STEP, LAST_STEP, 1), f"step, checkpoint and restarts are {figures}")
    findings.expect(interruptions == [("InPlace", "Crash")], f"the history is {interruptions}")
    findings.expect(abs(missing_seconds) < _MISSING_SECONDS, f"{missing_seconds:.1f} s are missing in the goodput")
    return run.result(findings, detection_seconds=detection_seconds, steps_lost=0)


def _read_end(pod: Json) -> float:
    """Return when the container of a worker ended (Unix seconds)."""
    (container,) = pod["status"]["containerStatuses"]
    return datetime.fromisoformat(container["state"]["terminated"]["finishedAt"]).timestamp()


def _stop_api_server(run: Run) -> RunResult:
    target, faults = run.target, run.env.faults
    before = run.snapshot()
    time.sleep(run.rng.uniform(0.0, 1.0))
    start = target.newest_step()
    faults.stop(Component.APISERVER, seconds=0)
    try:
        time.sleep(OUTAGE_SECONDS)
        steps = target.newest_step() - start
    finally:
        faults.start(Component.APISERVER)
    target.wait_until(lambda: target.status()["progress"]["step"] > start + steps, "status of the operator")
    target.wait_until_stable(10)
    findings = Findings()
    findings.expect(steps > OUTAGE_SECONDS / 0.5, f"only {steps} steps during the outage")
    findings.expect(len(target.history()) == len(before.interruptions), "the outage caused an interruption")
    findings.expect({pod["metadata"]["uid"] for pod in target.pods()} == before.pod_uids, "pods were replaced")
    return run.result(findings, steps_lost=0, note=f"{steps} steps during the outage")


def _kill_rank_without_names(run: Run) -> RunResult:
    with run.env.stopped_name_servers():
        time.sleep(run.rng.uniform(0.0, 2.0))
        return kill_rank(run)


def _delete_pod_while_statuses_are_refused(run: Run) -> RunResult:
    target = run.target
    pod = run.random_member()["podName"]
    with target.job.refused_statuses():
        fault = run.inject(lambda: target.delete_pod(pod, force=True))
        target.wait_for_step(fault.completed_step + 10, 60)
    return run.follow_recovery(fault, expect_deleted(pod, timeout_seconds=150), note=pod)


@contextlib.contextmanager
def _two_replicas(env: FaultEnvironment) -> Iterator[None]:
    _ = env.faults
    env.operator.scale(2)
    try:
        yield
    finally:
        env.operator.scale(1)


def _freeze_leader(run: Run) -> RunResult:
    operator, faults, target = run.env.operator, run.env.faults, run.target
    leader = operator.leader()
    name = next(pod["metadata"]["name"] for pod in operator.pods() if pod["metadata"]["name"] in leader)
    time.sleep(run.rng.uniform(0.0, 1.0))
    faults.freeze_container("trainium-system", name)
    frozen_at = time.time()
    try:
        target.wait_until(lambda: operator.leader() not in ("", leader), "new leader", 60)
        takeover_seconds = time.time() - frozen_at
    finally:
        faults.thaw_container("trainium-system", name)
    # For a moment two processes act as the leader; a fault must be handled once.
    pod = run.random_member()["podName"]
    note = f"the other replica leads after {takeover_seconds:.1f} s"
    action = partial(target.delete_pod, pod, force=True)
    result = run.measure_recovery(action, expect_deleted(pod, timeout_seconds=90), note=note)
    findings = Findings(list(result.deviations))
    findings.expect(takeover_seconds <= TAKE_OVER_SECONDS, f"the other replica led after {takeover_seconds:.1f} s")
    return replace(result, detection_seconds=round(takeover_seconds, 3), deviations=tuple(findings.deviations))


def _fail_node_of_leader(run: Run) -> RunResult:
    env, target = run.env, run.target
    with env.operator.on_nodes([member["nodeName"] for member in target.members()]):
        target.wait_until_stable()
        node = env.operator.leader_node()
        member = next(member for member in target.members() if member["nodeName"] == node)
        time.sleep(run.rng.uniform(0.0, 2.0))
        limit = TAKE_OVER_SECONDS + NODE_LOST_SECONDS
        expected = expect_node_lost(node, pod=member["podName"], detect_within_seconds=limit, timeout_seconds=120)
        try:
            note = f"{node}, rank {member['nodeRank']}"
            return run.measure_recovery(partial(env.cluster.power_off, node), expected, note=note)
        finally:
            env.replace_node(node)


def _fail_node_of_only_replica(run: Run) -> RunResult:
    env, target = run.env, run.target
    with env.operator.on_nodes([member["nodeName"] for member in target.members()], replicas=1):
        target.wait_until_stable()
        node = env.operator.leader_node()
        member = next(member for member in target.members() if member["nodeName"] == node)
        expected = expect_node_lost(
            node, pod=member["podName"], detect_within_seconds=ONE_REPLICA_SECONDS, timeout_seconds=180
        )
        try:
            return run.measure_recovery(
                partial(env.cluster.power_off, node), expected, note=f"{node}, rank {member['nodeRank']}"
            )
        finally:
            env.replace_node(node)


def _restore_backup(run: Run) -> RunResult:
    env, target, faults = run.env, run.target, run.env.faults
    assert env.cluster.devcluster is not None
    data = env.cluster.devcluster.paths.root / "etcd"
    backup = data.with_name("etcd-backup")
    with _stopped_control_plane(faults):
        shutil.copytree(data, backup)
    for _ in range(2):
        target.wait_until_stable(3, 120)
        generation = _read_generation(target)
        target.delete_pod(run.random_member()["podName"], force=True)
        target.wait_until(partial(_has_newer_generation, target, generation), "next generation", 60)
    target.wait_until_stable(3, 120)
    known = _read_generation(target)
    with _stopped_control_plane(faults):
        shutil.rmtree(data)
        backup.rename(data)
    restored_at, step = time.time(), target.newest_step()
    target.wait_until(partial(_has_newer_generation, target, known), "generation above the agents'", 180)
    target.wait_for_step(step + 20, 180)
    findings, reached = Findings(), _read_generation(target)
    findings.expect(reached == known + 1, f"generation {reached} instead of {known + 1}, the first above the agents'")
    counted = target.status().get("restarts", {}).get("byCause", {})
    findings.expect("Crash" not in counted, f"counted as failures of a process: {counted}")
    seconds = next(record["time"] for at, record in sorted(target.records().items()) if at > step) - restored_at
    note = f"generation {known} before the restore, then {reached}; counted restarts: {counted}"
    return run.result(findings, recovery_seconds=round(seconds, 3), note=note)


def _read_generation(target: TargetJob) -> int:
    return int(target.status().get("membership", {}).get("generation", 0))


def _has_newer_generation(target: TargetJob, generation: int) -> bool:
    return _read_generation(target) > generation


@contextlib.contextmanager
def _stopped_control_plane(faults: Faults) -> Iterator[None]:
    components = (Component.SCHEDULER, Component.CONTROLLER_MANAGER, Component.APISERVER, Component.ETCD)
    for component in components:
        faults.stop(component)
    try:
        yield
    finally:
        faults.start(*reversed(components))


def _resize_during_recovery(run: Run) -> RunResult:
    target, size = run.target, run.env.size
    pod = run.random_member()["podName"]
    fault = run.inject(lambda: target.delete_pod(pod, force=True))
    time.sleep(run.rng.uniform(0.0, 1.0))
    target.patch({"spec": {"workers": {"replicas": size - 1}}})
    try:
        expected = expect_deleted(pod, rungs=frozenset(), max_interruptions=3, timeout_seconds=90)
        result = run.follow_recovery(fault, expected, note=f"{pod}, then {size - 1} nodes")
        target.wait_until(lambda: target.size() == size - 1, "requested size", 60)
    finally:
        target.patch({"spec": {"workers": {"replicas": size}}})
    target.wait_until(lambda: target.size() == size, "previous size", 90)
    return result


def _delete_job_during_recovery(run: Run) -> RunResult:
    target, cluster = run.target, run.env.cluster
    target.wait_until_stable(3, 120)
    target.delete_pod(run.rng.choice(target.members())["podName"], force=True)
    time.sleep(run.rng.uniform(0.0, 1.5))
    namespace, name = target.job.namespace, target.job.name
    deleted_at = time.time()
    timeout = f"--timeout={timeouts.scaled(60):.0f}s"
    cluster.kubectl("delete", "trainingjob", name, "-n", namespace, timeout, seconds=70)
    target.wait_until(lambda: not target.pods(), "deletion of its pods", 60)
    seconds = time.time() - deleted_at
    time.sleep(1)  # the garbage collector also removes other objects
    findings = Findings()
    remaining = cluster.get("configmaps,services,poddisruptionbudgets,secrets", "-n", namespace)["items"]
    names = [item["metadata"]["name"] for item in remaining if item["metadata"]["name"].startswith(name)]
    findings.expect(not names, f"not deleted: {', '.join(names)}")
    return run.result(findings, recovery_seconds=round(seconds, 3))


ROWS = (
    Row(
        number=25,
        fault="operator killed during a recovery",
        injected="a member deleted by force, the operator's pod too, 0 to 1.5 s later",
        expected="the same result as without: one interruption, the spare has the rank; at most 1 step lost",
        checked="history: PodLost or Preempted once, Spare or Replace, that pod; curve",
        run_once=_kill_operator_during_recovery,
        spares=2,
        max_runs=5,
    ),
    Row(
        number=26,
        fault="no operator, with a fault",
        injected="the operator scaled to 0; SIGKILL of a rank; the operator scaled to 1",
        expected="training continues, the agents restart in place; the operator reports it later",
        checked="first new step without the operator; afterwards as row 1",
        run_once=_kill_rank_without_operator,
        max_runs=5,
    ),
    Row(
        number=26,
        part="b",
        fault="no operator until the job has ended",
        injected="the operator scaled to 0; SIGKILL of a rank; the operator scaled to 1 after the last step",
        expected="Completed, with the final step, checkpoint, goodput and the restart, from the termination messages",
        checked="status: phase, step, checkpoint, wall time, history. Time counts from when the operator runs",
        run_once=_end_without_operator,
        spares=0,
        spec=f"trainer: {{steps: {LAST_STEP}}}",
        job_per_run=True,
        max_runs=5,
    ),
    Row(
        number=27,
        fault="no API server",
        injected=f"the API server killed, and started after {OUTAGE_SECONDS:.0f} s",
        expected="training continues; no pod replaced, no interruption",
        checked="steps during the outage; uids; history; curve",
        run_once=_stop_api_server,
        require=lambda env: env.faults,
        max_runs=2,
        kubelet=False,
    ),
    Row(
        number=29,
        fault="a policy refuses every status, with a fault",
        injected="a ValidatingAdmissionPolicy on `trainingjobs/*`; a member deleted by force; the policy deleted",
        expected="the spare takes the rank while the status is refused; the status has it later; at most 1 step lost",
        checked="first new step while the policy exists; afterwards as row 4",
        run_once=_delete_pod_while_statuses_are_refused,
        max_runs=5,
    ),
    Row(
        number=30,
        part="a",
        fault="two active operators",
        injected="the leader of two replicas frozen, thawed when the other leads, and a member deleted by force",
        expected="the other leads within 5 s; the fault is answered once",
        checked="the Lease (as detection); history: PodLost or Preempted once, Spare or Replace; curve",
        run_once=_freeze_leader,
        context=_two_replicas,
        spares=2,
        max_runs=3,
        kubelet=False,
    ),
    Row(
        number=30,
        part="b",
        fault="the leading operator and a member lost with one node",
        injected="two replicas on nodes of members; the leader's node loses its power, without a change in the API",
        expected="the other replica leads within 5 s, then the spare has the rank; at most 1 step lost",
        checked=f"as row 5; detected within {TAKE_OVER_SECONDS + NODE_LOST_SECONDS:.0f} s of the loss",
        run_once=_fail_node_of_leader,
        spares=2,
        max_runs=5,
    ),
    Row(
        number=30,
        part="c",
        fault="the only operator and a member lost with one node",
        injected="one replica on the node of a member, which loses its power, without a change in the API",
        expected="once Kubernetes has recreated the operator, the spare has the rank; the failure has its true time",
        checked=f"as row 5; detected within {ONE_REPLICA_SECONDS:.0f} s of the loss",
        run_once=_fail_node_of_only_replica,
        spares=2,
        max_runs=2,
    ),
    Row(
        number=32,
        fault="etcd restored from a backup",
        injected="a copy of etcd's data; two members deleted by force, one after the other; the copy put back",
        expected="a generation above that of every agent; training continues",
        checked="the generation, no crash counted; steps. Its time is that from the restore to the first new step",
        run_once=_restore_backup,
        require=lambda env: env.faults,
        spares=2,
        job_per_run=True,
        max_runs=2,
        kubelet=False,
    ),
    Row(
        number=34,
        part="a",
        fault="spec changed during a recovery",
        injected="a member deleted by force, and 0 to 1 s later 2 workers requested instead of 3",
        expected="the newest spec applies: the smaller size, training continues",
        checked="history: PodLost or Preempted first, that pod; the smaller size, later the former; curve within 1e-5",
        run_once=_resize_during_recovery,
        spec="workers: {minReplicas: 1}",
        tolerance=1e-5,
        max_runs=5,
    ),
    Row(
        number=34,
        part="b",
        fault="job deleted during a recovery",
        injected="a member deleted by force, and 0 to 1.5 s later the job",
        expected="nothing of it remains",
        checked="pods, ConfigMaps, Services, budgets, Secrets. Its time is that until the last pod is deleted",
        run_once=_delete_job_during_recovery,
        job_per_run=True,
        max_runs=3,
    ),
    Row(
        number=42,
        fault="silent name servers, with a fault",
        injected="the cluster's name servers frozen by SIGSTOP, and SIGKILL of one rank",
        expected="as row 1",
        checked="as row 1",
        run_once=_kill_rank_without_names,
        require=FaultEnvironment.require_name_servers,
    ),
)
