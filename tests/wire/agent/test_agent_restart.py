"""Restarts in place under real agents, exits that end a generation, and causes from output, kernel log and rules."""

import json
import os
import signal
from pathlib import Path

from tests.testing.suite.processes import has_ended
from tests.wire.agent.agent_job import AgentJob
from trainium_contract.faults.causes import Cause


def kill_rank(job: AgentJob, rank: int, **fields: int) -> int:
    pid = job.rank_starts(rank=rank, **fields)[-1]["pid"]
    os.kill(pid, signal.SIGKILL)
    return pid


async def test_a_killed_rank_restarts_all_ranks_in_place_and_no_agent(job: AgentJob) -> None:
    await job.train("a", "b", "c", "d", step=3)
    agents = {name: agent.pid for name, agent in job.agents.items()}

    kill_rank(job, 2)

    await job.until_training(*agents, attempt=1)
    restarted = job.rank_starts(attempt=1)
    assert sorted(row["rank"] for row in restarted) == [0, 1, 2, 3]
    assert {name: agent.pid for name, agent in job.agents.items() if agent.code is None} == agents
    assert [row["ppid"] for row in sorted(restarted, key=lambda row: row["rank"])] == [*agents.values()]
    assert {row["nice"] for row in restarted} == {os.nice(0)}
    await job.until(
        lambda: all(job.last_heartbeat(name).restarts[-1].resumed_at for name in agents), "every restart resumed"
    )
    failure = job.last_heartbeat("c").failures[-1]
    assert (failure.exit_code, failure.rank, failure.attempt) == (137, 2, 0)
    assert failure.step >= 3
    assert not job.last_heartbeat("a").failures
    for name in agents:
        (restart,) = job.last_heartbeat(name).restarts
        assert restart.cause == ("Crash" if name == "c" else "PeerLost")
        assert restart.resume_step is not None
        assert restart.failed_at <= restart.detected_at <= restart.resumed_at


async def test_a_rank_restarts_in_place_while_the_coordinator_is_down(job: AgentJob) -> None:
    await job.train("a", "b", step=3)
    await job.coordinators[0].stop()

    kill_rank(job, 1)
    await job.until(lambda: len(job.rank_starts(attempt=1)) == 2, "attempt 1 without a coordinator")

    await job.coordinators[0].start()
    await job.until_training("a", "b", attempt=1)
    assert job.last_heartbeat("b").failures[-1].exit_code == 137
    assert [name for name, _ in job.coordinator.registrations].count("a") >= 2


async def test_several_ranks_of_one_pod_restart_together(job: AgentJob) -> None:
    await job.train("a", "b", processes=3, step=1)
    kill_rank(job, 4)
    await job.until_training("a", "b", attempt=1)
    restarted = job.rank_starts(attempt=1)
    assert sorted(row["rank"] for row in restarted) == [0, 1, 2, 3, 4, 5]
    assert {row["pod"] for row in restarted if row["rank"] < 3} == {"a"}


async def test_a_user_error_ends_its_pod_with_a_verdict(job: AgentJob) -> None:
    await job.train("a", "b", step=3)
    job.command_ranks("exit-1", "64")
    await job.until_phase("Failed", "a", "b")
    verdict = await job.until_verdict("b")
    assert verdict.exit_code == 64
    assert "rank 1 leaves with 64" in verdict.message
    assert job.last_heartbeat("a").verdict is None
    assert not job.rank_starts(attempt=1)
    assert not any(not has_ended(row["pid"]) for row in job.rank_starts())
    assert all(agent.code is None for agent in job.agents.values())
    await job.until_ended("b")
    assert job.agents["b"].code == 64
    assert "rank 1 leaves with 64" in job.agents["b"].log, "the log of the pod has the message"
    assert job.last_heartbeat("a").phase == "Failed"
    assert job.agents["a"].code is None


async def test_a_program_that_cannot_be_imported_is_a_verdict(job: AgentJob) -> None:
    job.start("a", TRAINIUM_RANK_ENTRY="fake_broken:main")
    await job.until_registered("a")
    await job.coordinator.publish(["a"])
    verdict = await job.until_verdict("a")
    assert verdict.exit_code == 1
    assert verdict.attempt == 1
    assert "no_such_module" in verdict.message


async def test_peers_of_a_withdrawn_pod_wait_for_its_replacement(job: AgentJob) -> None:
    await job.train("a", "b", spares=("spare",), step=3)
    job.command_ranks("exit-1", "80")
    assert (await job.until_verdict("b")).exit_code == 80
    heartbeat = await job.until_heartbeat("a", lambda heartbeat: heartbeat.waiting_for == (1,), "it waits for node 1")
    assert heartbeat.phase == "Joining"
    await job.coordinator.publish(["a", "spare"])
    await job.until_training("a", "spare", generation=2)
    await job.until_phase("Standby", "b")


async def test_ranks_that_yield_without_an_order_restart_in_place(job: AgentJob) -> None:
    await job.train("a", "b", step=3)
    os.kill(job.rank_starts(rank=1)[0]["pid"], signal.SIGTERM)
    await job.until_phase("Yielded", "a", "b")
    assert not job.last_heartbeat("a").failures
    await job.until_training("a", "b", attempt=1)
    assert job.last_heartbeat("a").restarts[-1].cause == "Yielded"


async def test_agents_without_their_store_wait_for_a_newer_generation(job: AgentJob) -> None:
    await job.train("a", "b", "c", spares=("spare",), step=3)
    job.agents["a"].signal(signal.SIGKILL)
    await job.until_ended("a")
    await job.until(lambda: has_ended(job.rank_starts(rank=0)[0]["pid"]), "its rank ended with it")
    for rank in (1, 2):
        kill_rank(job, rank)
    await job.until(
        lambda: all(job.last_heartbeat(name).waiting_for == (0,) for name in ("b", "c")), "the others wait for node 0"
    )
    await job.coordinator.publish(["spare", "b", "c"])
    await job.until_training("spare", "b", "c", generation=2)


async def test_a_lost_standby_is_replaced_before_ranks_start(job: AgentJob) -> None:
    await job.train("a", step=3)
    standby = int(standby_pid(job.agents["a"].pid))
    os.kill(standby, signal.SIGKILL)
    kill_rank(job, 0)
    await job.until_training("a", attempt=1)
    assert standby_pid(job.agents["a"].pid) != str(standby)
    await job.until_ready("a")


def standby_pid(agent_pid: int) -> str:
    """Return the pid of the standby of an agent, or an empty text."""
    for pid in Path(f"/proc/{agent_pid}/task/{agent_pid}/children").read_text().split():
        if "standby" in Path(f"/proc/{pid}/cmdline").read_text():
            return pid
    return ""


async def test_an_export_resumes_after_more_kills_than_the_restart_limit(job: AgentJob) -> None:
    (job.control / "export").write_text("1000")
    (job.control / "last-step").write_text("10")  # before the start: every rank ends with the same step
    await job.train("a", "b", step=3, TRAINIUM_MAX_IN_PLACE_RESTARTS="1")

    def exports(name: str, attempt: int, beyond: float) -> bool:
        heartbeat = job.last_heartbeat(name)
        progress = heartbeat.progress
        return heartbeat.attempt == attempt and progress.stage == "Export" and progress.stage_progress > beyond

    reached = 0.0
    for attempt in range(4):
        await job.until(
            lambda attempt=attempt, beyond=reached + 0.002: all(exports(name, attempt, beyond) for name in "ab"),
            f"attempt {attempt} exports",
        )
        kill_rank(job, attempt % 2, attempt=attempt)
        await job.until(lambda attempt=attempt: len(job.rank_starts(attempt=attempt + 1)) == 2, "the next attempt")
        reached = int((job.control / "exported").read_text()) / 1000
    (job.control / "export").write_text("1")

    await job.until_phase("Finished", "a", "b")
    heartbeat = job.last_heartbeat("a")
    assert [artifact.path for artifact in heartbeat.progress.artifacts] == ["/out"]
    assert len(heartbeat.restarts) == 4
    assert all(restart.resumed_at for restart in heartbeat.restarts[:-1])
    assert heartbeat.verdict is None


SRAM = "NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR instance-id=i-0 nd-id=3 nc-id=1 action=TERMINATE_INSTANCE"


async def start_with_kernel_logs(job: AgentJob, *names: str, **extra: str) -> None:
    """Train generation 1 with agents that read a separate kernel log each."""
    for name in names:
        kernel_log(job, name).touch()
        job.start(name, TRAINIUM_KERNEL_LOG=str(kernel_log(job, name)), **extra)
    await job.until_ready(*names)
    await job.coordinator.publish([*names])
    await job.until_training(*names, step=3)


def kernel_log(job: AgentJob, name: str) -> Path:
    return job.folder / f"kmsg-{name}"


def write_kernel_line(job: AgentJob, name: str, line: str) -> None:
    with kernel_log(job, name).open("a") as file:
        file.write(f"3,1,99,-;{line}\n")


def exit_rank(job: AgentJob, rank: int, code: int, message: str) -> None:
    job.command_ranks(f"exit-{rank}", f"{code}\n{message}")


async def test_a_device_status_in_the_output_withdraws_the_pod(job: AgentJob) -> None:
    await start_with_kernel_logs(job, "a", "b")
    exit_rank(job, 1, 1, "XlaRuntimeError: nrt_execute failed with status 1202")
    verdict = await job.until_verdict("b")
    assert (verdict.exit_code, verdict.runtime_status) == (1, 1202)
    assert "1202" in verdict.message
    assert job.last_heartbeat("a").verdict is None


async def test_a_repairable_device_withdraws_at_its_second_failure(job: AgentJob) -> None:
    await start_with_kernel_logs(job, "a", "b")
    exit_rank(job, 0, 1, "nrt_execute: status=1205")
    await job.until_training("a", "b", attempt=1, step=8)
    assert job.last_heartbeat("a").restarts[-1].cause is Cause.DEVICE_REPAIRABLE
    assert job.last_heartbeat("a").failures[-1].runtime_status == 1205
    exit_rank(job, 0, 1, "nrt_execute: status=1205")
    await job.until_verdict("a")
    assert job.last_heartbeat("b").verdict is None


async def test_a_failed_collective_restarts_all_ranks_in_place(job: AgentJob) -> None:
    await start_with_kernel_logs(job, "a", "b", "c")
    for rank in range(3):
        exit_rank(job, rank, 1, "NRT_EXEC_HW_ERR_COLLECTIVES")
    await job.until_training("a", "b", "c", attempt=1)
    for name in ("a", "b", "c"):
        heartbeat = job.last_heartbeat(name)
        assert heartbeat.verdict is None
        assert heartbeat.restarts[-1].cause is Cause.PEER_LOST
    assert not job.rank_starts(attempt=2), "failures at the same moment count once"


async def test_a_device_error_in_the_kernel_log_withdraws_its_node(job: AgentJob) -> None:
    await start_with_kernel_logs(job, "a", "b")
    write_kernel_line(job, "b", "eth0: renamed from veth1")
    write_kernel_line(job, "b", SRAM)
    (event,) = (await job.until_heartbeat("b", lambda heartbeat: heartbeat.kernel, "a kernel event")).kernel
    assert (event.sequence, event.line) == (0, SRAM)
    assert not job.last_heartbeat("a").kernel
    await job.until_training("a", "b", step=job.last_heartbeat("a").progress.step + 3)
    exit_rank(job, 1, 76, "Connection closed by peer")
    heartbeat = await job.until_heartbeat("b", lambda heartbeat: heartbeat.verdict, "the verdict")
    assert heartbeat.restarts == ()
    assert job.last_heartbeat("a").verdict is None


async def test_a_rule_added_to_a_running_job_stops_it(job: AgentJob) -> None:
    await start_with_kernel_logs(job, "a", "b")
    exit_rank(job, 0, 3, "no seat is free")
    await job.until_training("a", "b", attempt=1, step=8)
    rule = {"exitCodes": [3], "message": "no seat", "cause": "UserError", "action": "Stop"}
    (job.folder / "rules.json").write_text(json.dumps([rule]))
    exit_rank(job, 0, 3, "no seat is free")
    await job.until_verdict("a")
    await job.until_phase("Failed", "b")
