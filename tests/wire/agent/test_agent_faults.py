"""Runtime statuses, kernel lines and rules of the job, through real agents."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause

if TYPE_CHECKING:
    from pathlib import Path

    from agent_world import World

SRAM = "NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR instance-id=i-0 nd-id=3 nc-id=1 action=TERMINATE_INSTANCE"


async def job(world: World, *names: str, **extra: str) -> None:
    """Start agents that train as generation 1; each reads its own kernel log."""
    for name in names:
        kernel_log(world, name).touch()
        world.start(name, TRAINIUM_KERNEL_LOG=str(kernel_log(world, name)), **extra)
    await world.ready(*names)
    await world.jobs.publish([*names])
    await world.training(*names, step=3)


def kernel_log(world: World, name: str) -> Path:
    return world.folder / f"kmsg-{name}"


def write_kernel_line(world: World, name: str, line: str) -> None:
    with kernel_log(world, name).open("a") as file:
        file.write(f"3,1,99,-;{line}\n")


def leave(world: World, rank: int, code: int, words: str) -> None:
    world.command(f"exit-{rank}", f"{code}\n{words}")


async def test_a_crash_with_a_device_status_in_its_output_withdraws_the_pod(world: World) -> None:
    await job(world, "a", "b")
    leave(world, 1, 1, "XlaRuntimeError: nrt_execute failed with status 1202")
    await world.until(lambda: world.jobs.last("b").verdict, "the verdict of b")
    verdict = world.jobs.last("b").verdict
    assert (verdict.exit_code, verdict.runtime_status) == (1, 1202)
    assert "1202" in verdict.message
    assert world.jobs.last("a").verdict is None


async def test_a_repairable_device_restarts_in_place_and_withdraws_when_it_fails_again(world: World) -> None:
    await job(world, "a", "b")
    leave(world, 0, 1, "nrt_execute: status=1205")
    await world.training("a", "b", attempt=1, step=8)
    assert world.jobs.last("a").restarts[-1].cause is Cause.DEVICE_REPAIRABLE
    assert world.jobs.last("a").failures[-1].runtime_status == 1205
    leave(world, 0, 1, "nrt_execute: status=1205")
    await world.until(lambda: world.jobs.last("a").verdict, "the verdict of a")
    assert world.jobs.last("b").verdict is None


async def test_all_ranks_with_a_stuck_collective_restart_in_place_and_none_withdraws(world: World) -> None:
    await job(world, "a", "b", "c")
    for rank in range(3):
        leave(world, rank, 1, "NRT_EXEC_HW_ERR_COLLECTIVES")
    await world.training("a", "b", "c", attempt=1)
    for name in ("a", "b", "c"):
        beat = world.jobs.last(name)
        assert beat.verdict is None
        assert beat.restarts[-1].cause is Cause.PEER_LOST
    assert not world.starts(attempt=2), "failures at the same moment count once"


async def test_a_device_error_in_the_kernels_log_is_behind_the_lost_peer_of_that_node(world: World) -> None:
    await job(world, "a", "b")
    write_kernel_line(world, "b", "eth0: renamed from veth1")
    write_kernel_line(world, "b", SRAM)
    await world.until(lambda: world.jobs.last("b").kernel, "a kernel event of b")
    (event,) = world.jobs.last("b").kernel
    assert (event.sequence, event.line) == (0, SRAM)
    assert not world.jobs.last("a").kernel
    await world.training("a", "b", step=world.jobs.last("a").progress.step + 3)
    leave(world, 1, 76, "Connection closed by peer")
    await world.until(lambda: world.jobs.last("b").verdict, "the verdict of b")
    assert world.jobs.last("b").restarts == ()
    assert world.jobs.last("a").verdict is None


async def test_a_rule_that_comes_while_the_pods_run_stops_the_job(world: World) -> None:
    await job(world, "a", "b")
    leave(world, 0, 3, "no seat is free")
    await world.training("a", "b", attempt=1, step=8)
    rule = {"exitCodes": [3], "message": "no seat", "cause": "UserCode", "action": "Stop"}
    (world.folder / "rules.json").write_text(json.dumps([rule]))
    leave(world, 0, 3, "no seat is free")
    await world.until(lambda: world.jobs.last("a").verdict, "the verdict of a")
    await world.phase("Failed", "b")
