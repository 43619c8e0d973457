"""Define the rows about the choice of nodes: machines that fail repeatedly, and topology domains."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.faults.environment import FaultEnvironment
from benchmarks.faults.record import Findings, RunResult
from benchmarks.faults.recovery import Run, expect_node_lost
from benchmarks.faults.row import Row
from tests.testing.cluster.installed import NAMESPACE, RELEASE
from trainium_operator.cluster.fleet.fleet_record import decode, encode

if TYPE_CHECKING:
    from trainium_operator.plan.fleet.memory import Machine

QUARANTINE = f"/api/v1/namespaces/{NAMESPACE}/configmaps/{RELEASE}-quarantine"
HOUR_SECONDS = 3600.0
FAULTS_UNTIL_QUARANTINE = 3
LAYERS = tuple(f"topology.k8s.aws/network-node-layer-{number}" for number in (1, 2))
NEAR, FAR = "domain-near", "domain-far"


def _machine_record(run: Run, node: str) -> Machine | None:
    record = run.env.api.find(QUARANTINE) or {}
    machines = decode(record.get("data") or {}).machines.values()
    return next((entry for entry in machines if entry.node == node), None)


def _age_failures(run: Run) -> None:
    """Move all recorded strikes back by an hour, because strikes within ten minutes count as one fault."""
    memory = decode(run.env.api.get(QUARANTINE)["data"])
    machines = {
        name: replace(
            entry,
            judged=entry.judged - HOUR_SECONDS,
            strikes=tuple(replace(strike, at=strike.at - HOUR_SECONDS) for strike in entry.strikes),
        )
        for name, entry in memory.machines.items()
    }
    run.env.api.patch(QUARANTINE, {"data": encode(replace(memory, machines=machines))})


def _repeat_offender(run: Run) -> RunResult:
    env, target = run.env, run.target
    member = run.random_member()
    node = member["nodeName"]
    results = []
    try:
        for fault in range(1, FAULTS_UNTIL_QUARANTINE + 1):
            if fault == 1:
                expected = expect_node_lost(node, causes=frozenset(), pod=member["podName"])
                results.append(run.measure_recovery(lambda: env.set_unhealthy(node), expected, note=node))
            else:
                _age_failures(run)
                env.set_unhealthy(node)

            def is_recorded(fault: int = fault) -> bool:
                entry = _machine_record(run, node)
                return entry is not None and len(entry.strikes) == fault

            target.wait_until(is_recorded, f"strike {fault} of {node}", 30)
            if fault < FAULTS_UNTIL_QUARANTINE:
                env.set_unhealthy(node, on=False)
                target.wait_until(lambda: not (_machine_record(run, node) or member).reported, "healthy node", 30)  # type: ignore[union-attr]
        findings = Findings(list(results[0].deviations))
        target.wait_until(
            lambda: (entry := _machine_record(run, node)) and entry.state == "Permanent", "permanent quarantine", 30
        )
        env.set_unhealthy(node, on=False)
        names = {pod["metadata"]["name"] for pod in target.pods()}
        target.delete_pod(run.random_member()["podName"], force=True)

        def new_pods() -> list[dict[str, object]]:
            return [pod for pod in target.pods() if pod["metadata"]["name"] not in names]

        affinity = json.dumps(target.wait_until(new_pods, "new pod", 60)[0]["spec"].get("affinity") or {})
        findings.expect(node in affinity, f"a new pod may go to {node}, which is in quarantine")
        target.wait_until_stable()
        findings.expect(node not in [member["nodeName"] for member in target.members()], f"a rank is on {node}")
        return replace(results[0], deviations=tuple(findings.deviations))
    finally:
        env.set_unhealthy(node, on=False)
        env.clear_quarantine()


def _stay_in_domain(run: Run) -> RunResult:
    """Label the nodes as two domains, start in one of them, and fail a node while the other one has idle nodes."""
    env, target = run.env, run.target
    nodes = env.cluster.worker_nodes()
    near, far = nodes[:-2], nodes[-2:]
    for number, node in enumerate(nodes):
        labels = (NEAR if node in near else FAR, f"switch-{number % 2}")
        env.api.patch(f"/api/v1/nodes/{node}", {"metadata": {"labels": dict(zip(LAYERS, labels, strict=True))}})
    try:
        with env.cluster.cordon_nodes(*far):
            time.sleep(2)  # until the operator has seen the labels
            target.patch({"spec": {"suspend": False}})
            target.wait_until_stable(3, seconds=120)
        switch = {node: number % 2 for number, node in enumerate(nodes)}
        ranks = [switch[member["nodeName"]] for member in target.members()]
        findings = Findings()
        findings.expect(
            ranks == sorted(ranks) or ranks == sorted(ranks, reverse=True), f"ranks are on switches {ranks}"
        )
        member = run.random_member()
        node = member["nodeName"]
        if env.move_operator_off(node):
            target.wait_until_stable()
        expected = expect_node_lost(node, pod=member["podName"])
        result = run.measure_recovery(lambda: env.cluster.power_off(node), expected, note=f"{node} of {NEAR}")
        target.wait_until_stable()
        used = {pod["spec"].get("nodeName", "") for pod in target.pods()}
        findings.expect(used <= {*near, ""}, f"workers are on {', '.join(sorted(used - {*near}))} of {FAR}")
        env.replace_node(node)
        return replace(result, deviations=(*result.deviations, *findings.deviations))
    finally:
        for node in env.cluster.worker_nodes():
            env.api.patch(f"/api/v1/nodes/{node}", {"metadata": {"labels": dict.fromkeys(LAYERS)}})


ROWS = (
    Row(
        number=45,
        fault="repeat offender: three faults of one machine in a day",
        injected="NeuronHealth=True on a member's node three times; earlier strikes are dated back by an hour each",
        expected="the rank moves at the first; after the third the machine is in quarantine for good",
        checked="history: that pod and node, Spare or Replace; the fleet's memory; affinity of a new pod; curve",
        run_once=_repeat_offender,
        require=FaultEnvironment.require_full_size,
        spares=2,
        max_runs=5,
    ),
    Row(
        number=46,
        fault="node lost in a topology domain",
        injected="`topology: Required` in one of two labeled domains; a member's node loses its power",
        expected="workers on one switch have adjacent ranks; the new worker stays in the domain",
        checked="as row 5; node labels of all workers, order of ranks",
        run_once=_stay_in_domain,
        require=FaultEnvironment.require_full_size,
        spec="scheduling: {topology: Required}\nsuspend: true",
        job_per_run=True,
        max_runs=5,
    ),
)
