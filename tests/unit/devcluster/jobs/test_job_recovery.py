"""Drive a job with a given API and given files: waits and their messages, and the measurement of a recovery."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainium_contract.api_server.errors import ApiError
from trainium_devcluster.jobs import recovery
from trainium_devcluster.jobs.driver import JobDriver, JobTimeoutError

FAILED_AT = 1000.2
ENTRY = {
    "generation": 2,
    "failedAt": FAILED_AT,
    "detectedSeconds": 0.3,
    "resumeStep": 6,
    "stepBefore": 7,
    "stepsLost": 1,
}


class GivenJob(JobDriver):
    """A job with a given history, whose API fails in the first reads."""

    def __init__(self, folder: Path, failures: int = 0) -> None:
        super().__init__(None, "team", "job", folder)  # type: ignore[arg-type]
        self.entries: list[dict[str, Any]] = []
        self.failures = failures

    def read_object(self) -> dict[str, Any]:
        self.failures -= 1
        if self.failures >= 0:
            raise ApiError("no connection")
        return {"status": {"phase": "Running", "history": self.entries}}

    def list_pods(self) -> list[dict[str, Any]]:
        return [{"metadata": {"name": "job-w-0", "uid": "a"}, "status": {"phase": "Running"}}]

    def write_steps(self, times: dict[int, float]) -> None:
        lines = ({"step": step, "time": time, "loss": 1.0} for step, time in times.items())
        self.log.path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_wait_outlasts_failures_of_the_api(tmp_path: Path) -> None:
    job = GivenJob(tmp_path, failures=2)
    assert job.wait_until("phase Running", lambda status: status["phase"] == "Running", 5)["phase"] == "Running"


def test_a_wait_that_times_out_reports_the_state_of_the_job(tmp_path: Path) -> None:
    job = GivenJob(tmp_path)
    job.write_steps({1: 1.0, 2: 2.0})
    with pytest.raises(
        JobTimeoutError, match=r"team/job did not reach step 9 within \d+ s: Phase Running, step 2, pods job-w-0"
    ):
        job.wait_for_step(9, 0.1)


def test_a_recovery_is_measured_from_the_fault_to_the_first_new_step(tmp_path: Path) -> None:
    job = GivenJob(tmp_path)
    job.entries = [{**ENTRY, "generation": 1, "recoveredSeconds": 1.0}]
    job.write_steps(dict.fromkeys(range(1, 8), 999.0))

    def fail() -> float:
        job.entries.append({**ENTRY, "recoveredSeconds": 2.0, "podsReplaced": 1})
        return 1000.0

    fault = recovery.inject(job, fail)
    job.write_steps({**dict.fromkeys(range(1, 7), 999.0), 7: 1001.5, 8: 1002.0})
    measured = recovery.follow(job, fault, 5)

    assert (fault.completed_step, len(measured.entries), measured.last_step) == (7, 1, 7)
    assert measured.detection_seconds == pytest.approx(0.5)
    assert measured.recovery_seconds == pytest.approx(2.0)
    assert (measured.steps_lost, measured.pods_joined) == (1, 1)


def test_a_failure_before_the_fault_is_no_part_of_its_recovery(tmp_path: Path) -> None:
    job = GivenJob(tmp_path)
    job.entries = [{**ENTRY, "recoveredSeconds": 1.0}]
    fault = recovery.inject(job, lambda: None)
    with pytest.raises(JobTimeoutError, match="did not reach the recovery"):
        recovery.follow(job, fault, 0.1)
