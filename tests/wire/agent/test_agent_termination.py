"""SIGTERM to agents in every state of their pods: only ranks that ended by themselves with 0 end a pod with 0."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from tests.testing.suite.processes import has_ended
from tests.testing.suite.timeouts import scaled
from tests.wire.agent.agent_job import AgentJob
from tests.wire.agent.test_agent_program import program_environment, start_generation
from trainium_contract.wire.last_report import parse_last_report
from trainium_contract.wire.messages import HeartbeatRequest, WorkerPhase
from trainium_contract.worker_process.process_tree import list_descendants

PROGRAM = """
import os, signal, sys, time
ending = sys.argv[1]
if ending == "ignores":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif ending != "no handler":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(int(ending)))
print("up", flush=True)
while True:
    time.sleep(0.05)
"""
FIRST_RANK_FINISHES = 'import os, time; time.sleep(0 if os.environ["RANK"] == "0" else 600)'


def program(*arguments: str) -> dict[str, str]:
    return program_environment(sys.executable, "-c", *arguments) | {"TRAINIUM_GRACE_SECONDS": "1"}


def read_report(job: AgentJob, name: str) -> tuple[HeartbeatRequest | None, str]:
    agent = job.agents[name]
    return parse_last_report(agent.termination_message, f"uid-{name}", agent.code)


async def end(job: AgentJob, *names: str, seconds_apart: float = 0.0) -> None:
    """Send SIGTERM to these agents; assert that none of them claims to have finished."""
    for name in names:
        job.agents[name].signal(signal.SIGTERM)
        await asyncio.sleep(seconds_apart)
    await job.until_ended(*names)
    assert {job.agents[name].code for name in names} == {75}
    assert all("asked to end" in job.agents[name].termination_message for name in names)


@pytest.mark.parametrize("ending", ["no handler", "0", "75", "ignores"])
@pytest.mark.parametrize(("names", "seconds_apart"), [("a", 0.0), ("ab", 0.0), ("ab", 1.6)])
async def test_a_training_program_that_is_asked_to_end_has_not_finished(
    job: AgentJob, names: str, seconds_apart: float, ending: str
) -> None:
    await start_generation(job, "a", "b", **program(PROGRAM, ending))
    await job.until(lambda: all("up" in job.agents[name].log for name in "ab"), "the program runs")
    await end(job, *names, seconds_apart=seconds_apart)
    assert all(heartbeat.phase is not WorkerPhase.FINISHED for heartbeat in job.coordinator.heartbeats["b"])


@pytest.mark.parametrize("ending", ["no handler", "0"])
async def test_a_signal_to_every_process_of_a_pod_finishes_nothing(job: AgentJob, ending: str) -> None:
    """So systemd stops a container when the node shuts down; the ranks may end first, with 0."""
    await start_generation(job, "a", **program(PROGRAM, ending))
    await job.until(lambda: "up" in job.agents["a"].log, "the program runs")
    children = list_descendants(job.agents["a"].pid)
    for child in children:
        os.kill(child, signal.SIGTERM)
    await job.until(lambda: all(map(has_ended, children)), "the ranks have ended")
    await end(job, "a")


async def test_a_program_that_is_still_importing_has_not_finished(job: AgentJob) -> None:
    await start_generation(job, "a", **program("import time; time.sleep(600)"))
    await job.until_phase("Loading", "a")
    await end(job, "a")


@pytest.mark.parametrize("state", ["no generation", "joining", "training", "stuck in a rank that loads"])
async def test_a_trainer_that_is_asked_to_end_has_not_finished(job: AgentJob, state: str) -> None:
    job.start("a", TRAINIUM_GRACE_SECONDS="1")
    await job.until_ready("a")
    if state == "joining":
        job.start("b")
        await job.until_registered("b")
        job.agents["b"].signal(signal.SIGSTOP)
        await job.coordinator.publish(["a", "b"])
        await job.until_phase("Joining", "a")
    elif state != "no generation":
        await job.coordinator.publish(["a"])
        await job.until_training("a")
    if state == "stuck in a rank that loads":
        (start,) = job.rank_starts()
        await asyncio.to_thread(subprocess.run, ["kill", "-STOP", str(start["pid"])], check=True)
    await end(job, "a")


async def test_a_worker_that_waits_for_the_others_to_finish_proves_nothing_by_sigterm(job: AgentJob) -> None:
    await start_generation(job, "a", "b", **program(FIRST_RANK_FINISHES))
    await job.until_phase("Finished", "a")
    await end(job, "a")
    assert job.agents["b"].code is None


async def test_an_agent_that_is_still_importing_ends_with_75() -> None:
    script = (
        "import os, signal; from trainium_agent import __main__, bootstrap; "
        "bootstrap.start = lambda: os.kill(os.getpid(), signal.SIGTERM); __main__.main()"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    assert await asyncio.wait_for(process.wait(), scaled(30)) == 75


@pytest.mark.parametrize("coordinator", ["answers", "is away"])
async def test_a_finished_worker_proves_it_with_its_final_figures(job: AgentJob, coordinator: str) -> None:
    (job.control / "last-step").write_text("40")
    await job.train("a", "b")
    if coordinator == "is away":
        job.coordinators[0].leader = False
    await job.until_ended("a", "b")
    for name in "ab":
        assert job.agents[name].code == 0
        report, text = read_report(job, name)
        assert report is not None
        assert text == ""
        assert report.progress is not None
        assert (report.generation, report.attempt, report.progress.step) == (1, 0, 40)


@pytest.mark.parametrize("coordinator", ["answers", "is away"])
async def test_a_worker_that_gives_up_reports_its_final_figures_and_shows_why(job: AgentJob, coordinator: str) -> None:
    await job.train("a", "b", step=3, TRAINIUM_GRACE_SECONDS="1")
    if coordinator == "is away":
        job.coordinators[0].leader = False
    job.command_ranks("exit-1", "64")
    await job.until(lambda: "rank 1 leaves with 64" in job.agents["b"].log, "the rank ends")
    if coordinator == "is away":
        await asyncio.sleep(2)  # else the agent itself ends after five minutes
        for name in "ab":
            job.agents[name].signal(signal.SIGTERM)
        await job.until_ended("a", "b")
        assert job.agents["a"].code == 75
        report, text = read_report(job, "a")
        assert report is not None
        assert report.progress is not None
        assert report.progress.step >= 3
        assert "asked to end" in text
    await job.until_ended("b")
    assert job.agents["b"].code == 64
    report, text = read_report(job, "b")
    assert report is not None
    assert report.progress is not None
    assert report.verdict is not None
    assert (report.phase, report.verdict.message) == (WorkerPhase.FAILED, "rank 1 leaves with 64")
    assert report.progress.step >= 3
    assert text == "rank 1 leaves with 64\n"


async def test_a_program_that_its_workload_refuses_never_reports_to_have_finished(job: AgentJob) -> None:
    """It ended with 0 and runs on in the background; the verdict follows, so nothing may complete the job before."""
    await start_generation(job, "a", **program_environment("/bin/sh", "-c", "sleep 600 &"))
    await job.until_verdict("a")
    assert all(heartbeat.phase is not WorkerPhase.FINISHED for heartbeat in job.coordinator.heartbeats["a"])
