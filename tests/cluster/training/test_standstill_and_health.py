"""Faults that no process ends by: a rank that stalls, and a node that is reported broken."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.testing.cluster.jobs import Job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.mark.long
def test_a_process_that_stalls_is_found_blamed_and_restarted_in_place(
    new_job: Callable[..., Job], reference: dict[int, float]
) -> None:
    job = new_job(change="recovery: {hang: {stepFloorSeconds: 3}}")
    job.until_step(10)
    before = job.uids()

    # A stop signal: the process lives, its connections stay, and its peer waits in a collective.
    victim = job.stop_rank(1)
    entry = job.until_recovered()

    assert (entry["cause"], entry["rung"], entry["pod"]) == ("Hang", "InPlace", victim)
    assert entry["stepsLost"] <= 1
    assert job.uids() == before
    assert "stack" in job.site.kubectl("logs", "-n", job.namespace, victim).lower()
    job.until_phase("Completed")
    assert job.losses() == reference


@pytest.mark.long
def test_a_rank_leaves_a_node_whose_device_is_reported_broken_and_loses_no_step(new_job: Callable[..., Job]) -> None:
    job = new_job(change="workers: {spares: 1}\ntrainer: {steps: 100000}")
    if job.site.cluster is None:
        pytest.skip("conditions are set by the development cluster's nodes")
    faults = job.site.cluster.faults
    job.until("a warm spare", lambda status: status.get("spares") == 1 and job.log.newest >= 5)
    victim = job.members()[0]
    node = victim["nodeName"]

    faults.set_condition(node, "NeuronHealth", "True", "NeuronHasError_HBM_UNCORRECTABLE_ERROR")
    try:
        entry = job.until_recovered()

        assert (entry["cause"], entry["rung"], entry["node"]) == ("Device", "Spare", node)
        assert entry["stepsLost"] == 0, "the node still answers, so all save before the rank moves"
        assert node not in {member["nodeName"] for member in job.members()}
        assert any(failure["node"] == node for failure in job.status()["failures"])
    finally:
        faults.clear_condition(node, "NeuronHealth")
