"""Real agents and their coordinator: the leader among replicas, certificates, tokens, verdicts."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.wire.agent.agent_job import AgentJob
from tests.wire.agent.coordinator_server import Authority


async def test_an_agent_follows_the_leader_among_replicas(job: AgentJob) -> None:
    second = await job.add_coordinator()
    job.coordinators[0].leader = False
    await job.train("a")
    assert {ip for _, ip in job.coordinator.registrations} == {second.ip}

    second.leader, job.coordinators[0].leader = False, True
    await job.until(
        lambda: ("a", job.coordinators[0].ip) in job.coordinator.registrations, "registered with the new leader"
    )
    await second.stop()
    await job.coordinator.publish(["a"])
    await job.until_training("a", generation=2)


async def test_a_rotated_certificate_authority_is_reloaded(job: AgentJob) -> None:
    job.start("a")
    await job.until_ready("a")
    await job.coordinators[0].stop()
    job.coordinators[0].authority = Authority()
    await job.coordinators[0].start()
    await job.until(lambda: "does not verify" in job.agents["a"].log, "the new certificate is refused")
    count = len(job.coordinator.registrations)
    # The kubelet writes both authorities by an atomic rename.
    fresh = job.folder / "ca.new"
    fresh.write_bytes(job.authority.pem + job.coordinators[0].authority.pem)
    fresh.rename(job.ca)
    await job.until(lambda: len(job.coordinator.registrations) > count, "registered again")


async def test_a_refused_token_is_logged_once_and_reloaded(job: AgentJob) -> None:
    job.start("a")
    await job.until_ready("a")
    job.coordinator.token = "token-2"
    job.coordinators[0].end_streams()
    job.coordinators[0].end_streams()
    await job.until(lambda: len(job.coordinator.refused) >= 4, "refused several times")
    assert job.agents["a"].log.count("refused this pod's token") <= 2
    job.token.write_text("token-2\n")
    count = len(job.coordinator.registrations)
    await job.until(lambda: len(job.coordinator.registrations) > count, "accepted with the new token")


async def test_a_missing_configuration_file_is_a_verdict(job: AgentJob) -> None:
    job.start("a", TRAINIUM_CONFIG=str(job.folder / "nothing.yaml"))
    verdict = await job.until_verdict("a")
    assert verdict.exit_code == 64
    assert "nothing.yaml cannot be read" in verdict.message
    await job.coordinator.publish(["a"])
    count = len(job.coordinator.heartbeats["a"])
    await job.until(lambda: len(job.coordinator.heartbeats["a"]) > count + 3, "heartbeats continue")
    assert not job.rank_starts()


async def test_the_installed_command_trains_and_names_missing_variables(job: AgentJob, tmp_path: Path) -> None:
    command = Path(sys.executable).parent / "trainium-agent"
    empty = await asyncio.create_subprocess_exec(command, env={"PATH": os.environ["PATH"]}, stderr=subprocess.PIPE)
    _, errors = await empty.communicate()
    assert empty.returncode == 64
    assert b"TRAINIUM_COORDINATOR, TRAINIUM_NAMESPACE" in errors
    assert b"Traceback" not in errors

    job.command_ranks("last-step", "5")
    environment = job.environment("a", job.allocate_ip())
    with (tmp_path / "a.log").open("wb") as log:
        agent = await asyncio.create_subprocess_exec(command, env=environment, stdout=log, stderr=log)
    await job.until_registered("a")
    await job.coordinator.publish(["a"])
    await job.until(lambda: agent.returncode is not None, "the agent ended")
    assert agent.returncode == 0, (tmp_path / "a.log").read_text()
    assert len(job.rank_starts()) == 1


async def test_a_terminated_agent_reports_the_last_save(job: AgentJob) -> None:
    job.coordinator.heartbeat_seconds = 2.0  # no periodic heartbeat between save and exit
    await job.train("a", step=3)
    job.agents["a"].signal(signal.SIGTERM)
    await job.until_ended("a")
    progress = job.last_heartbeat("a").progress
    assert progress.durable_step == progress.step > 3


async def test_an_agent_that_reaches_no_operator_reports_what_that_costs(job: AgentJob) -> None:
    job.start("a")
    await job.until_ready("a")
    await job.coordinators[0].stop()
    await job.until(lambda: "no operator has answered for" in job.agents["a"].log, "it is in the log")
    assert "no lost worker is replaced" in job.agents["a"].log
