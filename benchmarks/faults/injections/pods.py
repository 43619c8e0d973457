"""Inject faults into pods: deleted, evicted, on a node with a notice, asked to end, or lost while they take over."""

from __future__ import annotations

import signal
import time
from functools import partial
from typing import TYPE_CHECKING

from tests.testing.cluster.installed import second_release

if TYPE_CHECKING:
    from benchmarks.faults.recovery import Json, Run

_NOTICES = (
    "aws-node-termination-handler/spot-itn",
    "aws-node-termination-handler/scheduled-maintenance",
    "karpenter.sh/disrupted",
)
_EVICTION = 'Usage of EmptyDir volume "scratch" exceeds the limit "1Gi". '


def delete_or_evict_pod(run: Run) -> None:
    """Delete a member with its grace period or by force, or evict it."""
    method = run.rng.choice(("delete", "evict", "delete by force"))
    victim = run.choose_member()
    pod, forced = victim["podName"], method == "delete by force"
    changes = {} if forced else {"causes": ("Preempted",), "steps_lost": 0}
    action = partial(run.target.evict, pod) if method == "evict" else partial(run.target.delete_pod, pod, force=forced)
    run.measure(action, victim, note=f"{method} {pod}", **changes)


def kill_agent(run: Run) -> None:
    """Kill the main process of a member."""
    victim = run.choose_member()
    run.measure(partial(run.env.kill_agent, run.target.namespace, victim), victim)


def terminate_agents(run: Run) -> None:
    """Send SIGTERM to one agent or to all, whose pods nobody deletes."""
    seconds_apart = run.rng.choice((None, 0.0, 1.6))
    members = [run.choose_member()] if seconds_apart is None else run.target.list_members()

    def terminate(member: Json) -> None:
        run.env.kill_agent(run.target.namespace, member, signal.SIGTERM)

    note = f"one of them, {members[0]['podName']}" if seconds_apart is None else f"all, {seconds_apart:g} s apart"
    # Steps count as completed until the first signal: the job may train again before the second.
    fault = run.inject(partial(terminate, members[0]))
    for member in members[1:]:
        time.sleep(seconds_apart or 0.0)
        terminate(member)
    run.follow(fault, *members, note=note)


def announce_termination(run: Run) -> None:
    """Taint a member's node, as a termination handler does."""
    key, victim = run.rng.choice(_NOTICES), run.choose_member()
    node, cluster = victim["nodeName"], run.env.cluster
    taint = partial(cluster.kubectl, "taint", "node", node, f"{key}=fault-table:NoSchedule", "--overwrite")
    try:
        run.measure(taint, victim, note=f"{key} on {node}")
    finally:
        cluster.run("kubectl", "taint", "node", node, f"{key}-")


def delete_activated_spare(run: Run) -> None:
    """Delete a member, and the spare that takes its rank as soon as it is a member."""
    target = run.target
    target.wait_until("two ready spares", lambda status: status.get("spares", 0) >= 2, 120)
    members = {member["podUid"] for member in target.list_members()}
    fault, victim = run.delete_member()

    def list_joined_pods() -> list[str]:
        return [member["podName"] for member in target.list_members() if member["podUid"] not in members]

    spare = target.wait_for("a spare among the members", list_joined_pods, 30)[0]
    time.sleep(run.rng.uniform(0.0, 0.3))
    target.delete_pod(spare, force=True)
    run.follow(fault, victim, note=f"{victim['podName']}, then the spare {spare}")


def delete_pod_beside_second_release(run: Run) -> None:
    """Delete a member while a second release of the chart serves the same namespaces."""
    with second_release(run.env.cluster):
        fault, victim = run.delete_member()
        run.follow(fault, victim)


def delete_pod_while_annotations_are_removed(run: Run) -> None:
    """Delete a member while a policy removes annotations."""
    with run.target.removed_annotations():
        fault, victim = run.delete_member()
        run.follow(fault, victim)


def delete_pod_while_statuses_are_refused(run: Run) -> None:
    """Delete a member while a policy refuses statuses; training must resume before it ends."""
    with run.target.refused_statuses():
        fault, victim = run.delete_member()
        run.target.wait_for_step(fault.completed_step + 10, 60)
    run.follow(fault, victim)


def evict_for_own_limit(run: Run) -> None:
    """Write the status of a member that exceeded its own limit."""
    victim = run.choose_member()
    run.measure(partial(run.target.write_eviction, victim["podName"], _EVICTION), victim)


def resize_during_recovery(run: Run) -> None:
    """Delete a member, and request another size during the recovery; then the previous one."""
    target, size = run.target, run.env.size
    fault, victim = run.delete_member()
    time.sleep(run.rng.uniform(0.0, 1.0))
    target.scale(size - 1)
    try:
        run.follow(fault, victim, note=f"{victim['podName']}, then {size - 1} nodes")
        target.wait_for("requested size", lambda: target.read_size() == size - 1, 60)
    finally:
        target.scale(size)
    target.wait_for("previous size", lambda: target.read_size() == size, 90)


def delete_job_during_recovery(run: Run) -> None:
    """Delete a member, and the job during the recovery: nothing of it may remain."""
    target, cluster = run.target, run.env.cluster
    target.delete_pod(run.rng.choice(target.list_members())["podName"], force=True)
    time.sleep(run.rng.uniform(0.0, 1.5))
    deleted_at = time.time()
    target.delete()
    target.wait_for("deletion of its pods", lambda: not target.list_pods(), 60)
    run.result.recovery_seconds = round(time.time() - deleted_at, 3)
    time.sleep(1)  # the garbage collector also removes other objects
    remaining = cluster.get("configmaps,services,poddisruptionbudgets,secrets", "-n", target.namespace)["items"]
    names = [item["metadata"]["name"] for item in remaining if item["metadata"]["name"].startswith(target.name)]
    run.expect(not names, f"not deleted: {', '.join(names)}")
