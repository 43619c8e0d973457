"""Restarts in place under real agents, exits that end a generation, and causes from output, kernel log and rules."""

import json
import os
import signal
from pathlib import Path

from tests.wire.agent.agent_world import AgentJob, is_alive
from trainium_contract.faults.causes import Cause


def kill_rank(world: AgentJob, rank: int, **which: int) -> int:
    pid = world.starts(rank=rank, **which)[-1]["pid"]
    os.kill(pid, signal.SIGKILL)
    return pid


async def test_a_killed_rank_restarts_all_ranks_in_place_and_no_agent(world: AgentJob) -> None:
    await world.train("a", "b", "c", "d", step=3)
    agents = {name: agent.pid for name, agent in world.agents.items()}

    kill_rank(world, 2)

    await world.training(*agents, attempt=1)
    again = world.starts(attempt=1)
    assert sorted(row["rank"] for row in again) == [0, 1, 2, 3]
    assert {name: agent.pid for name, agent in world.agents.items() if agent.code is None} == agents
    assert [row["ppid"] for row in sorted(again, key=lambda row: row["rank"])] == [*agents.values()]
    assert {row["nice"] for row in again} == {os.nice(0)}
    await world.until(
        lambda: all(world.jobs.last(name).restarts[-1].resumed_at for name in agents), "every restart resumed"
    )
    failure = world.jobs.last("c").failures[-1]
    assert (failure.exit_code, failure.rank, failure.attempt) == (137, 2, 0)
    assert failure.step >= 3
    assert not world.jobs.last("a").failures
    for name in agents:
        (restart,) = world.jobs.last(name).restarts
        assert restart.cause == ("Crash" if name == "c" else "PeerLost")
        assert restart.resume_step is not None
        assert restart.failed_at <= restart.detected_at <= restart.resumed_at


async def test_a_rank_restarts_in_place_while_the_coordinator_is_down(world: AgentJob) -> None:
    await world.train("a", "b", step=3)
    await world.servers[0].stop()

    kill_rank(world, 1)
    await world.until(lambda: len(world.starts(attempt=1)) == 2, "attempt 1 without a coordinator")

    await world.servers[0].start()
    await world.training("a", "b", attempt=1)
    assert world.jobs.last("b").failures[-1].exit_code == 137
    assert [name for name, _ in world.jobs.registrations].count("a") >= 2


async def test_several_ranks_of_one_pod_restart_together(world: AgentJob) -> None:
    await world.train("a", "b", processes=3, step=1)
    kill_rank(world, 4)
    await world.training("a", "b", attempt=1)
    again = world.starts(attempt=1)
    assert sorted(row["rank"] for row in again) == [0, 1, 2, 3, 4, 5]
    assert {row["pod"] for row in again if row["rank"] < 3} == {"a"}


async def test_a_user_error_ends_its_pod_with_a_verdict(world: AgentJob) -> None:
    await world.train("a", "b", step=3)
    world.command("exit-1", "64")
    await world.phase("Failed", "a", "b")
    verdict = await world.verdict("b")
    assert verdict.exit_code == 64
    assert "rank 1 leaves with 64" in verdict.message
    assert world.jobs.last("a").verdict is None
    assert not world.starts(attempt=1)
    assert not any(is_alive(row["pid"]) for row in world.starts())
    assert all(agent.code is None for agent in world.agents.values())
    await world.ended("b")
    assert world.agents["b"].code == 64
    assert "rank 1 leaves with 64" in world.agents["b"].log, "what kubectl logs shows from now on"
    assert world.jobs.last("a").phase == "Failed"
    assert world.agents["a"].code is None


async def test_a_program_that_cannot_be_imported_is_a_verdict(world: AgentJob) -> None:
    world.start("a", TRAINIUM_RANK_ENTRY="fake_broken:main")
    await world.registered("a")
    await world.jobs.publish(["a"])
    verdict = await world.verdict("a")
    assert verdict.exit_code == 1
    assert verdict.attempt == 1
    assert "a_module_that_nobody_has" in verdict.message


async def test_peers_of_a_withdrawn_pod_wait_for_its_replacement(world: AgentJob) -> None:
    await world.train("a", "b", spares=("spare",), step=3)
    world.command("exit-1", "80")
    assert (await world.verdict("b")).exit_code == 80
    beat = await world.heartbeat("a", lambda beat: beat.waiting_for == (1,), "it waits for node 1")
    assert beat.phase == "Joining"
    await world.jobs.publish(["a", "spare"])
    await world.training("a", "spare", generation=2)
    await world.phase("Standby", "b")


async def test_ranks_that_yield_without_an_order_restart_in_place(world: AgentJob) -> None:
    await world.train("a", "b", step=3)
    os.kill(world.starts(rank=1)[0]["pid"], signal.SIGTERM)
    await world.phase("Yielded", "a", "b")
    assert not world.jobs.last("a").failures
    await world.training("a", "b", attempt=1)
    assert world.jobs.last("a").restarts[-1].cause == "Yielded"


async def test_agents_without_their_store_wait_for_a_newer_generation(world: AgentJob) -> None:
    await world.train("a", "b", "c", spares=("spare",), step=3)
    world.agents["a"].signal(signal.SIGKILL)
    await world.ended("a")
    await world.until(lambda: not is_alive(world.starts(rank=0)[0]["pid"]), "its rank ended with it")
    for rank in (1, 2):
        kill_rank(world, rank)
    await world.until(
        lambda: all(world.jobs.last(name).waiting_for == (0,) for name in ("b", "c")), "the others wait for node 0"
    )
    await world.jobs.publish(["spare", "b", "c"])
    await world.training("spare", "b", "c", generation=2)


async def test_a_lost_standby_is_replaced_before_ranks_start(world: AgentJob) -> None:
    await world.train("a", step=3)
    standby = int(standby_of(world.agents["a"].pid))
    os.kill(standby, signal.SIGKILL)
    kill_rank(world, 0)
    await world.training("a", attempt=1)
    assert standby_of(world.agents["a"].pid) != str(standby)
    await world.ready("a")


def standby_of(agent: int) -> str:
    for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        if "standby" in Path(f"/proc/{pid}/cmdline").read_text():
            return pid
    return ""


async def test_an_export_resumes_after_more_kills_than_the_restart_limit(world: AgentJob) -> None:
    (world.control / "export").write_text("1000")
    (world.control / "last-step").write_text("10")  # before the start: every rank ends with the same step
    await world.train("a", "b", step=3, TRAINIUM_MAX_IN_PLACE_RESTARTS="1")

    def exports(name: str, attempt: int, beyond: float) -> bool:
        beat = world.jobs.last(name)
        progress = beat.progress
        return beat.attempt == attempt and progress.stage == "Export" and progress.stage_progress > beyond

    reached = 0.0
    for attempt in range(4):
        await world.until(
            lambda attempt=attempt, beyond=reached + 0.002: all(exports(name, attempt, beyond) for name in "ab"),
            f"attempt {attempt} exports",
        )
        kill_rank(world, attempt % 2, attempt=attempt)
        await world.until(lambda attempt=attempt: len(world.starts(attempt=attempt + 1)) == 2, "the next attempt")
        reached = int((world.control / "exported").read_text()) / 1000
    (world.control / "export").write_text("1")

    await world.phase("Finished", "a", "b")
    beat = world.jobs.last("a")
    assert [artifact.path for artifact in beat.progress.artifacts] == ["/out"]
    assert len(beat.restarts) == 4
    assert all(restart.resumed_at for restart in beat.restarts[:-1])
    assert beat.verdict is None


SRAM = "NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR instance-id=i-0 nd-id=3 nc-id=1 action=TERMINATE_INSTANCE"


async def job(world: AgentJob, *names: str, **extra: str) -> None:
    """Start agents that train as generation 1; each reads its own kernel log."""
    for name in names:
        kernel_log(world, name).touch()
        world.start(name, TRAINIUM_KERNEL_LOG=str(kernel_log(world, name)), **extra)
    await world.ready(*names)
    await world.jobs.publish([*names])
    await world.training(*names, step=3)


def kernel_log(world: AgentJob, name: str) -> Path:
    return world.folder / f"kmsg-{name}"


def write_kernel_line(world: AgentJob, name: str, line: str) -> None:
    with kernel_log(world, name).open("a") as file:
        file.write(f"3,1,99,-;{line}\n")


def exit_rank(world: AgentJob, rank: int, code: int, words: str) -> None:
    world.command(f"exit-{rank}", f"{code}\n{words}")


async def test_a_device_status_in_the_output_withdraws_the_pod(world: AgentJob) -> None:
    await job(world, "a", "b")
    exit_rank(world, 1, 1, "XlaRuntimeError: nrt_execute failed with status 1202")
    verdict = await world.verdict("b")
    assert (verdict.exit_code, verdict.runtime_status) == (1, 1202)
    assert "1202" in verdict.message
    assert world.jobs.last("a").verdict is None


async def test_a_repairable_device_withdraws_at_its_second_failure(world: AgentJob) -> None:
    await job(world, "a", "b")
    exit_rank(world, 0, 1, "nrt_execute: status=1205")
    await world.training("a", "b", attempt=1, step=8)
    assert world.jobs.last("a").restarts[-1].cause is Cause.DEVICE_REPAIRABLE
    assert world.jobs.last("a").failures[-1].runtime_status == 1205
    exit_rank(world, 0, 1, "nrt_execute: status=1205")
    await world.verdict("a")
    assert world.jobs.last("b").verdict is None


async def test_a_failed_collective_restarts_all_ranks_in_place(world: AgentJob) -> None:
    await job(world, "a", "b", "c")
    for rank in range(3):
        exit_rank(world, rank, 1, "NRT_EXEC_HW_ERR_COLLECTIVES")
    await world.training("a", "b", "c", attempt=1)
    for name in ("a", "b", "c"):
        beat = world.jobs.last(name)
        assert beat.verdict is None
        assert beat.restarts[-1].cause is Cause.PEER_LOST
    assert not world.starts(attempt=2), "failures at the same moment count once"


async def test_a_device_error_in_the_kernel_log_withdraws_its_node(world: AgentJob) -> None:
    await job(world, "a", "b")
    write_kernel_line(world, "b", "eth0: renamed from veth1")
    write_kernel_line(world, "b", SRAM)
    (event,) = (await world.heartbeat("b", lambda beat: beat.kernel, "a kernel event")).kernel
    assert (event.sequence, event.line) == (0, SRAM)
    assert not world.jobs.last("a").kernel
    await world.training("a", "b", step=world.jobs.last("a").progress.step + 3)
    exit_rank(world, 1, 76, "Connection closed by peer")
    beat = await world.heartbeat("b", lambda beat: beat.verdict, "the verdict")
    assert beat.restarts == ()
    assert world.jobs.last("a").verdict is None


async def test_a_rule_added_to_a_running_job_stops_it(world: AgentJob) -> None:
    await job(world, "a", "b")
    exit_rank(world, 0, 3, "no seat is free")
    await world.training("a", "b", attempt=1, step=8)
    rule = {"exitCodes": [3], "message": "no seat", "cause": "UserCode", "action": "Stop"}
    (world.folder / "rules.json").write_text(json.dumps([rule]))
    exit_rank(world, 0, 3, "no seat is free")
    await world.verdict("a")
    await world.phase("Failed", "b")
