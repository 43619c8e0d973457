"""Jobs that cannot work end with a sentence that names the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.testing.cluster.jobs import Job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def verdict_of(job: Job) -> str:
    """Return the verdict of a job that must fail without a suspected node."""
    status = job.wait_for_phase("Failed")
    assert not status.get("avoidedNodes"), "no node is to blame"
    assert status["restarts"]["total"] <= 2
    failed = next(condition for condition in status["conditions"] if condition["type"] == "Failed")
    assert failed["status"] == "True"
    verdict: str = status["verdict"]
    return verdict


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(
            "{trainer: {data: {source: /nowhere/corpus.txt}}, workers: {replicas: 1}}",
            "/nowhere/corpus.txt",
            id="a missing file",
        ),
        pytest.param(
            "{trainer: {data: {source: /dev/null}}, workers: {replicas: 1}}",
            "/dev/null",
            id="no text",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "{trainer: {model: {vocabSize: 64}}, workers: {replicas: 1}}",
            "vocab",
            id="a vocabulary that is too small",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_job_with_bad_input_fails_after_at_most_two_attempts(
    new_job: Callable[..., Job], change: str, expected: str
) -> None:
    assert expected in verdict_of(new_job(change=change))
