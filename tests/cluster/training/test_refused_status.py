"""A policy of others refuses every status of a job, and the job recovers all the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.testing.cluster.jobs import STATUS_REFUSAL

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.testing.cluster.jobs import Job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def test_a_job_recovers_while_its_status_is_refused(new_job: Callable[..., Job]) -> None:
    job = new_job(change="workers: {spares: 1}\ntrainer: {steps: 100000}")
    job.wait_for_step(3)
    job.wait_until("the spare is warm", lambda status: status.get("spares") == 1)
    with job.refused_statuses():
        lost = job.list_members()[0]["podName"]
        job.cluster.kubectl("delete", "pod", lost, "-n", job.namespace, "--force", "--grace-period=0")
        job.wait_until(
            "the spare has the rank", lambda _: lost not in {member["podName"] for member in job.list_members()}
        )
        job.wait_for_step(job.log.newest + 20)
        assert not job.read_history(), "the policy refuses the status"
        assert [
            text for text in job.list_events() if "The status of this job is refused" in text and STATUS_REFUSAL in text
        ]
        command = (sys.executable, "-m", "trainium_client.commands.main", "why", job.name, "-n", job.namespace)
        why = subprocess.run(
            [*command, "-o", "json"], env={**os.environ, **job.cluster.variables}, capture_output=True, check=True
        ).stdout
        report = json.loads(why)
        assert report["entry"]["pod"] == lost
        assert "Exempt trainingjobs/status" in report["advice"][0]
    entry = job.wait_for_recovery()
    assert entry["pod"] == lost
    assert job.read_status()["restarts"]["total"] == 1
