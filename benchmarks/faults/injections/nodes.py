"""Inject faults into nodes: they fail, are partitioned or are reported unhealthy; a new node replaces a faulty one."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from benchmarks.faults.recovery import Run
    from benchmarks.faults.target import Json

_KERNEL_LOG = "/dev/shm/kmsg"
"""A file in a volume of the pod that replaces the node's /dev/kmsg."""
_KERNEL_LINES = tuple(
    f"neuron:nd0: NEURON_HW_ERR={kind} instance-id=i-0 hostname=node nd-id=0 nc-id=1 serial-num=0 action=TERMINATE"
    for kind in ("SRAM_UNCORRECTABLE_ERROR", "NC_UNCORRECTABLE_ERROR", "HBM_UNCORRECTABLE_ERROR", "DMA_ERROR")
)
_MAX_UNHEALTHY_SHARE = 0.2
"""Share of the nodes on which the circuit breaker allows actions."""


def fail_node(run: Run, rank: int | None = None) -> None:
    """Power a node off or let it hang: of a random member, or of one rank."""
    victim = run.choose_member() if rank is None else run.target.list_members()[rank]
    with run.move_operator_off_node(victim) as node:
        hangs = run.env.local and run.rng.random() < 0.3
        fail = run.env.faults.freeze_node if hangs else run.env.cluster.power_off
        note = f"{'hang of' if hangs else 'power off'} {node}, rank {victim['nodeRank']}"
        run.measure(partial(fail, node), victim, note=note)


def write_kernel_line(run: Run) -> None:
    """Write an error of a device to the kernel log that an agent reads."""
    line, victim = run.rng.choice(_KERNEL_LINES), run.choose_member()
    record = f"3,{run.result.run + 1},{int(time.monotonic() * 1e6)},-;{line}"
    script = f"date +%s.%N; echo '{record}' >> {_KERNEL_LOG}"
    with run.move_operator_off_node(victim, keep_operator=True) as node:
        run.measure(
            lambda: float(run.target.run_shell(victim["podName"], script).split()[0]),
            victim,
            note=f"{line[12:50]} on {node}",
        )


def fail_two_nodes(run: Run) -> None:
    """Power off the nodes of two members at once."""
    victims = run.rng.sample(run.target.list_members(), 2)
    time.sleep(run.rng.uniform(0.0, 0.5))
    with ExitStack() as stack:
        nodes = [stack.enter_context(run.move_operator_off_node(victim, keep_operator=True)) for victim in victims]

        def power_off_both() -> None:
            for node in nodes:
                run.env.cluster.power_off(node)

        run.measure(power_off_both, *victims, note=" and ".join(nodes))


def fail_node_without_capacity(run: Run) -> None:
    """Power a node off that cannot be replaced: the job shrinks, and grows once there is capacity."""
    target, size = run.target, run.env.size
    victim = run.choose_member()
    with run.move_operator_off_node(victim), _cordon_idle_nodes(run):
        _shrink(run, victim, size=size - 1)
    target.wait_for("growth to the full size", lambda: target.read_size() == size, 90)


def shrink_to_uneven_sizes(run: Run) -> None:
    """Power two nodes off, one after the other, at sizes that do not divide the batch; then both return."""
    target = run.target
    with _cordon_idle_nodes(run), ExitStack() as stack:
        slowest = 0.0
        for size, passes in ((3, 3), (2, 4)):
            victim = run.choose_member()
            node = victim["nodeName"]
            stack.callback(run.env.replace_node, node)
            if run.env.move_operator_off(node):
                target.wait_for_step(target.read_newest_step() + 2)
            _shrink(run, victim, size=size, passes=passes)
            slowest = max(slowest, run.result.recovery_seconds or 0.0)
        run.result.recovery_seconds = slowest
    target.wait_for("growth to the full size", lambda: target.read_size() == 4, 90)


def _cordon_idle_nodes(run: Run) -> AbstractContextManager[None]:
    idle = set(run.env.cluster.worker_nodes()) - {member["nodeName"] for member in run.target.list_members()}
    return run.env.cluster.cordon_nodes(*idle)


def _shrink(run: Run, victim: Json, **expected: int) -> None:
    """Power the node of a member off, and expect this membership."""
    node = victim["nodeName"]
    run.measure(partial(run.env.cluster.power_off, node), victim, note=f"{node}, then {expected['size']} nodes")
    membership = run.target.read_status()["membership"]
    actual = {name: membership[name] for name in expected}
    run.expect(actual == expected, f"the job trains with {actual}, expected {expected}")


def partition_node(run: Run) -> None:
    """Cut a node off from the API and its peers, and reconnect it after the recovery.

    New sockets behind the partition work until they are found (0.02 s), so some heartbeats of the node arrive. Until
    the node is silent, the agents may restart in place.
    """
    target, victim = run.target, run.choose_member()
    with run.move_operator_off_node(victim, keep_operator=True) as node:
        try:
            run.measure(partial(run.env.partition, node), victim, note=node)
        finally:
            run.env.partition(node, on=False)
        target.wait_for_step(target.read_newest_step() + 10)
        uids = {member["podUid"] for member in target.list_members()}
        run.expect(victim["podUid"] not in uids, "the worker behind the partition is a member again")


def report_many_nodes(run: Run) -> None:
    """Report nearly half of the fleet as unhealthy: the circuit breaker allows actions on a fifth of it."""
    env, target, rng = run.env, run.target, run.rng
    nodes = env.cluster.worker_nodes()
    members = [member["nodeName"] for member in target.list_members()]
    bad = [*rng.sample(members, 2), rng.choice([node for node in nodes if node not in members])]
    rng.shuffle(bad)

    def read_reason() -> str:
        return str(target.find_condition("NodesHealthy").get("reason"))

    # The operator may act on a node of the previous run that was the only bad one for a moment.
    target.wait_for("healthy nodes", lambda: read_reason() == "NodesHealthy", 30)
    target.wait_until_stable(5)
    before, start, reported_at = run.record_state(), target.read_newest_step(), time.time()
    names = {pod["metadata"]["uid"]: pod["spec"].get("nodeName", "") for pod in target.list_pods()}
    for node in bad:
        env.set_unhealthy(node)
    try:
        target.wait_for("condition of the circuit breaker", lambda: read_reason() == "NodeActionsFrozen", 30)
        run.result.detection_seconds = round(time.time() - reported_at, 3)
        time.sleep(8)
        target.wait_for_step(start + 20)
        left = before.pod_uids - target.list_uids()
        allowed = max(1, int(len(nodes) * _MAX_UNHEALTHY_SHARE))
        last = [
            f"{entry['cause']}/{entry['response']} {entry['pod']} {entry['node']}"
            for entry in target.read_history()[-3:]
        ]
        run.expect(len(left) <= allowed, f"{len(left)} pods were replaced, allowed are {allowed}: {'; '.join(last)}")
        run.expect(not env.list_cordoned(), f"nodes were cordoned: {env.list_cordoned()}")
    finally:
        for node in bad:
            env.set_unhealthy(node, on=False)
    target.wait_for("end of the alarm", lambda: read_reason() != "NodeActionsFrozen", 30)
    run.result.steps_lost, run.result.blame_correct = 0, not run.result.deviations
    run.result.note = f"bad {', '.join(bad)}; left {', '.join(sorted(names[uid] for uid in left)) or 'none'}"
