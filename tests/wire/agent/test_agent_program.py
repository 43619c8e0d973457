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

from tests.testing.suite.processes import has_ended
from tests.testing.suite.timeouts import scaled
from tests.wire.agent.agent_job import HERE, AgentJob
from trainium_contract.wire import worker_env
from trainium_contract.wire.messages import RoleEndpoints, Transition
from trainium_contract.worker_process.process_tree import list_children

DDP = str(HERE / "fakes" / "program_ddp.py")
MEMORY = str(HERE / "fakes" / "program_memory.py")
PATTERN = r"step: *(?P<step>\d+) loss: *(?P<loss>\S+)"


def program_environment(*command: str, **fields: Any) -> dict[str, str]:
    """Return what the operator adds to the environment of a worker."""
    spec = {"image": "team/train:1", "command": command, **fields}
    return {
        worker_env.ENV_PROGRAM: json.dumps(spec),
        worker_env.ENV_PROCESSES_PER_NODE: str(fields.get("processesPerNode", 1)),
    }


def shell_environment(script: str, **fields: Any) -> dict[str, str]:
    return program_environment("/bin/sh", "-c", script, **fields)


async def start_generation(job: AgentJob, *names: str, processes: int = 1, **extra: str) -> None:
    """Start agents and give them generation 1."""
    job.start(*names, **extra)
    await job.until_registered(*names)
    await job.coordinator.publish([*names], processes=processes)


async def test_a_ddp_program_restarts_in_place_from_its_checkpoint(job: AgentJob, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    checkpoints = {"path": str(folder), "committed": "step-{step}.pt"}
    command = (sys.executable, DDP, "20", str(folder), "1:8")
    extra = program_environment(*command, progress={"pattern": PATTERN}, checkpoints=checkpoints)
    await start_generation(job, "a", "b", **extra)
    agents = {name: agent.pid for name, agent in job.agents.items()}

    failure = (await job.until_heartbeat("b", lambda heartbeat: heartbeat.failures, "the failure")).failures[-1]
    assert (failure.exit_code, failure.rank, failure.attempt) == (137, 1, 0)
    assert not job.last_heartbeat("a").failures
    await job.until_heartbeat(
        "a", lambda heartbeat: heartbeat.restarts and heartbeat.restarts[-1].resumed_at, "it has resumed"
    )
    assert {name: agent.pid for name, agent in job.agents.items()} == agents
    await job.until_phase("Finished", "a", "b")
    await job.until_ended("a", "b")

    heartbeat = job.last_heartbeat("a")
    assert heartbeat.attempt == 1
    assert heartbeat.progress.step == 20
    assert heartbeat.progress.loss is not None
    assert heartbeat.progress.hang_detection == "Steps"
    steps = [line.split()[3] for line in job.agents["a"].log.splitlines() if "step: " in line]
    first, second = steps[: steps.index("8") + 1], steps[steps.index("8") + 1 :]
    assert first[:8] == [str(step) for step in range(1, 9)]
    assert int(second[0]) in (8, 9, 10), "it resumes from its newest checkpoint"
    assert [agent.code for agent in job.agents.values()] == [0, 0]


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
async def test_a_surviving_rank_saves_the_newest_step_before_it_is_killed(
    job: AgentJob, tmp_path: Path, fault: str
) -> None:
    extra = program_environment(sys.executable, MEMORY, "30", "12", fault, str(tmp_path / "marker"))
    extra |= {worker_env.ENV_HANG_LIMITS: json.dumps({"stepFloorSeconds": scaled(3.0), "stepFactor": 2.0})}
    await start_generation(job, "a", "b", **extra)
    await job.until_phase("Finished", "a", "b")
    log = job.agents["a"].log
    assert job.last_heartbeat("a").attempt == 1, log + job.agents["b"].log
    assert "step 11 is saved by rank 0" in log or "step 12 is saved by rank 0" in log
    if fault == "SIGSTOP":
        assert "rank 0 has saved the newest step for all ranks" in log
    resumed = {
        line.split()[-1] for name in ("a", "b") for line in job.agents[name].log.splitlines() if "resumed" in line
    }
    assert resumed in ({"0", "11"}, {"0", "12"})


async def test_a_program_reads_the_ready_pods_of_a_role_and_is_not_hung_while_it_waits_for_them(
    job: AgentJob, tmp_path: Path
) -> None:
    script = tmp_path / "asks.py"
    script.write_text(
        "import os, time, trainium_worker\n"
        "print('at start:', os.environ['TRAINIUM_ROLE_ROLLOUT'], flush=True)\n"
        "for step in range(1, 9): trainium_worker.step(step); time.sleep(0.05)\n"
        "while len(trainium_worker.endpoints('rollout')) < 2: time.sleep(0.05)\n"
        "print('now:', *trainium_worker.endpoints('rollout'), flush=True)\n"
    )
    limits = {"stepFloorSeconds": 1.0, "stepFactor": 2.0}
    extra = program_environment(sys.executable, str(script)) | {worker_env.ENV_HANG_LIMITS: json.dumps(limits)}
    job.start("a", **extra)
    await job.until_registered("a")
    first = RoleEndpoints(addresses={"rollout": ("10.0.0.1:8000",)}, is_waiting=True)
    await job.coordinator.publish_endpoints(first)
    await job.coordinator.publish(["a"])
    await job.until_heartbeat("a", lambda heartbeat: heartbeat.progress and heartbeat.progress.step == 8, "8 steps")
    await asyncio.sleep(3)  # three times the limit for a step
    assert job.last_heartbeat("a").attempt == 0
    await job.coordinator.publish_endpoints(
        RoleEndpoints(addresses={"rollout": ("10.0.0.1:8000", "10.0.0.2:8000")}, is_waiting=False)
    )
    await job.until_phase("Finished", "a")
    log = job.agents["a"].log
    assert "at start: 10.0.0.1:8000\n" in log
    assert "now: 10.0.0.1:8000 10.0.0.2:8000\n" in log
    assert job.last_heartbeat("a").attempt == 0


async def test_a_shell_script_has_the_environment_of_torchrun(job: AgentJob) -> None:
    script = 'echo "r=$RANK w=$WORLD_SIZE l=$LOCAL_RANK/$LOCAL_WORLD_SIZE g=$GROUP_RANK/$GROUP_WORLD_SIZE"; '
    script += 'echo "s=$TORCHELASTIC_USE_AGENT_STORE a=$MASTER_ADDR o=$OMP_NUM_THREADS"; sleep 0.5'
    await start_generation(job, "a", "b", processes=2, **shell_environment(script, processesPerNode=2))
    await job.until_phase("Finished", "a", "b")
    await job.until_ended("a", "b")
    assert "[rank 0] r=0 w=4 l=0/2 g=0/2" in job.agents["a"].log
    assert "[rank 3] r=3 w=4 l=1/2 g=1/2" in job.agents["b"].log
    assert f"s=False a={job.agents['a'].ip} o=1" in job.agents["b"].log
    assert job.last_heartbeat("a").progress.step == 0


async def test_repeated_failures_are_a_verdict_with_the_last_line(job: AgentJob) -> None:
    await start_generation(job, "a", **shell_environment("echo the fault is in line 7; exit 3"))
    verdict = await job.until_verdict("a")
    assert verdict.exit_code == 3
    assert "the fault is in line 7" in verdict.message
    assert job.last_heartbeat("a").attempt > 0
    job.coordinator.failed = True  # the pod ends by itself, so that its log stays
    await job.until_ended("a")
    assert job.agents["a"].code == 3


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (("nowhere-to-be-found",), "program.command nowhere-to-be-found is not in PATH="),
        (("/opt/train.sh",), "program.command /opt/train.sh does not exist in the file system of image team/train:1"),
        (("/etc/passwd",), "program.command /etc/passwd of image team/train:1 cannot be executed (Permission denied)"),
    ],
)
async def test_a_command_that_cannot_start_is_a_user_error(
    job: AgentJob, command: tuple[str, ...], sentence: str
) -> None:
    await start_generation(job, "a", **program_environment(*command))
    verdict = await job.until_verdict("a")
    assert verdict.exit_code == 64
    assert sentence in verdict.message
    assert job.last_heartbeat("a").attempt == 0


async def test_a_missing_working_directory_is_a_user_error(job: AgentJob) -> None:
    await start_generation(job, "a", **shell_environment("true", workingDirectory="/nowhere"))
    verdict = await job.until_verdict("a")
    assert verdict.exit_code == 64
    assert "program.workingDirectory /nowhere cannot be entered (No such file or directory)" in verdict.message


@pytest.mark.parametrize("start", ["setsid sleep 300", "sleep 300"])
async def test_a_program_in_the_background_is_a_user_error(job: AgentJob, start: str) -> None:
    await start_generation(job, "a", **shell_environment(f"{start} & echo $! > {job.folder}/pid; sleep 0.3"))
    verdict = await job.until_verdict("a")
    assert verdict.exit_code == 64
    assert "ended with code 0 after" in verdict.message
    assert "stay in the foreground" in verdict.message
    job.agents["a"].signal(signal.SIGTERM)
    await job.until_ended("a")
    assert has_ended(int((job.folder / "pid").read_text()))


@pytest.mark.parametrize("script", ["{} | cat", "{}; echo saved > /dev/null"])
async def test_an_error_behind_the_success_of_a_shell_is_reported(job: AgentJob, script: str) -> None:
    fails = f"{sys.executable} -c 'raise ValueError(7)' 2>&1"
    await start_generation(job, "a", **shell_environment(script.format(fails)))
    finished = await job.until_heartbeat("a", lambda heartbeat: heartbeat.phase == "Finished", "its end")
    assert "although its output ends with 'ValueError: 7'" in finished.progress.problem
    await job.until_ended("a")


async def test_child_processes_end_with_their_program(job: AgentJob) -> None:
    script = "test $TORCHELASTIC_RESTART_COUNT = 1 && exit 0; for n in 1 2; do sh -c 'sleep 300' & "
    script += f"echo $! >> {job.folder}/pids-$GROUP_RANK; done; sleep 1; test $GROUP_RANK = 1 && exit 9; wait"
    await start_generation(job, "a", "b", **shell_environment(script))
    assert (await job.until_heartbeat("b", lambda heartbeat: heartbeat.failures, "the failure")).failures[
        -1
    ].exit_code == 9
    await job.until_phase("Finished", "a", "b")
    await job.until_ended("a", "b")
    pids = [int(text) for rank in (0, 1) for text in (job.folder / f"pids-{rank}").read_text().split()]
    assert len(pids) == 4
    assert [pid for pid in pids if not has_ended(pid)] == []


LEAVING_PROGRAM = """
import os, subprocess, sys, time
from pathlib import Path

def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

folder, start = Path(sys.argv[1]), os.environ["TRAINIUM_GENERATION"] + "." + os.environ["TRAINIUM_ATTEMPT"]
old = [int(file.read_text()) for file in folder.glob("child-*")]
print("begin", start, "old", len(old), "alive", sum(map(is_alive, old)), flush=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:  # a daemon: neither the parent nor the session is the rank
        (folder / "draft").write_text(str(os.getpid()))
        (folder / "draft").rename(folder / f"child-{start}-daemon")
        time.sleep(300)
    os._exit(0)
command = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
child = subprocess.Popen([sys.executable, "-c", command], start_new_session=True, env={})
(folder / f"child-{start}-session").write_text(str(child.pid))
while not (folder / f"child-{start}-daemon").exists():
    time.sleep(0.01)
(folder / f"rank-{start}").write_text(str(os.getpid()))
print("running", start, flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("transition", [Transition.IMMEDIATE, Transition.GRACEFUL])
@pytest.mark.parametrize("warm", ["Auto", "Never"])
async def test_no_process_of_an_attempt_is_alive_when_the_next_begins(
    job: AgentJob, tmp_path: Path, warm: str, transition: Transition
) -> None:
    program = program_environment(sys.executable, "-c", LEAVING_PROGRAM, str(tmp_path), warm=warm)
    await start_generation(job, "a", **program)
    await job.until(lambda: "running 1.0" in job.agents["a"].log, "the first attempt")
    os.kill(int((tmp_path / "rank-1.0").read_text()), signal.SIGKILL)
    await job.until(lambda: "running 1.1" in job.agents["a"].log, "the restart in place")
    assert "begin 1.1 old 2 alive 0" in job.agents["a"].log
    await job.coordinator.publish(["a"], transition)
    await job.until(lambda: "running 2.0" in job.agents["a"].log, "the planned change")
    assert "begin 2.0 old 4 alive 0" in job.agents["a"].log
    job.agents["a"].signal(signal.SIGTERM)
    await job.until_ended("a")
    pids = read_pids(tmp_path)
    assert (len(pids), [pid for pid in pids if not has_ended(pid)]) == (6, [])


def read_pids(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in folder.glob("child-*")]


async def test_a_program_that_ignores_sigterm_is_killed_after_its_grace(job: AgentJob) -> None:
    script = f'trap "" TERM; echo $$ > {job.folder}/pid; echo up; while true; do sleep 0.1; done'
    await start_generation(job, "a", **shell_environment(script), TRAINIUM_GRACE_SECONDS="1")
    await job.until(lambda: "up" in job.agents["a"].log, "the program runs")
    started_at = time.monotonic()
    job.agents["a"].signal(signal.SIGTERM)
    await job.until_ended("a")
    assert time.monotonic() - started_at >= 1
    assert has_ended(int((job.folder / "pid").read_text()))


async def test_steps_after_an_ignored_request_to_stop_are_reported_to_the_operator(job: AgentJob) -> None:
    """A restart repeats them, so they must not vanish with the generation that made them."""
    script = f'trap "" TERM; test $TRAINIUM_GENERATION = 1 && n=0 || n={10**6}; '
    script += "while true; do n=$((n+1)); echo step $n; sleep 0.05; done"
    await start_generation(job, "a", **shell_environment(script, progress=STEP_PATTERN), TRAINIUM_GRACE_SECONDS="2")
    await job.until_training("a", step=5)
    before = job.last_heartbeat("a").progress.step
    await job.coordinator.publish(["a"], Transition.GRACEFUL)
    await job.until_training("a", generation=2, step=10**6)
    left = [each for each in job.coordinator.heartbeats["a"] if each.generation == 2 and each.phase != "Training"]
    assert max(each.progress.step for each in left) >= before + 20
    assert left[-1].killed_generation == 1
    assert "the ranks did not end within 2 s of the request" in job.agents["a"].log


async def test_a_program_saves_within_its_grace_after_sigterm(job: AgentJob) -> None:
    script = f'trap "echo saved > {job.folder}/saved; exit 0" TERM; echo up; while true; do sleep 0.1; done'
    await start_generation(job, "a", **shell_environment(script))
    await job.until(lambda: "up" in job.agents["a"].log, "the program runs")
    job.agents["a"].signal(signal.SIGTERM)
    await job.until_ended("a")
    assert (job.folder / "saved").read_text() == "saved\n"
    assert job.agents["a"].code == 75, "it was asked to stop, so it is not complete"


STOPPING_PROGRAM = """
import sys, time, trainium_worker
for step in range(1, 3000):
    time.sleep(0.02)
    trainium_worker.step(step)
    if trainium_worker.should_stop():
        trainium_worker.saved(step, trainium_worker.MEMORY)
        print("kept" if trainium_worker.is_kept(step) else "saved", step, flush=True)
        sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [75, 0])
async def test_ranks_that_check_for_a_stop_end_after_the_same_step(job: AgentJob, code: int) -> None:
    """Whatever success they report, the program is not complete: it was asked to stop before its last step."""
    await start_generation(job, "a", "b", **program_environment(sys.executable, "-c", STOPPING_PROGRAM, str(code)))
    await job.until_training("a", "b", step=5)
    job.agents["a"].signal(signal.SIGTERM)
    await job.until_ended("a")
    await job.until(lambda: "saved" in job.agents["b"].log, "the other rank stops")
    saved = [line.split()[-1] for name in ("a", "b") for line in job.agents[name].log.splitlines() if " saved " in line]
    assert len(saved) == 2
    assert saved[0] == saved[1]
    await job.until_phase("Yielded", "b")
    assert job.agents["a"].code == 75


async def test_ranks_keep_a_step_in_memory_when_their_pods_are_in_the_next_generation(job: AgentJob) -> None:
    await start_generation(job, "a", **program_environment(sys.executable, "-c", STOPPING_PROGRAM, "75"))
    job.start("b", **program_environment(sys.executable, "-c", STOPPING_PROGRAM, "75"))
    await job.until_registered("b")
    await job.until_training("a", step=5)
    await job.coordinator.publish(["a", "b"], Transition.GRACEFUL)
    await job.until_training("a", "b", generation=2, step=5)
    assert "kept" in job.agents["a"].log
    await job.coordinator.publish(["b"], Transition.GRACEFUL)
    await job.until(lambda: "saved" in job.agents["a"].log, "the rank of the pod that is not a member stops")
    await job.until(lambda: "saved" in job.agents["b"].log, "the other rank stops")


COUNTING = "n=0; while true; do n=$((n+1)); echo step $n; sleep 0.1; "
COUNTING += "test $n = 20 -a $TORCHELASTIC_RESTART_COUNT = 0 && kill -STOP $$; done"
STEP_PATTERN = {"pattern": r"step (?P<step>\d+)"}


@pytest.mark.parametrize("script", [COUNTING, f"sh -c '{COUNTING}' & wait"])
async def test_a_stopped_program_is_hung_by_its_steps(job: AgentJob, script: str) -> None:
    """The limit of a save does not apply to it, although its output does not show whether it saves."""
    extra = {worker_env.ENV_HANG_LIMITS: json.dumps({"stepFloorSeconds": 1})}
    await start_generation(job, "a", **shell_environment(script, progress=STEP_PATTERN), **extra)
    await job.until_training("a", step=10)
    await job.until_training("a", attempt=1, step=5)
    failure = job.last_heartbeat("a").failures[-1]
    assert failure.exit_code == 77
    assert "made no progress" in failure.message
    assert "stopped by a signal" in failure.message


async def test_a_stopped_rank_that_prints_nothing_hangs_those_that_wait_for_it(job: AgentJob) -> None:
    folder = job.folder
    worker = f"n=0; while true; do n=$((n+1)); echo $n > {folder}/draft; mv {folder}/draft {folder}/n; sleep 0.1; "
    worker += "test $n = 20 -a $TORCHELASTIC_RESTART_COUNT = 0 && kill -STOP $$; done"
    printer = f'while true; do m=$(cat {folder}/n); test "$m" != "$o" && echo step $m; o=$m; sleep 0.05; done'
    script = f"if test $RANK = 1; then {worker}; fi; rm -f {folder}/n; sleep 0.5; {printer}"
    extra = {worker_env.ENV_HANG_LIMITS: json.dumps({"stepFloorSeconds": 1})}
    await start_generation(job, "a", "b", **shell_environment(script, progress=STEP_PATTERN), **extra)
    await job.until_training("a", attempt=1, step=5)
    failure = job.last_heartbeat("b").failures[-1]
    assert (failure.exit_code, failure.rank) == (77, 1)
    assert "stopped by a signal" in failure.message
    assert not job.last_heartbeat("a").failures


async def test_an_idle_program_is_hung_by_its_output_and_processor_time(job: AgentJob) -> None:
    """The first attempt falls silent and idle; the second works without a word, which is no hang."""
    script = "echo begins; test $TORCHELASTIC_RESTART_COUNT = 0 && sleep 300; while true; do :; done"
    extra = {worker_env.ENV_HANG_LIMITS: json.dumps({"stepFloorSeconds": 1, "initSeconds": 3})}
    await start_generation(job, "a", **shell_environment(script), **extra)
    heartbeat = await job.until_heartbeat("a", lambda heartbeat: heartbeat.attempt == 1, "the restart")
    assert heartbeat.failures[-1].exit_code == 77
    await asyncio.sleep(5)
    heartbeat = job.last_heartbeat("a")
    assert (heartbeat.attempt, heartbeat.phase, heartbeat.progress.hang_detection) == (1, "Training", "Output")


async def test_a_killed_standby_of_a_program_is_replaced(job: AgentJob) -> None:
    await start_generation(job, "a", **shell_environment(f"echo $$ >> {job.folder}/pids; exec sleep 300"))
    pids = job.folder / "pids"
    await job.until(lambda: pids.exists() and pids.read_text(), "the program runs")
    first = int(pids.read_text())
    for child in list_children(job.agents["a"].pid):
        if child != first:
            os.kill(child, signal.SIGKILL)
    await job.until(lambda: "starting another" in job.agents["a"].log, "another one")
    os.kill(first, signal.SIGKILL)
    await job.until(lambda: len(pids.read_text().split()) == 2, "the program runs again")
    assert not has_ended(int(pids.read_text().split()[1]))
    assert (await job.until_heartbeat("a", lambda heartbeat: heartbeat.failures, "the failure")).failures[
        -1
    ].exit_code == 137


async def test_a_warm_standby_forks_ranks_with_imported_modules(job: AgentJob, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, time\n"
        "warm = 'colorsys' in sys.modules\n"
        "import colorsys\n"
        "print('warm', warm, sys.argv, __name__, os.getcwd(), flush=True)\n"
        "time.sleep(0.5)\n"
        "sys.exit(3 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)\n"
    )
    spec = program_environment(sys.executable, "-u", str(script), "--x", workingDirectory=str(tmp_path))
    await start_generation(job, "a", **spec)
    await job.until_phase("Finished", "a")
    await job.until_ended("a")
    assert job.agents["a"].log.count(f"warm True ['{script}', '--x'] __main__ {tmp_path}") == 2
    assert job.last_heartbeat("a").attempt == 1


async def test_a_new_pod_imports_ahead_what_ranks_of_another_pod_have_imported_late(
    job: AgentJob, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import importlib, os, sys, time\n"
        "print('rank', os.environ['RANK'], 'warm', 'wave' in sys.modules, flush=True)\n"
        "importlib.import_module('wa' + 've')\n"
        "time.sleep(300)\n"
    )
    spec = program_environment(sys.executable, str(script), workingDirectory=str(tmp_path))
    await start_generation(job, "a", **spec)
    state = job.coordinator
    await job.until(lambda: state.imported and "wave" in state.imported.modules, "the first member has sent it")
    job.start("b", **spec)
    await job.until_registered("b")
    await job.until_heartbeat("b", lambda heartbeat: heartbeat.ready, "its standby is warm")
    await state.publish(["a", "b"])
    await job.until(lambda: "rank 1 warm" in job.agents["b"].log, "its rank runs")
    assert "rank 0 warm False" in job.agents["a"].log, "the source does not name the module"
    assert "rank 1 warm True" in job.agents["b"].log


async def test_the_agent_serves_the_store_of_ranks_whose_standby_has_imported_torch(
    job: AgentJob, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "ranks = torch.ones(())\n"
        "dist.all_reduce(ranks)\n"
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print(f\"attempt {attempt}, {ranks:.0f} ranks\", os.environ['TORCHELASTIC_USE_AGENT_STORE'], flush=True)\n"
        "os._exit(3 if attempt == '0' else 0)\n"
    )
    await start_generation(job, "a", "b", **program_environment(sys.executable, str(script)))
    await job.until_phase("Finished", "a", "b")
    await job.until_ended("a", "b")
    for agent in job.agents.values():
        for attempt in (0, 1):
            assert f"attempt {attempt}, 2 ranks True" in agent.log
