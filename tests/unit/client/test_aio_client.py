"""The verbs of `trainium_client.aio`: the same answers as the blocking ones, while the program does other things."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING

import pytest

import trainium_client
from tests.testing.api.recorded_jobs import JOBS, ApiServer, recorded
from trainium_client.aio import ClientError, JobFailedError, TrainingJob

if TYPE_CHECKING:
    from trainium_contract.views.job import JobView


def job(server: ApiServer, name: str = "llama") -> TrainingJob:
    return TrainingJob(name, kubeconfig=str(server.kubeconfig))


def test_both_have_the_same_verbs_with_the_same_arguments() -> None:
    verbs = [name for name in dir(trainium_client.TrainingJob) if not name.startswith("_")]
    fields = {"name", "spec", "namespace", "context", "kubeconfig", "metadata"}
    for name in sorted(set(verbs) - fields):
        ours, theirs = getattr(TrainingJob, name), getattr(trainium_client.TrainingJob, name)
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), name
        assert name in {"from_spec", "from_file"} or inspect.iscoroutinefunction(ours), name


async def test_what_is_read_is_what_the_blocking_client_reads(server: ApiServer) -> None:
    found, blocking = job(server), job(server).blocking

    status, why, events, logs, artifacts = await asyncio.gather(
        found.status(), found.why(), found.events(), found.logs(0, tail=5), found.artifacts()
    )

    assert status.step == 263
    assert (why.number, events) == (3, blocking.events())
    assert logs == blocking.logs(0, tail=5)
    assert artifacts == status.artifacts
    with pytest.raises(ClientError, match="no rank 9"):
        await found.logs(9)


async def test_waiting_ends_with_the_phase_or_the_verdict_and_leaves_the_program_free(server: ApiServer) -> None:
    reads: list[str] = []
    paused = asyncio.Event()
    go_on = asyncio.Event()

    async def receive(view: JobView) -> None:
        reads.append(view.phase)

    async def pause(_seconds: float) -> None:
        paused.set()
        await go_on.wait()

    waiting = asyncio.create_task(job(server).wait(on_view=receive, pause=pause))
    await paused.wait()
    # The loop is free: another job is asked meanwhile.
    with pytest.raises(JobFailedError, match="there is no such file or folder"):
        await job(server, "broken").wait()
    done = recorded("job")
    done["status"]["phase"] = "Completed"
    server.answers[f"{JOBS}/llama"] = done
    go_on.set()

    assert (await waiting).phase == "Completed"
    assert reads == ["Running", "Completed"]


async def test_waiting_has_a_limit_and_can_be_cancelled(server: ApiServer) -> None:
    with pytest.raises(ClientError, match="is Running after 0 s, not Completed"):
        await job(server).wait(seconds=0)

    asked = asyncio.Event()
    waiting = asyncio.create_task(job(server).wait(on_view=lambda view: asked.set()))
    await asked.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_notebook_shows_the_same_table(server: ApiServer) -> None:
    assert "team/llama" in job(server)._repr_html_()
    assert repr(job(server)).startswith("aio.TrainingJob(name='llama'")
