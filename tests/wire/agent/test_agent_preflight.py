"""Checks of the node in a real agent, before it may join."""

import re

import pytest

from tests.wire.agent.agent_job import AgentJob
from trainium_contract.spec.health import PreflightCheck as Check


async def test_a_worker_is_ready_when_its_own_checks_have_passed(job: AgentJob) -> None:
    job.start(
        "a",
        TRAINIUM_PREFLIGHT="Devices,Memory,Disk,Clock,Matmul,Loopback",
        TRAINIUM_PREFLIGHT_SECONDS="60",
        TRAINIUM_PROCESSES_PER_NODE="2",
    )
    await job.until_ready("a")
    outcomes = {result.check: result for result in job.last_heartbeat("a").checks}
    assert outcomes[Check.MATMUL].passed
    assert outcomes[Check.LOOPBACK].detail == ""
    assert outcomes.keys() >= {Check.DEVICES, Check.MEMORY, Check.DISK, Check.MATMUL, Check.LOOPBACK}
    reported = [
        ({result.check for result in heartbeat.checks}, heartbeat.ready)
        for heartbeat in job.coordinator.heartbeats["a"]
    ]
    assert all(Check.MATMUL in checks for checks, ready in reported if ready)
    await job.coordinator.publish(["a"], processes=2)
    await job.until_training("a", step=3)


@pytest.mark.parametrize(("minimum", "passes"), [("0.01", True), ("900000", False)])
async def test_a_node_with_too_little_internal_bandwidth_fails(job: AgentJob, minimum: str, *, passes: bool) -> None:
    job.start(
        "a",
        TRAINIUM_PREFLIGHT="Loopback,Bandwidth",
        TRAINIUM_PREFLIGHT_SECONDS="60",
        TRAINIUM_MINIMUM_BANDWIDTH_GBPS=minimum,
        TRAINIUM_PROCESSES_PER_NODE="2",
    )
    (check,) = (await job.until_heartbeat("a", lambda heartbeat: heartbeat.checks, "the check")).checks
    assert (check.check, check.passed) == (Check.LOOPBACK, passes)
    if passes:
        assert re.fullmatch(r"[\d.]+ Gbit/s among 2 processes", check.detail)
        await job.until_ready("a")
        return
    verdict = await job.until_verdict("a")
    assert re.fullmatch(
        r"node node-a: an all-reduce among the processes of the node reaches [\d.]+ Gbit/s, below 900000",
        verdict.message,
    )


async def test_a_node_with_wrong_numbers_fails_and_starts_no_rank(job: AgentJob) -> None:
    job.start(
        "a",
        TRAINIUM_PREFLIGHT="Matmul",
        TRAINIUM_PROCESSES_PER_NODE="2",
        TRAINIUM_CHECK_ENTRY="fake_check:main",
    )
    heartbeat = await job.until_heartbeat("a", lambda heartbeat: heartbeat.verdict, "the verdict")
    assert heartbeat.verdict.exit_code == 80
    assert heartbeat.verdict.message == "node node-a: a matrix product is wrong on core 1"
    assert not heartbeat.ready
    await job.coordinator.publish(["a"], processes=2)
    await job.until_heartbeat("a", lambda heartbeat: heartbeat.generation == 1, "generation 1")
    assert job.rank_starts() == []
