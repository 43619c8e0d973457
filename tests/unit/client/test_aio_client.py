"""`trainium_client.aio`: the same results as the blocking client without blocking the event loop."""

import asyncio
import inspect

import pytest

import trainium_client
from tests.testing.api.recorded_jobs import JOBS, ApiServer, recorded_object
from trainium_client.aio import ClientError, JobFailedError, TrainingJob
from trainium_contract.views.job import JobView


def open_async_job(server: ApiServer, name: str = "llama") -> TrainingJob:
    return TrainingJob(name, kubeconfig=str(server.kubeconfig))


def test_both_have_the_same_verbs_with_the_same_arguments() -> None:
    verbs = [name for name in dir(trainium_client.TrainingJob) if not name.startswith("_")]
    fields = {"name", "spec", "namespace", "context", "kubeconfig", "metadata"}
    for name in sorted(set(verbs) - fields):
        async_method, blocking_method = getattr(TrainingJob, name), getattr(trainium_client.TrainingJob, name)
        assert list(inspect.signature(async_method).parameters) == list(
            inspect.signature(blocking_method).parameters
        ), name
        assert name in {"from_spec", "from_file"} or inspect.iscoroutinefunction(async_method), name


async def test_async_reads_equal_those_of_the_blocking_client(server: ApiServer) -> None:
    job, blocking = open_async_job(server), open_async_job(server).blocking

    status, why, events, logs, artifacts = await asyncio.gather(
        job.status(), job.why(), job.events(), job.logs(0, tail=5), job.artifacts()
    )

    assert status.step == 263
    assert (why.number, events) == (3, blocking.events())
    assert logs == blocking.logs(0, tail=5)
    assert artifacts == status.artifacts
    with pytest.raises(ClientError, match="no rank 9"):
        await job.logs(9)


async def test_wait_returns_at_a_final_phase_without_blocking_the_event_loop(server: ApiServer) -> None:
    reads: list[str] = []
    paused = asyncio.Event()
    may_continue = asyncio.Event()

    async def receive(view: JobView) -> None:
        reads.append(view.phase)

    async def pause(_seconds: float) -> None:
        paused.set()
        await may_continue.wait()

    waiting = asyncio.create_task(open_async_job(server).wait(on_view=receive, pause=pause))
    await paused.wait()
    # The event loop is free: it reads another job meanwhile.
    with pytest.raises(JobFailedError, match="there is no such file or folder"):
        await open_async_job(server, "broken").wait()
    done = recorded_object("job")
    done["status"]["phase"] = "Completed"
    server.answers[f"{JOBS}/llama"] = done
    may_continue.set()

    assert (await waiting).phase == "Completed"
    assert reads == ["Running", "Completed"]


async def test_waiting_has_a_limit_and_can_be_cancelled(server: ApiServer) -> None:
    with pytest.raises(ClientError, match="is Running after 0 s, not Completed"):
        await open_async_job(server).wait(timeout_seconds=0)

    is_read = asyncio.Event()
    waiting = asyncio.create_task(open_async_job(server).wait(on_view=lambda view: is_read.set()))
    await is_read.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_notebook_shows_the_same_table(server: ApiServer) -> None:
    assert "team/llama" in open_async_job(server)._repr_html_()
    assert repr(open_async_job(server)).startswith("aio.TrainingJob(name='llama'")
