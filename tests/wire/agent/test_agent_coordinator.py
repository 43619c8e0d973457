"""Real agents and their coordinator: the leader among replicas, certificates, tokens, verdicts."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.wire.agent.agent_world import AgentJob
from tests.wire.agent.coordinator_server import Authority


async def test_an_agent_follows_the_leader_among_replicas(world: AgentJob) -> None:
    second = await world.server()
    world.servers[0].leader = False
    await world.train("a")
    assert {ip for _, ip in world.jobs.registrations} == {second.ip}

    second.leader, world.servers[0].leader = False, True
    await world.until(lambda: ("a", world.servers[0].ip) in world.jobs.registrations, "registered with the new leader")
    await second.stop()
    await world.jobs.publish(["a"])
    await world.training("a", generation=2)


async def test_a_rotated_certificate_authority_is_reloaded(world: AgentJob) -> None:
    world.start("a")
    await world.ready("a")
    await world.servers[0].stop()
    world.servers[0].authority = Authority()
    await world.servers[0].start()
    await world.until(lambda: "does not verify" in world.agents["a"].log, "the new certificate is refused")
    seen = len(world.jobs.registrations)
    # As the kubelet does it: the old and the new authority, by an atomic rename.
    fresh = world.folder / "ca.new"
    fresh.write_bytes(world.authority.pem + world.servers[0].authority.pem)
    fresh.rename(world.ca)
    await world.until(lambda: len(world.jobs.registrations) > seen, "registered again")


async def test_a_refused_token_is_logged_once_and_reloaded(world: AgentJob) -> None:
    world.start("a")
    await world.ready("a")
    world.jobs.token = "token-2"
    world.servers[0].end_streams()
    world.servers[0].end_streams()
    await world.until(lambda: len(world.jobs.refused) >= 4, "refused several times")
    assert world.agents["a"].log.count("refused this pod's token") <= 2
    world.token.write_text("token-2\n")
    seen = len(world.jobs.registrations)
    await world.until(lambda: len(world.jobs.registrations) > seen, "accepted with the new token")


async def test_a_missing_configuration_file_is_a_verdict(world: AgentJob) -> None:
    world.start("a", TRAINIUM_CONFIG=str(world.folder / "nothing.yaml"))
    verdict = await world.verdict("a")
    assert verdict.exit_code == 64
    assert "nothing.yaml cannot be read" in verdict.message
    await world.jobs.publish(["a"])
    seen = len(world.jobs.heartbeats["a"])
    await world.until(lambda: len(world.jobs.heartbeats["a"]) > seen + 3, "heartbeats go on")
    assert not world.starts()


async def test_the_installed_command_trains_and_names_missing_variables(world: AgentJob, tmp_path: Path) -> None:
    command = Path(sys.executable).parent / "trainium-agent"
    empty = await asyncio.create_subprocess_exec(command, env={"PATH": os.environ["PATH"]}, stderr=subprocess.PIPE)
    _, errors = await empty.communicate()
    assert empty.returncode == 64
    assert b"TRAINIUM_COORDINATOR, TRAINIUM_NAMESPACE" in errors
    assert b"Traceback" not in errors

    world.command("last-step", "5")
    environment = world.environment("a", world.fresh_ip())
    with (tmp_path / "a.log").open("wb") as log:
        agent = await asyncio.create_subprocess_exec(command, env=environment, stdout=log, stderr=log)
    await world.registered("a")
    await world.jobs.publish(["a"])
    await world.until(lambda: agent.returncode is not None, "the agent ended")
    assert agent.returncode == 0, (tmp_path / "a.log").read_text()
    assert len(world.starts()) == 1


async def test_a_terminated_agent_reports_the_last_save(world: AgentJob) -> None:
    world.jobs.heartbeat_seconds = 2.0  # no periodic one is sent between save and end
    await world.train("a", step=3)
    world.agents["a"].signal(signal.SIGTERM)
    await world.ended("a")
    progress = world.jobs.last("a").progress
    assert progress.durable_step == progress.step > 3
