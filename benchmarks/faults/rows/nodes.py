"""Define the rows in which a node fails, is partitioned or is reported unhealthy; a new node replaces a faulty one."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.faults.environment import FaultEnvironment, RowSkippedError
from benchmarks.faults.record import Findings, RunResult
from benchmarks.faults.recovery import SPARE_OR_REPLACE, ExpectedRecovery, Run, expect_node_lost
from benchmarks.faults.row import Row

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from benchmarks.faults.target import Json

KERNEL_LOG = "/dev/shm/kmsg"
"""A file in a volume of the pod that replaces the node's /dev/kmsg."""
NODE_LOST = frozenset({"NodeLost"})
NOT_READY_AFTER_SECONDS = 40.0
"""Kubernetes does not mark a silent node NotReady earlier (the default grace period is 40 to 50 s)."""
KERNEL_LINES = tuple(
    f"neuron:nd0: NEURON_HW_ERR={kind} instance-id=i-0 hostname=node nd-id=0 nc-id=1 serial-num=0 action=TERMINATE"
    for kind in ("SRAM_UNCORRECTABLE_ERROR", "NC_UNCORRECTABLE_ERROR", "HBM_UNCORRECTABLE_ERROR", "DMA_ERROR")
)
UNEVEN_BATCH = 8


def _fail_node_of_member(run: Run, member: Json) -> RunResult:
    env, node = run.env, member["nodeName"]
    if env.move_operator_off(node):
        run.target.wait_until_stable()
    hangs = env.local and run.rng.random() < 0.3
    fail = env.faults.freeze_node if hangs else env.cluster.power_off
    expected = expect_node_lost(node, pod=member["podName"], detect_within_seconds=NOT_READY_AFTER_SECONDS)
    note = f"{'hang of' if hangs else 'power off'} {node}, rank {member['nodeRank']}"
    try:
        return run.measure_recovery(lambda: fail(node), expected, note=note)
    finally:
        env.replace_node(node)


def _fail_node(run: Run) -> RunResult:
    return _fail_node_of_member(run, run.random_member())


def _fail_store_host(run: Run) -> RunResult:
    return _fail_node_of_member(run, run.target.members()[0])


def _write_kernel_line(run: Run) -> RunResult:
    line = run.rng.choice(KERNEL_LINES)
    member = run.random_member()
    node, pod = member["nodeName"], member["podName"]
    record = f"3,{run.number + 1},{int(time.monotonic() * 1e6)},-;{line}"

    def append_record() -> float:
        return float(run.target.shell(pod, f"date +%s.%N; echo '{record}' >> {KERNEL_LOG}").split()[0])

    expected = expect_node_lost(node, causes=frozenset({"Device"}), pod=pod)
    try:
        return run.measure_recovery(append_record, expected, note=f"{line[12:50]} on {node}")
    finally:
        run.env.replace_node(node)


def _fail_two_nodes(run: Run, *, max_steps_lost: int) -> RunResult:
    members = run.rng.sample(run.target.members(), 2)
    time.sleep(run.rng.uniform(0.0, 0.5))
    nodes = [member["nodeName"] for member in members]
    pods = {member["podName"] for member in members}

    def power_off_both() -> None:
        for node in nodes:
            run.env.cluster.power_off(node)

    def names_failed_pod(findings: Findings, entry: Json) -> bool:
        return findings.expect(entry.get("pod") in pods, f"the pod named is {entry.get('pod')}, failed were {pods}")

    expected = ExpectedRecovery(
        causes=NODE_LOST,
        rungs=SPARE_OR_REPLACE,
        max_interruptions=2,
        check_last_entry=names_failed_pod,
        timeout_seconds=120,
        max_steps_lost=max_steps_lost,
    )
    try:
        return run.measure_recovery(power_off_both, expected, note=" and ".join(nodes), pause=1.0)
    finally:
        for node in nodes:
            run.env.replace_node(node)


def _cordoned_idle_nodes(run: Run) -> AbstractContextManager[None]:
    idle = set(run.env.cluster.worker_nodes()) - {member["nodeName"] for member in run.target.members()}
    return run.env.cluster.cordon_nodes(*idle)


def _shrink(run: Run, node: str, **expected_membership: int) -> RunResult:
    """Power a node off that cannot be replaced, and expect this membership."""

    def has_shrunk(findings: Findings, _: Json) -> bool:
        membership = run.target.status()["membership"]
        actual = {name: membership[name] for name in expected_membership}
        sentence = f"the job trains with {actual}, expected {expected_membership}"
        return findings.expect(actual == expected_membership, sentence)

    expected = expect_node_lost(node, rungs=frozenset({"Shrink"}), pods_joined=None, check_last_entry=has_shrunk)
    note = f"{node}, then {expected_membership['size']} nodes"
    return run.measure_recovery(lambda: run.env.cluster.power_off(node), expected, note=note)


def _fail_without_capacity(run: Run) -> RunResult:
    env, target = run.env, run.target
    node = run.random_member()["nodeName"]
    if env.move_operator_off(node):
        target.wait_until_stable()
    with _cordoned_idle_nodes(run):
        try:
            result = _shrink(run, node, size=env.size - 1)
        finally:
            env.replace_node(node)
    target.wait_until(lambda: target.size() == env.size, "growth to the full size", 90)
    return result


def _shrink_to_uneven_sizes(run: Run) -> RunResult:
    target, results, failed = run.target, list[RunResult](), list[str]()
    with _cordoned_idle_nodes(run):
        try:
            for size, passes in ((3, 3), (2, 4)):
                node = run.random_member()["nodeName"]
                if run.env.move_operator_off(node):
                    target.wait_for_step(target.newest_step() + 2)
                failed.append(node)
                results.append(_shrink(run, node, size=size, passes=passes))
        finally:
            for node in failed:
                run.env.replace_node(node)
    target.wait_until(lambda: target.size() == 4, "growth to the full size", 90)
    slowest = max(results, key=lambda result: result.recovery_seconds or 0.0)
    return replace(slowest, deviations=tuple(text for result in results for text in result.deviations))


def _require_four_nodes(env: FaultEnvironment) -> None:
    if len(env.cluster.worker_nodes()) < 4:
        raise RowSkippedError("four nodes are needed")


def _require_partitions(env: FaultEnvironment) -> None:
    if not env.local and not {"cutOff", "mend"} <= env.cluster.settings.keys():
        raise RowSkippedError("the cluster's settings have no cutOff and mend commands")


def _partition_node(run: Run) -> RunResult:
    target = run.target
    member = run.random_member()
    node, pod = member["nodeName"], member["podName"]

    def names_node(findings: Findings, last: Json) -> bool:
        named = (last["cause"], last.get("pod"), last.get("node"))
        blame_correct = findings.expect(named == ("NodeLost", pod, node), f"the last entry names {named}")
        return findings.expect(last["rung"] in SPARE_OR_REPLACE, f"the last rung is {last['rung']}") and blame_correct

    # New sockets behind the partition work until they are found (0.02 s), so some heartbeats of the node arrive.
    # Until the node is silent, the agents may restart in place.
    expected = replace(
        expect_node_lost(node),
        causes=NODE_LOST | {"Hang"},
        rungs=SPARE_OR_REPLACE | {"InPlace"},
        node=None,
        max_interruptions=5,
        check_last_entry=names_node,
    )
    try:
        result = run.measure_recovery(lambda: run.env.partition(node), expected, note=node)
    finally:
        run.env.partition(node, on=False)
    target.wait_for_step(target.newest_step() + 10)
    findings = Findings(list(result.deviations))
    findings.expect(member["podUid"] not in target.member_uids(), "the worker behind the partition is a member again")
    run.env.replace_node(node)
    return replace(result, deviations=tuple(findings.deviations))


def _is_frozen(run: Run) -> bool:
    return bool(run.target.condition("NodesHealthy").get("reason") == "NodeActionsFrozen")


def _report_many_nodes(run: Run) -> RunResult:
    """Report nearly half of the fleet as unhealthy: the circuit breaker allows actions on a fifth of it."""
    env, target, rng = run.env, run.target, run.rng
    nodes = env.cluster.worker_nodes()
    members = [member["nodeName"] for member in target.members()]
    bad = [*rng.sample(members, 2), rng.choice([node for node in nodes if node not in members])]
    rng.shuffle(bad)
    # The operator may act on a node of the previous run that was the only bad one for a moment.
    target.wait_until(lambda: target.condition("NodesHealthy").get("reason") == "NodesHealthy", "healthy nodes", 30)
    target.wait_until_stable(5)
    before, start, reported_at = run.snapshot(), target.newest_step(), time.time()
    names = {pod["metadata"]["uid"]: pod["spec"].get("nodeName", "") for pod in target.pods()}
    for node in bad:
        env.set_unhealthy(node)
    findings = Findings()
    try:
        target.wait_until(lambda: _is_frozen(run), "condition of the circuit breaker", 30)
        detection_seconds = time.time() - reported_at
        time.sleep(8)
        target.wait_for_step(start + 20)
        left = before.pod_uids - {pod["metadata"]["uid"] for pod in target.pods()}
        allowed = max(1, int(len(nodes) * 0.2))
        if not findings.expect(len(left) <= allowed, f"{len(left)} pods were replaced, allowed are {allowed}"):
            findings.deviations += [f"{e['cause']}/{e['rung']} {e['pod']} {e['node']}" for e in target.history()[-3:]]
        findings.expect(not env.cordoned(), f"nodes were cordoned: {env.cordoned()}")
    finally:
        for node in bad:
            env.set_unhealthy(node, on=False)
    target.wait_until(lambda: not _is_frozen(run), "end of the alarm", 30)
    note = f"bad {', '.join(bad)}; left {', '.join(sorted(names[uid] for uid in left)) or 'none'}"
    return run.result(
        findings,
        detection_seconds=round(detection_seconds, 3),
        steps_lost=0,
        blame_correct=not findings.deviations,
        note=note,
    )


ROWS = (
    Row(
        number=5,
        fault="node loses its power or hangs, not yet NotReady",
        injected="the node's processes killed (7 of 10) or frozen (3 of 10), without a change in the API",
        expected="the spare is active before the node is NotReady; at most 1 step lost; the node suspected",
        checked="history: NodeLost, Spare or Replace, that pod and node, suspected; detected within 40 s; curve",
        run_once=_fail_node,
        spares=2,
    ),
    Row(
        number=6,
        fault="kernel line of an SRAM, HBM, NeuronCore or DMA error",
        injected="`NEURON_HW_ERR=...` in the kernel log that the agent reads",
        expected="the rank goes to the spare, the node is suspected; 0 or 1 step lost",
        checked="history: Device, Spare or Replace, that pod and node; curve",
        run_once=_write_kernel_line,
        spares=2,
        variables={"TRAINIUM_KERNEL_LOG": KERNEL_LOG},
    ),
    Row(
        number=15,
        fault="two nodes at once, their memory lost too",
        injected="two of three nodes of a fully sharded job lose their power (no copies on buddies yet)",
        expected="resumes from the newest committed checkpoint (one each 10 steps); at most 20 steps lost",
        checked="history: NodeLost, Spare or Replace, one of the two named; curve within 1e-5 of the replicated one",
        run_once=lambda run: _fail_two_nodes(run, max_steps_lost=20),
        require=FaultEnvironment.require_full_size,
        spares=2,
        spec="trainer: {dataParallel: FullySharded}\ncheckpoint: {durable: {everySteps: 10}}",
        tolerance=1e-5,
        max_runs=5,
    ),
    Row(
        number=16,
        fault="two nodes at once, a copy survives",
        injected="two of three nodes of a replicated job lose their power: the third holds the whole state",
        expected="resumes from its memory; at most 1 step lost",
        checked="history: NodeLost, Spare or Replace, one of the two named; curve",
        run_once=lambda run: _fail_two_nodes(run, max_steps_lost=1),
        require=FaultEnvironment.require_full_size,
        spares=2,
        max_runs=10,
    ),
    Row(
        number=17,
        fault="no spare, no capacity",
        injected="idle nodes cordoned, a member's node loses its power; capacity returns afterwards",
        expected="shrinks to 2 of 3 after `rescaleAfterSeconds` (3 here), grows back; at most 1 step lost",
        checked="history: NodeLost, Shrink, that node; size 2, later 3; curve within 1e-5; samples",
        run_once=_fail_without_capacity,
        spares=0,
        spec="workers: {minReplicas: 1}\nrecovery: {rescaleAfterSeconds: 3}",
        tolerance=1e-5,
        max_runs=5,
    ),
    Row(
        number=17,
        part="b",
        fault="no spare, the batch is not divisible",
        injected="4 nodes, global batch 8: two nodes lose their power one after the other; both return later",
        expected="4 -> 3 -> 2 -> 4 nodes with 2, 3, 4 and 2 passes a step; at most 1 step lost each time",
        checked="history: NodeLost, Shrink, that node; sizes and passes; curve within 1e-5; samples",
        run_once=_shrink_to_uneven_sizes,
        require=_require_four_nodes,
        spares=0,
        spec=(
            "workers: {replicas: 4, minReplicas: 2}\nrecovery: {rescaleAfterSeconds: 3}\n"
            f"trainer: {{batch: {{globalSize: {UNEVEN_BATCH}, microSize: 1}}}}"
        ),
        tolerance=1e-5,
        batch=UNEVEN_BATCH,
        max_runs=3,
    ),
    Row(
        number=24,
        fault="host of the rendezvous store lost",
        injected="as row 5, always the node of rank 0, which hosts the store",
        expected="another host is chosen; at most 1 step lost",
        checked="as row 5",
        run_once=_fail_store_host,
        spares=2,
        max_runs=10,
    ),
    Row(
        number=28,
        fault="workers cut off from API server and operator",
        injected="a node is cut off from the API and its peers, and reconnected after the recovery",
        expected="when the node is NotReady at the latest, the spare has its rank; before, restarts in place",
        checked="history: last NodeLost, that pod and node; its worker is no member afterwards; curve, samples",
        run_once=_partition_node,
        require=_require_partitions,
        spares=2,
        max_runs=3,
    ),
    Row(
        number=31,
        fault="failure storm: three of seven nodes bad at once",
        injected="NeuronHealth=True on three of seven nodes, two of them with a member",
        expected="the circuit breaker opens: in the status, at most a fifth of the nodes (1) is left, none cordoned",
        checked="condition NodesHealthy (its reason, as detection); uids; nodes; curve",
        run_once=_report_many_nodes,
        require=FaultEnvironment.require_full_size,
        spares=2,
        max_runs=5,
    ),
)
