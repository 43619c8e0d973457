"""Define the rows in which a job runs a program without support for it (`tests/testing/cluster/train_ddp.py`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.faults.environment import STEPS
from benchmarks.faults.recovery import SPARE_OR_REPLACE, ExpectedRecovery, Run, expect_node_lost
from benchmarks.faults.row import Row
from benchmarks.faults.rows.pods import terminate_agents

if TYPE_CHECKING:
    from benchmarks.faults.record import RunResult

_SAVE_EVERY_STEPS = 5
_MAX_STEPS_LOST = _SAVE_EVERY_STEPS + 1
"""The steps since the program's checkpoint, and the current one."""
_PROGRAM = rf"""
program:
  image: team/own:5
  command:
    - sh
    - -c
    - >-
      echo $$ >$TRAINIUM_FAULTS_DIR/pid-$TRAINIUM_POD_NAME-$LOCAL_RANK;
      exec python /cache/faults/lib/train_ddp.py --folder /checkpoints/$TRAINIUM_NAMESPACE/$TRAINIUM_JOB
      --steps {STEPS} --save-every {_SAVE_EVERY_STEPS} --seconds-per-step 0.15
  progress: {{pattern: 'step: (?P<step>\d+) loss: (?P<loss>\S+)'}}
  batch: {{globalSize: 12}}
recovery: {{hang: {{saveSeconds: 5}}}}
"""

_IN_OWN_SESSION = _PROGRAM.replace(
    "exec python",
    """setsid sh -c 'echo $$ >>$TRAINIUM_FAULTS_DIR/children-$TRAINIUM_POD_NAME; exec "$@"' child python""",
).replace("--seconds-per-step 0.15", "--seconds-per-step 0.15; exit $?")
"""The same behind a shell, in a separate session, as torchrun starts its workers."""


def _signal_rank(run: Run, pod: str, signal: str, cause: str) -> RunResult:
    expected = ExpectedRecovery(
        causes=frozenset({cause}),
        rungs=frozenset({"InPlace"}),
        pod=pod,
        pods_joined=0,
        max_steps_lost=_MAX_STEPS_LOST,
        timeout_seconds=180,
    )
    return run.measure_recovery(lambda: run.target.signal(pod, signal), expected, note=pod)


def _kill_rank(run: Run) -> RunResult:
    run.target.wait_until_stable(3, seconds=180)
    return _signal_rank(run, run.random_member()["podName"], "KILL", "Crash")


def _kill_leader(run: Run) -> RunResult:
    run.target.wait_until_stable(3, seconds=180)
    pod = run.random_member()["podName"]
    result = _signal_rank(run, pod, "KILL", "Crash")
    children = f"/cache/faults/{run.target.commands.name}/children-{pod}"
    alive = run.target.shell(pod, f"for pid in $(cat {children}); do kill -0 $pid 2>/dev/null && echo $pid; done; true")
    if len(alive.split()) == 1:
        return result
    return replace(result, deviations=(*result.deviations, f"not one child of two attempts is alive, but: {alive}"))


def _stop_rank(run: Run) -> RunResult:
    run.target.wait_until_stable(3, seconds=180)
    return _signal_rank(run, run.target.members()[0]["podName"], "STOP", "Hang")


def _terminate_agents(run: Run) -> RunResult:
    run.target.wait_until_stable(3, seconds=180)
    expected = ExpectedRecovery(
        causes=frozenset({"PodLost"}),
        rungs=SPARE_OR_REPLACE,
        suspect="",
        max_steps_lost=_MAX_STEPS_LOST,
        max_interruptions=6,
        timeout_seconds=180,
    )
    return terminate_agents(run, expected)


def _fail_node(run: Run) -> RunResult:
    run.target.wait_until_stable(3, seconds=180)
    member, env = run.random_member(), run.env
    node = member["nodeName"]
    if env.move_operator_off(node):
        run.target.wait_until_stable()
    # Ranks that lose a peer end first, with an error of gloo, which is not a failure.
    expected = expect_node_lost(node, max_steps_lost=_MAX_STEPS_LOST, timeout_seconds=180)
    note = f"power off {node}, rank {member['nodeRank']}"
    try:
        return run.measure_recovery(lambda: env.cluster.power_off(node), expected, note=note)
    finally:
        env.replace_node(node)


ROWS = (
    Row(
        number=47,
        fault="SIGKILL of a rank of a program",
        injected="`kill -9` of a random process of a DDP script",
        expected="all ranks restart in place, pods keep their uid; the steps since the script's checkpoint are lost",
        checked="history: cause Crash, rung InPlace, that pod; uids; steps lost at most 6",
        run_once=_kill_rank,
        spec=_PROGRAM,
        job_per_run=True,
        max_runs=5,
        kubelet=False,
    ),
    Row(
        number=47,
        part="b",
        fault="SIGKILL of a launcher, whose child has its own session",
        injected="`kill -9` of the shell that started the DDP script of a random member in a separate session",
        expected="the child ends before all ranks restart in place; the steps since the script's checkpoint are lost",
        checked="history: cause Crash, rung InPlace, that pod; uids; steps lost at most 6; one child is alive",
        run_once=_kill_leader,
        spec=_IN_OWN_SESSION,
        job_per_run=True,
        max_runs=5,
        kubelet=False,
    ),
    Row(
        number=47,
        part="c",
        fault="agents of a program asked to end, their pods not deleted",
        injected="SIGTERM to the main process of one worker, of all at once, or of all 1.6 s apart (random)",
        expected="the pods fail with 75 and are replaced; the script resumes, and the job never counts as complete",
        checked="history: PodLost, Spare or Replace, no node suspected; steps lost at most 6",
        run_once=_terminate_agents,
        spec=_PROGRAM,
        job_per_run=True,
        max_runs=6,
        kubelet=False,
    ),
    Row(
        number=48,
        fault="node of a program lost",
        injected="power off of the node of a random member",
        expected="a spare takes the rank and the script resumes from its checkpoint",
        checked="history: one entry, cause NodeLost, that node; one pod replaced; steps lost at most 6",
        run_once=_fail_node,
        spec=_PROGRAM,
        job_per_run=True,
        max_runs=5,
        kubelet=False,
    ),
    Row(
        number=49,
        fault="rank of a program stops",
        injected="SIGSTOP of rank 0, which reports the steps",
        expected="detected by steps that do not end; all ranks restart in place",
        checked="history: cause Hang, rung InPlace, that pod; uids; steps lost at most 6",
        run_once=_stop_rank,
        spec=_PROGRAM,
        job_per_run=True,
        max_runs=5,
        kubelet=False,
    ),
)
