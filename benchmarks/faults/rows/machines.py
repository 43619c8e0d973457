"""Define the rows about the choice of nodes: machines that fail repeatedly, and topology domains."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.faults.environment import FaultEnvironment
from benchmarks.faults.record import FaultRun, Findings
from benchmarks.faults.recovery import Run, expect_node_lost
from benchmarks.faults.row import Row
from tests.testing.cluster.installed import NAMESPACE, RELEASE
from trainium_operator.cluster.fleet.fleet_record import decode, encode

if TYPE_CHECKING:
    from trainium_operator.plan.fleet.memory import Machine

MEMORY = f"/api/v1/namespaces/{NAMESPACE}/configmaps/{RELEASE}-quarantine"
HOUR = 3600.0
FAULTS_OF_A_REPEAT_OFFENDER = 3
LAYERS = tuple(f"topology.k8s.aws/network-node-layer-{number}" for number in (1, 2))
NEAR, FAR = "domain-near", "domain-far"


def _machine(run: Run, node: str) -> Machine | None:
    record = run.env.api.find(MEMORY) or {}
    machines = decode(record.get("data") or {}).machines.values()
    return next((entry for entry in machines if entry.node == node), None)


def _age_failures(run: Run) -> None:
    """Move all recorded strikes back by an hour, because strikes within ten minutes count as one fault."""
    memory = decode(run.env.api.get(MEMORY)["data"])
    machines = {
        name: replace(
            entry,
            judged=entry.judged - HOUR,
            strikes=tuple(replace(strike, at=strike.at - HOUR) for strike in entry.strikes),
        )
        for name, entry in memory.machines.items()
    }
    run.env.api.patch(MEMORY, {"data": encode(replace(memory, machines=machines))})


def _repeat_offender(run: Run) -> FaultRun:
    env, target = run.env, run.target
    member = run.random_member()
    node = member["nodeName"]
    results = []
    try:
        for fault in range(1, FAULTS_OF_A_REPEAT_OFFENDER + 1):
            if fault == 1:
                expect = expect_node_lost(node, causes=frozenset(), pod=member["podName"], steps_lost=1)
                results.append(run.inject(lambda: env.set_unhealthy(node), expect, note=node))
            else:
                _age_failures(run)
                env.set_unhealthy(node)

            def is_recorded(fault: int = fault) -> bool:
                entry = _machine(run, node)
                return entry is not None and len(entry.strikes) == fault

            target.until(is_recorded, f"strike {fault} of {node}", 30)
            if fault < FAULTS_OF_A_REPEAT_OFFENDER:
                env.set_unhealthy(node, bad=False)
                target.until(lambda: not (_machine(run, node) or member).reported, "healthy node", 30)  # type: ignore[union-attr]
        found = Findings(list(results[0].deviations))
        target.until(lambda: (entry := _machine(run, node)) and entry.state == "Permanent", "permanent quarantine", 30)
        env.set_unhealthy(node, bad=False)
        names = {pod["metadata"]["name"] for pod in target.pods()}
        target.delete_pod(run.random_member()["podName"], force=True)

        def created() -> list[dict[str, object]]:
            return [pod for pod in target.pods() if pod["metadata"]["name"] not in names]

        affinity = json.dumps(target.until(created, "new pod", 60)[0]["spec"].get("affinity") or {})
        found.expect(node in affinity, f"a new pod may go to {node}, which is in quarantine")
        target.until_stable()
        found.expect(node not in [each["nodeName"] for each in target.members()], f"a rank is on {node}")
        return replace(results[0], deviations=tuple(found.deviations))
    finally:
        env.set_unhealthy(node, bad=False)
        env.release_nodes()


def _stay_in_domain(run: Run) -> FaultRun:
    """Label the nodes as two domains, start in one of them, and fail a node while the other one has idle nodes."""
    env, target = run.env, run.target
    nodes = env.site.worker_nodes()
    near, far = nodes[:-2], nodes[-2:]
    for number, node in enumerate(nodes):
        labels = (NEAR if node in near else FAR, f"switch-{number % 2}")
        env.api.patch(f"/api/v1/nodes/{node}", {"metadata": {"labels": dict(zip(LAYERS, labels, strict=True))}})
    try:
        with env.site.cordoned(*far):
            time.sleep(2)  # until the operator has seen the labels
            target.patch({"spec": {"suspend": False}})
            target.until_stable(3, seconds=120)
        switch = {node: number % 2 for number, node in enumerate(nodes)}
        ranks = [switch[member["nodeName"]] for member in target.members()]
        found = Findings()
        found.expect(ranks == sorted(ranks) or ranks == sorted(ranks, reverse=True), f"ranks are on switches {ranks}")
        member = run.random_member()
        node = member["nodeName"]
        if env.move_operator_off(node):
            target.until_stable()
        result = run.inject(
            lambda: env.site.power_off(node), expect_node_lost(node, pod=member["podName"]), note=f"{node} of {NEAR}"
        )
        target.until_stable()
        used = {pod["spec"].get("nodeName", "") for pod in target.pods()}
        found.expect(used <= {*near, ""}, f"workers are on {', '.join(sorted(used - {*near}))} of {FAR}")
        env.replace_node(node)
        return replace(result, deviations=(*result.deviations, *found.deviations))
    finally:
        for node in env.site.worker_nodes():
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
