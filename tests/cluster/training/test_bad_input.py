"""Jobs that cannot work end with a sentence that names the reason; damaged checkpoints are stepped over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.testing.cluster.jobs import Job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def classify_exit_code(job: Job) -> str:
    """The verdict of a job that must fail; no node may be blamed for it."""
    status = job.until_phase("Failed")
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
        pytest.param(
            "trainer: {model: {ropeTheta: 1.0e-300}}",
            "finite",
            id="a loss that is not a number",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_hopeless_job_fails_with_a_sentence_after_at_most_two_tries(
    new_job: Callable[..., Job], change: str, expected: str
) -> None:
    assert expected in classify_exit_code(new_job(change=change))


@pytest.mark.long
def test_a_worker_that_ends_at_import_fails_within_two_tries(new_job: Callable[..., Job]) -> None:
    environment = {"OMP_NUM_THREADS": "1", "TRAINIUM_RANK_ENTRY": "no_such_module:main"}
    verdict = classify_exit_code(new_job(change="workers: {replicas: 1}", environment=environment))
    assert "no_such_module" in verdict


@pytest.mark.long
def test_a_damaged_newest_checkpoint_is_stepped_over(new_job: Callable[..., Job], reference: dict[int, float]) -> None:
    job = new_job(change="trainer: {steps: 60}")
    job.until("two checkpoints", lambda _: len(list(job.folder.glob("step-*/COMMITTED"))) >= 2)
    job.suspend()
    job.until_phase("Suspended")
    folders = sorted(job.folder.glob("step-*/COMMITTED"), key=lambda path: int(path.parent.name.split("-")[1]))
    newest = folders[-1].parent
    shard = max(newest.glob("*/*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 0x10
    shard.chmod(0o644)
    shard.write_bytes(content)

    job.suspend(yes=False)
    job.until_phase("Completed")

    assert job.losses() == reference
    assert any(newest.name in event for event in job.events()), job.events()
