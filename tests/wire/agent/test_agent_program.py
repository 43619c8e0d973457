"""Training programs under real agents: start, progress, restart in place, stop, and errors."""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.wire.agent.agent_world import HERE, AgentJob, is_alive
from trainium_agent.linux import kernel
from trainium_contract.wire import worker_env

DDP = str(HERE / "fakes" / "program_ddp.py")
PATTERN = r"step: *(?P<step>\d+) loss: *(?P<loss>\S+)"


def program(*command: str, **more: Any) -> dict[str, str]:
    """Return what the operator adds to the environment of a worker."""
    spec = {"image": "team/train:1", "command": command, **more}
    return {
        worker_env.ENV_PROGRAM: json.dumps(spec),
        worker_env.ENV_PROCESSES_PER_NODE: str(more.get("processesPerNode", 1)),
    }


def shell(script: str, **more: Any) -> dict[str, str]:
    return program("/bin/sh", "-c", script, **more)


async def begin(world: AgentJob, *names: str, processes: int = 1, **extra: str) -> None:
    """Start agents and give them generation 1."""
    world.start(*names, **extra)
    await world.registered(*names)
    await world.jobs.publish([*names], processes=processes)


async def test_a_ddp_program_restarts_in_place_from_its_checkpoint(world: AgentJob, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    checkpoints = {"path": str(folder), "committed": "step-{step}.pt"}
    command = (sys.executable, DDP, "20", str(folder), "1:8")
    extra = program(*command, progress={"pattern": PATTERN}, checkpoints=checkpoints, warm=["torch", "torch._dynamo"])
    await begin(world, "a", "b", **extra)
    agents = {name: agent.pid for name, agent in world.agents.items()}

    failure = (await world.heartbeat("b", lambda beat: beat.failures, "the failure")).failures[-1]
    assert (failure.exit_code, failure.rank, failure.attempt) == (137, 1, 0)
    assert not world.jobs.last("a").failures
    await world.heartbeat("a", lambda beat: beat.restarts and beat.restarts[-1].resumed_at, "it has resumed")
    assert {name: agent.pid for name, agent in world.agents.items()} == agents
    await world.phase("Finished", "a", "b")
    await world.ended("a", "b")

    beat = world.jobs.last("a")
    assert beat.attempt == 1
    assert beat.progress.step == 20
    assert beat.progress.loss is not None
    assert beat.progress.hang_detection == "Steps"
    steps = [line.split()[3] for line in world.agents["a"].log.splitlines() if "step: " in line]
    first, second = steps[: steps.index("8") + 1], steps[steps.index("8") + 1 :]
    assert first[:8] == [str(step) for step in range(1, 9)]
    assert int(second[0]) in (8, 9, 10), "it resumes from its newest checkpoint"
    assert [agent.code for agent in world.agents.values()] == [0, 0]


async def test_a_shell_script_has_the_environment_of_torchrun(world: AgentJob) -> None:
    script = 'echo "r=$RANK w=$WORLD_SIZE l=$LOCAL_RANK/$LOCAL_WORLD_SIZE g=$GROUP_RANK/$GROUP_WORLD_SIZE"; '
    script += 'echo "s=$TORCHELASTIC_USE_AGENT_STORE a=$MASTER_ADDR o=$OMP_NUM_THREADS"; sleep 0.5'
    await begin(world, "a", "b", processes=2, **shell(script, processesPerNode=2))
    await world.phase("Finished", "a", "b")
    await world.ended("a", "b")
    assert "[rank 0] r=0 w=4 l=0/2 g=0/2" in world.agents["a"].log
    assert "[rank 3] r=3 w=4 l=1/2 g=1/2" in world.agents["b"].log
    assert f"s=False a={world.agents['a'].ip} o=1" in world.agents["b"].log
    assert world.jobs.last("a").progress.step == 0


async def test_repeated_failures_are_a_verdict_with_the_last_line(world: AgentJob) -> None:
    await begin(world, "a", **shell("echo the fault is in line 7; exit 3"))
    verdict = await world.verdict("a")
    assert verdict.exit_code == 3
    assert "the fault is in line 7" in verdict.message
    assert world.jobs.last("a").attempt > 0


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (("nowhere-to-be-found",), "program.command nowhere-to-be-found is not in PATH="),
        (("/opt/train.sh",), "program.command /opt/train.sh does not exist in the file system of image team/train:1"),
        (("/etc/passwd",), "program.command /etc/passwd of image team/train:1 cannot be executed (Permission denied)"),
    ],
)
async def test_a_command_that_cannot_start_is_a_user_error(
    world: AgentJob, command: tuple[str, ...], sentence: str
) -> None:
    await begin(world, "a", **program(*command))
    verdict = await world.verdict("a")
    assert verdict.exit_code == 64
    assert sentence in verdict.message
    assert world.jobs.last("a").attempt == 0


async def test_a_missing_working_directory_is_a_user_error(world: AgentJob) -> None:
    await begin(world, "a", **shell("true", workingDirectory="/nowhere"))
    verdict = await world.verdict("a")
    assert verdict.exit_code == 64
    assert "program.workingDirectory /nowhere cannot be entered (No such file or directory)" in verdict.message


@pytest.mark.parametrize("start", ["setsid sleep 300", "sleep 300"])
async def test_a_program_in_the_background_is_a_user_error(world: AgentJob, start: str) -> None:
    await begin(world, "a", **shell(f"{start} & echo $! > {world.folder}/pid; sleep 0.3"))
    verdict = await world.verdict("a")
    assert verdict.exit_code == 64
    assert "ended with code 0 after" in verdict.message
    assert "stay in the foreground" in verdict.message
    world.agents["a"].signal(signal.SIGTERM)
    await world.ended("a")
    assert not is_alive(int((world.folder / "pid").read_text()))


async def test_child_processes_end_with_their_program(world: AgentJob) -> None:
    script = "test $TORCHELASTIC_RESTART_COUNT = 1 && exit 0; for n in 1 2; do sh -c 'sleep 300' & "
    script += f"echo $! >> {world.folder}/pids-$GROUP_RANK; done; sleep 1; test $GROUP_RANK = 1 && exit 9; wait"
    await begin(world, "a", "b", **shell(script))
    assert (await world.heartbeat("b", lambda beat: beat.failures, "the failure")).failures[-1].exit_code == 9
    await world.phase("Finished", "a", "b")
    await world.ended("a", "b")
    pids = [int(text) for rank in (0, 1) for text in (world.folder / f"pids-{rank}").read_text().split()]
    assert len(pids) == 4
    assert [pid for pid in pids if is_alive(pid)] == []


async def test_a_program_that_ignores_sigterm_is_killed_after_its_grace(world: AgentJob) -> None:
    script = f'trap "" TERM; echo $$ > {world.folder}/pid; echo up; while true; do sleep 0.1; done'
    await begin(world, "a", **shell(script), TRAINIUM_GRACE_SECONDS="1")
    await world.until(lambda: "up" in world.agents["a"].log, "the program runs")
    began = time.monotonic()
    world.agents["a"].signal(signal.SIGTERM)
    await world.ended("a")
    assert time.monotonic() - began >= 1
    assert not is_alive(int((world.folder / "pid").read_text()))


async def test_a_program_saves_within_its_grace_after_sigterm(world: AgentJob) -> None:
    script = f'trap "echo saved > {world.folder}/saved; exit 0" TERM; echo up; while true; do sleep 0.1; done'
    await begin(world, "a", **shell(script))
    await world.until(lambda: "up" in world.agents["a"].log, "the program runs")
    world.agents["a"].signal(signal.SIGTERM)
    await world.ended("a")
    assert (world.folder / "saved").read_text() == "saved\n"
    assert world.agents["a"].code == 75, "it was asked to stop, so it is not complete"


ASKS = """
import sys, time, trainium_worker
for step in range(1, 3000):
    time.sleep(0.02)
    trainium_worker.step(step)
    if trainium_worker.should_stop():
        print("saved", step, flush=True)
        sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [75, 0])
async def test_ranks_that_check_for_a_stop_end_after_the_same_step(world: AgentJob, code: int) -> None:
    """Whatever success they report, the program is not complete: it was asked to stop before its last step."""
    await begin(world, "a", "b", **program(sys.executable, "-c", ASKS, str(code)))
    await world.training("a", "b", step=5)
    world.agents["a"].signal(signal.SIGTERM)
    await world.ended("a")
    await world.until(lambda: "saved" in world.agents["b"].log, "the other rank stops")
    saved = [
        line.split()[-1] for name in ("a", "b") for line in world.agents[name].log.splitlines() if " saved " in line
    ]
    assert len(saved) == 2
    assert saved[0] == saved[1]
    await world.phase("Yielded", "b")
    assert world.agents["a"].code == 75


async def test_a_stopped_program_is_hung_by_its_steps(world: AgentJob) -> None:
    script = "n=0; while true; do n=$((n+1)); echo step $n; sleep 0.1; "
    script += "test $n = 20 -a $TORCHELASTIC_RESTART_COUNT = 0 && kill -STOP $$; done"
    limits = {"stepFloorSeconds": 1, "saveSeconds": 2, "initSeconds": 5}
    extra = {worker_env.ENV_HANG_LIMITS: json.dumps(limits)}
    await begin(world, "a", **shell(script, progress={"pattern": r"step (?P<step>\d+)"}), **extra)
    await world.training("a", step=10)
    await world.training("a", attempt=1, step=5)
    failure = world.jobs.last("a").failures[-1]
    assert failure.exit_code == 77
    assert "made no progress" in failure.message
    assert "stopped by a signal" in failure.message


async def test_an_idle_program_is_hung_by_its_output_and_processor_time(world: AgentJob) -> None:
    """The first attempt falls silent and idle; the second works without a word, which is no hang."""
    script = "echo begins; test $TORCHELASTIC_RESTART_COUNT = 0 && sleep 300; while true; do :; done"
    extra = {worker_env.ENV_HANG_LIMITS: json.dumps({"stepFloorSeconds": 1, "initSeconds": 3})}
    await begin(world, "a", **shell(script), **extra)
    beat = await world.heartbeat("a", lambda beat: beat.attempt == 1, "the restart")
    assert beat.failures[-1].exit_code == 77
    await asyncio.sleep(5)
    beat = world.jobs.last("a")
    assert (beat.attempt, beat.phase, beat.progress.hang_detection) == (1, "Training", "Output")


async def test_a_killed_standby_of_a_program_is_replaced(world: AgentJob) -> None:
    await begin(world, "a", **shell(f"echo $$ >> {world.folder}/pids; exec sleep 300"))
    pids = world.folder / "pids"
    await world.until(lambda: pids.exists() and pids.read_text(), "the program runs")
    first = int(pids.read_text())
    for child in kernel.children(world.agents["a"].pid):
        if child != first:
            os.kill(child, signal.SIGKILL)
    await world.until(lambda: "starting another" in world.agents["a"].log, "another one")
    os.kill(first, signal.SIGKILL)
    await world.until(lambda: len(pids.read_text().split()) == 2, "the program runs again")
    assert is_alive(int(pids.read_text().split()[1]))
    assert (await world.heartbeat("a", lambda beat: beat.failures, "the failure")).failures[-1].exit_code == 137


async def test_a_warm_standby_forks_ranks_with_imported_modules(world: AgentJob, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, time\n"
        "print('warm', 'colorsys' in sys.modules, sys.argv, __name__, os.getcwd(), flush=True)\n"
        "time.sleep(0.5)\n"
        "sys.exit(3 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)\n"
    )
    spec = program(sys.executable, "-u", str(script), "--x", warm=["colorsys"], workingDirectory=str(tmp_path))
    await begin(world, "a", **spec)
    await world.phase("Finished", "a")
    await world.ended("a")
    assert world.agents["a"].log.count(f"warm True ['{script}', '--x'] __main__ {tmp_path}") == 2
    assert world.jobs.last("a").attempt == 1
