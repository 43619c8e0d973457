"""A job takes idle nodes, and returns them to other jobs by a real scheduler: no lost step, no wait."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.cluster.jobs import curves_agree
from tests.testing.cluster.shared_cluster import DEVICES
from trainium_devcluster.jobs.metrics import has_every_sample_once

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.testing.cluster.jobs import Job
    from tests.testing.cluster.shared_cluster import SharedCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500)]

# Each worker takes all devices of a node, so that two jobs cannot share one.
WHOLE_NODES = f"accelerator: {{device: cpu, resources: {json.dumps(DEVICES)}}}"
TAKES = f"""
workers: {{replicas: 2, maxReplicas: 4, {WHOLE_NODES}}}
elasticity: {{idleNodes: Take}}
trainer: {{steps: 100000}}
"""


def has_size(size: int, generation: int = 0) -> Callable[[dict[str, Any]], bool]:
    def is_reached(status: dict[str, Any]) -> bool:
        membership = status.get("membership", {})
        return (
            status.get("phase") == "Running"
            and membership.get("size") == size
            and membership.get("generation", 0) > generation
        )

    return is_reached


@pytest.mark.long
def test_idle_nodes_are_used_and_released_without_a_lost_step(
    operator: SharedCluster, new_job: Callable[..., Job]
) -> None:
    nodes = [node["status"]["allocatable"] for node in operator.get("nodes")["items"]]
    if sum(DEVICES.items() <= allocatable.items() for allocatable in nodes) != 5:
        pytest.skip("needs a cluster of five nodes with 16 devices each")
    job = new_job(change=TAKES)
    grown = job.wait_until("growth onto idle nodes", has_size(4))
    assert grown["idleNodes"]["taken"] == 2
    extras = [pod for pod in job.list_pods() if "trainium.dev/extra" in pod["metadata"]["labels"]]
    assert [pod["spec"]["priority"] for pod in extras] == [-10, -10]
    job.wait_for_step(job.log.newest + 5)

    other = new_job("other", change=f"workers: {{replicas: 3, {WHOLE_NODES}}}\ntrainer: {{steps: 100000}}")
    other.wait_until("the other job on three nodes", has_size(3))
    shrunk = job.wait_until("the size that was asked for", has_size(2))
    assert shrunk["restarts"]["byCause"].keys() <= {"Preempted"}
    assert not shrunk.get("failures"), "it is no failure"
    job.wait_for_step(job.log.newest + 5)

    other.delete()
    job.wait_until("growth onto nodes that are idle again", has_size(4, shrunk["membership"]["generation"]))
    job.wait_for_step(job.log.newest + 5)

    status = job.read_status()
    entries = [(entry["response"], entry["cause"]) for entry in status["history"]]
    assert entries[0] == ("Grow", "Capacity") == entries[-1], entries
    assert [entry.get("stepsLost") for entry in status["history"]] == [0] * len(entries), entries
    job.suspend()
    job.wait_for_phase("Suspended")
    losses = job.read_losses()
    assert has_every_sample_once(job.folder, max(losses), 12)
    uninterrupted_run = new_job("undisturbed", change="trainer: {steps: 100000}")
    uninterrupted_run.wait_for_step(max(losses), seconds=600)
    assert curves_agree(
        losses, {step: loss for step, loss in uninterrupted_run.read_losses().items() if step in losses}, 1e-5
    )
