"""An undisturbed job: its files, reports and end."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.testing.suite.timeouts import until
from trainium_devcluster.jobs.metrics import has_every_sample_once
from trainium_trainer.checkpoint.root.survey import survey, verify
from trainium_trainer.storage.posix import PosixStorage
from trainium_trainer.storage.protocol import Retry

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cluster.training.conftest import UninterruptedRun
    from tests.testing.cluster.jobs import Job
    from tests.testing.cluster.shared_cluster import SharedCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def test_a_job_completes_with_status_metrics_and_samples(uninterrupted_run: UninterruptedRun) -> None:
    status = uninterrupted_run.status
    assert status["progress"]["step"] == status["progress"]["totalSteps"] == 60
    assert status["restarts"]["total"] == 0
    assert not status.get("history")
    conditions = {condition["type"]: condition["status"] for condition in status["conditions"]}
    assert conditions["Complete"] == "True"
    assert conditions.get("Failed") != "True"
    losses = uninterrupted_run.losses
    assert sorted(losses) == list(range(1, 61))
    assert losses[60] < losses[1]
    assert has_every_sample_once(uninterrupted_run.folder, 60, 12)
    fields = json.loads((uninterrupted_run.folder / "metrics.jsonl").read_text().splitlines()[0])
    assert {"step", "loss", "gradNorm", "learningRate", "tokens", "samples", "seconds"} <= set(fields)


def test_the_network_policy_of_a_job_admits_the_operator(
    uninterrupted_run: UninterruptedRun, operator: SharedCluster
) -> None:
    (policy,) = uninterrupted_run.policies
    assert policy["metadata"]["name"] == "reference-workers"
    assert [owner["kind"] for owner in policy["metadata"]["ownerReferences"]] == ["TrainingJob"]
    assert "NetworkPolicyApplied" not in {condition["type"] for condition in uninterrupted_run.status["conditions"]}
    (peer,) = policy["spec"]["ingress"][1]["from"]
    labels = ",".join(f"{key}={value}" for key, value in peer["podSelector"]["matchLabels"].items())
    (label,) = peer["namespaceSelector"]["matchLabels"].items()
    (namespace,) = operator.get("namespaces", "-l", "=".join(label))["items"]
    pods = operator.get("pods", "-n", namespace["metadata"]["name"], "-l", labels)["items"]
    assert pods, "no caller is accepted as the operator"
    assert {pod["spec"]["containers"][0]["name"] for pod in pods} == {"operator"}


def test_checkpoints_are_committed_and_verified(uninterrupted_run: UninterruptedRun) -> None:
    committed = sorted(path.parent.name for path in uninterrupted_run.folder.glob("step-*/COMMITTED"))
    assert committed == ["step-20", "step-40", "step-60"]
    storage = PosixStorage(uninterrupted_run.folder)
    checkpoints = survey(storage).committed
    assert [f"step-{item.step}" for item in checkpoints] == committed[::-1]
    assert [verify(storage, item, Retry()) for item in checkpoints] == [[], [], []]


@pytest.mark.long
def test_two_jobs_train_at_the_same_time(new_job: Callable[..., Job], reference: dict[int, float]) -> None:
    first, second = new_job("first"), new_job("second")

    first.wait_for_phase("Completed")
    second.wait_for_phase("Completed")

    assert first.read_losses() == second.read_losses() == reference


@pytest.mark.long
def test_a_suspended_job_resumes_at_its_step(new_job: Callable[..., Job], reference: dict[int, float]) -> None:
    job = new_job()
    job.wait_for_step(10)
    job.suspend()
    suspended = job.wait_for_phase("Suspended")
    assert not job.list_pods()
    assert suspended["checkpoint"]["durableStep"] == suspended["progress"]["step"] == max(job.read_losses()), (
        "it saved its last step"
    )

    job.suspend(yes=False)
    status = job.wait_for_phase("Completed")

    assert job.read_losses() == reference
    assert status["restarts"]["total"] == 0, "a suspension is no failure"


@pytest.mark.long
def test_a_job_at_its_deadline_saves_its_last_step(new_job: Callable[..., Job], reference: dict[int, float]) -> None:
    job = new_job()
    job.wait_for_step(10)
    patch = json.dumps({"spec": {"activeDeadlineSeconds": 1}})
    job.cluster.kubectl("patch", "trainingjob", job.name, "-n", job.namespace, "--type=merge", f"-p={patch}")
    status = job.wait_for_phase("Failed")

    reached = max(job.read_losses())
    assert 10 <= reached < 60
    assert status["checkpoint"]["durableStep"] == reached, "no step is repeated or missing"
    assert f"Its newest durable checkpoint is step {reached}." in status["verdict"]
    assert {condition["reason"] for condition in status["conditions"] if condition["type"] == "Failed"} == {
        "DeadlineExceeded"
    }
    until(lambda: not job.list_pods(), lambda: f"pods go: {job.list_pods()}")
    assert status["restarts"]["total"] == 0, "a deadline is no fault"

    job.delete()
    job.apply().wait_for_phase("Completed")
    assert job.read_losses() == reference
