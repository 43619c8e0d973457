"""Inject faults that decide the choice of nodes: a machine that fails repeatedly, and topology domains."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tests.testing.cluster.installed import NAMESPACE, RELEASE
from trainium_operator.cluster.fleet.fleet_record import decode, encode

if TYPE_CHECKING:
    from benchmarks.faults.recovery import Run
    from trainium_operator.plan.fleet.memory import Machine

_QUARANTINE = f"/api/v1/namespaces/{NAMESPACE}/configmaps/{RELEASE}-quarantine"
_HOUR_SECONDS = 3600.0
_FAULTS_UNTIL_QUARANTINE = 3
_LAYERS = tuple(f"topology.k8s.aws/network-node-layer-{number}" for number in (1, 2))


def _read_machine_record(run: Run, node: str) -> Machine | None:
    record = run.env.cluster.api.find(_QUARANTINE) or {}
    machines = decode(record.get("data") or {}).machines.values()
    return next((entry for entry in machines if entry.node == node), None)


def _age_failures(run: Run) -> None:
    """Move all recorded strikes back by an hour, because strikes within ten minutes count as one fault."""
    memory = decode(run.env.cluster.api.get(_QUARANTINE)["data"])
    machines = {
        name: replace(
            entry,
            judged=entry.judged - _HOUR_SECONDS,
            strikes=tuple(replace(strike, at=strike.at - _HOUR_SECONDS) for strike in entry.strikes),
        )
        for name, entry in memory.machines.items()
    }
    run.env.cluster.api.patch(_QUARANTINE, {"data": encode(replace(memory, machines=machines))})


def report_node_repeatedly(run: Run) -> None:
    """Report a member's node three times in a day: the machine must be in quarantine for good."""
    env, target, victim = run.env, run.target, run.choose_member()
    node = victim["nodeName"]

    def has_strikes(count: int) -> bool:
        entry = _read_machine_record(run, node)
        return entry is not None and len(entry.strikes) == count

    def is_healthy() -> bool:
        entry = _read_machine_record(run, node)
        return entry is not None and not entry.reported

    def is_in_quarantine() -> bool:
        entry = _read_machine_record(run, node)
        return entry is not None and entry.state == "Permanent"

    try:
        for fault in range(1, _FAULTS_UNTIL_QUARANTINE + 1):
            if fault == 1:
                run.measure(partial(env.set_unhealthy, node), victim, note=node)
            else:
                _age_failures(run)
                env.set_unhealthy(node)
            target.wait_for(f"strike {fault} of {node}", partial(has_strikes, fault), 30)
            if fault < _FAULTS_UNTIL_QUARANTINE:
                env.set_unhealthy(node, on=False)
                target.wait_for("healthy node", is_healthy, 30)
        target.wait_for("permanent quarantine", is_in_quarantine, 30)
        env.set_unhealthy(node, on=False)
        names = {pod["metadata"]["name"] for pod in target.list_pods()}
        target.delete_pod(run.choose_member()["podName"], force=True)
        new_pods = target.wait_for(
            "new pod", lambda: [pod for pod in target.list_pods() if pod["metadata"]["name"] not in names], 60
        )
        affinity = json.dumps(new_pods[0]["spec"].get("affinity") or {})
        run.expect(node in affinity, f"a new pod may go to {node}, which is in quarantine")
        target.wait_until_stable()
        run.expect(node not in [member["nodeName"] for member in target.list_members()], f"a rank is on {node}")
    finally:
        env.set_unhealthy(node, on=False)
        env.clear_quarantine()


def fail_node_in_domain(run: Run) -> None:
    """Label the nodes as two domains, start in one of them, and fail a node while the other one has idle nodes."""
    env, target = run.env, run.target
    nodes = env.cluster.worker_nodes()
    near, far = nodes[:-2], nodes[-2:]
    switch = {node: number % 2 for number, node in enumerate(nodes)}
    for node in nodes:
        values = (f"domain-{'near' if node in near else 'far'}", f"switch-{switch[node]}")
        labels = dict(zip(_LAYERS, values, strict=True))
        env.cluster.api.patch(f"/api/v1/nodes/{node}", {"metadata": {"labels": labels}})
    try:
        with env.cluster.cordon_nodes(*far):
            time.sleep(2)  # until the operator has seen the labels
            target.suspend(yes=False)
            target.wait_until_stable(3, 120)
        ranks = [switch[member["nodeName"]] for member in target.list_members()]
        run.expect(ranks in (sorted(ranks), sorted(ranks, reverse=True)), f"ranks are on switches {ranks}")
        victim = run.choose_member()
        with run.move_operator_off_node(victim) as node:
            run.measure(partial(env.cluster.power_off, node), victim, note=f"{node} of the near domain")
            target.wait_until_stable()
            used = {pod["spec"].get("nodeName", "") for pod in target.list_pods()}
            outside = sorted(used - {*near, ""})
            run.expect(not outside, f"workers are on {', '.join(outside)} of the far domain")
    finally:
        for node in env.cluster.worker_nodes():
            env.cluster.api.patch(f"/api/v1/nodes/{node}", {"metadata": {"labels": dict.fromkeys(_LAYERS)}})
