"""Disturbed jobs have the losses of an undisturbed one, and their history names the faults."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.testing.cluster.jobs import curves_agree
from trainium_devcluster.jobs.metrics import has_every_sample_once, has_every_sample_once_in_batches

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.testing.cluster.jobs import Job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

# More steps than any machine does before a pod of a later size is warm at last: the test ends the job.
ENDLESS = "trainer: {steps: 100000}"
# A job that may be smaller but begins at its full size, however slowly its nodes start.
ELASTIC = f"workers: {{replicas: 3, minReplicas: 1}}\nrecovery: {{rescaleAfterSeconds: 60}}\n{ENDLESS}"


def test_a_restart_in_place_keeps_the_loss_curve_bit_for_bit(
    new_job: Callable[..., Job], reference: dict[int, float]
) -> None:
    job = new_job()
    job.wait_for_step(10)
    before = job.list_uids()

    job.kill_rank(1)
    entry = job.wait_for_recovery()

    assert entry["response"] == "InPlace"
    assert entry["stepsLost"] <= 1
    assert entry["podsReplaced"] == 0
    assert job.list_uids() == before
    job.wait_for_phase("Completed")
    assert job.read_losses() == reference
    assert has_every_sample_once(job.folder, 60, 12)


def test_a_spare_keeps_the_loss_curve_bit_for_bit(new_job: Callable[..., Job], reference: dict[int, float]) -> None:
    job = new_job(change="workers: {spares: 1}")
    job.wait_until("a warm spare", lambda status: status.get("spares") == 1 and job.log.newest >= 5)
    lost = job.list_members()[1]

    with job.cluster.without_power(lost["nodeName"]):
        entry = job.wait_for_recovery()
        assert entry["response"] == "Spare"
        assert entry["node"] == lost["nodeName"]
        assert entry["stepsLost"] <= 1, "replicated state survives on the other node"
        assert lost["podUid"] not in {member["podUid"] for member in job.list_members()}
        job.wait_for_phase("Completed")
    assert job.read_losses() == reference


def test_a_job_shrinks_without_capacity_and_grows_back(
    new_job: Callable[..., Job], reference: dict[int, float]
) -> None:
    job = new_job(change="workers: {replicas: 3, minReplicas: 1}")
    if len(job.cluster.worker_nodes()) < 4:
        pytest.skip("needs a cluster of 4 nodes")
    job.wait_for_step(5)
    idle = set(job.cluster.worker_nodes()) - {member["nodeName"] for member in job.list_members()}
    with job.cluster.cordon_nodes(*idle), job.cluster.without_power(job.list_members()[-1]["nodeName"]):
        job.wait_until("a smaller size", lambda status: status["membership"]["size"] == 2)
        assert job.wait_for_recovery()["response"] == "Shrink"
    job.wait_until(
        "the full size again", lambda status: status["membership"]["size"] == 3 or status["phase"] == "Completed", 60
    )
    job.wait_for_phase("Completed")
    assert curves_agree(job.read_losses(), reference, 1e-5)
    assert has_every_sample_once(job.folder, 60, 12)


@pytest.mark.long
def test_a_tolerance_changes_the_batch_and_skips_no_sample(
    new_job: Callable[..., Job],
) -> None:
    """4 -> 3 -> 4 nodes at 8, 9 and 8 samples a step."""
    batch = "trainer: {steps: 100000, batch: {globalSize: 8, tolerance: 0.13}}"
    job = new_job(change=f"workers: {{replicas: 4, minReplicas: 2}}\nrecovery: {{rescaleAfterSeconds: 5}}\n{batch}")
    nodes = job.cluster.worker_nodes()
    if len(nodes) < 4:
        pytest.skip("needs a cluster of 4 nodes")
    seen = [_wait_for_size(job, 4)]
    idle = set(nodes) - {member["nodeName"] for member in job.list_members()}
    with job.cluster.cordon_nodes(*idle), job.cluster.without_power(job.list_members()[-1]["nodeName"]):
        seen.append(_wait_for_size(job, 3))
        assert job.read_status()["membership"]["batch"] == 9
    seen.append(_wait_for_size(job, 4))
    job.suspend()
    job.wait_for_phase("Suspended")

    assert seen == [(2, 1.0), (3, 0.75), (2, 1.0)], "passes of a step and share of the full speed"
    losses = job.read_losses()
    assert sorted(losses) == list(range(1, max(losses) + 1))
    records = job.log.steps
    batches = {step: records[step]["batch"] for step in losses}
    assert set(batches.values()) == {8, 9}
    assert records[max(losses)]["samples"] == sum(batches.values())
    assert has_every_sample_once_in_batches(job.folder, batches)
    assert all(entry["stepsLost"] <= 1 for entry in job.read_history())


def _wait_for_size(job: Job, size: int) -> tuple[int, float]:
    """Return the status of the job after a few steps at this size."""
    status = job.wait_until(
        f"training on {size} nodes",
        lambda status: status.get("membership", {}).get("size") == size and status.get("phase") == "Running",
        120,
    )
    job.wait_for_step(status["progress"]["step"] + 5)
    membership = status["membership"]
    return membership["passes"], membership["speed"]


@pytest.mark.long
def test_a_resize_loses_no_step_and_keeps_the_curve(new_job: Callable[..., Job]) -> None:
    job = new_job(change=ELASTIC)
    job.wait_for_step(8)

    job.scale(2)
    smaller = job.wait_for_recovery(1)
    job.wait_for_step(smaller["resumeStep"] + 5)
    job.scale(3)
    larger = job.wait_for_recovery(2)

    assert (smaller["stepsLost"], larger["stepsLost"]) == (0, 0)
    job.wait_for_step(larger["resumeStep"] + 5)
    job.suspend()
    status = job.wait_for_phase("Suspended")
    assert status["restarts"]["total"] == 0, "a resize is no failure"
    losses = job.read_losses()
    assert has_every_sample_once(job.folder, max(losses), 12)

    uninterrupted_run = new_job("undisturbed", change=ENDLESS)
    uninterrupted_run.wait_for_step(max(losses))
    assert curves_agree(
        losses, {step: loss for step, loss in uninterrupted_run.read_losses().items() if step in losses}, 1e-5
    )


@pytest.mark.long
def test_an_illegal_size_is_rounded_down(new_job: Callable[..., Job]) -> None:
    even = "trainer: {batch: {globalSize: 9}}\nelasticity: {sizes: Even}"
    job = new_job(change=f"workers: {{replicas: 3, minReplicas: 1, maxReplicas: 9}}\n{even}")
    job.wait_for_step(3)

    job.scale(2)
    status = job.wait_until("a legal size", lambda status: status["membership"]["size"] == 1)

    legal = next(condition for condition in status["conditions"] if condition["type"] == "SizeLegal")
    assert legal["status"] == "False"
    assert "2" in legal["message"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_stages_of_a_recovery_add_up(new_job: Callable[..., Job]) -> None:
    job = new_job()
    job.wait_for_step(10, 150)
    job.kill_rank(1)
    stages = job.wait_for_recovery()["stages"]
    # A load that is over at the agent's next look at the ranks counts as a part of the restart.
    assert stages["restart"] + stages["load"] > 0, "the processes are started again, and load"
    assert stages["decide"] == 0, "a restart in place needs no decision"
    job.wait_for_phase("Completed")
    goodput = job.read_status()["goodput"]
    lost = sum(goodput["lostSeconds"].values())
    assert goodput["productiveSeconds"] + lost == pytest.approx(goodput["wallSeconds"], abs=0.05)
    assert sum(goodput["lostByStage"].values()) == pytest.approx(lost, abs=0.05)
    assert sum(size["steps"] for size in goodput["sizes"]) == 60
    assert 0 < goodput["ratio"] <= goodput["uptimeRatio"] <= 1
