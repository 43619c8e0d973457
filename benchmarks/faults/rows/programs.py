"""Define the rows in which a job runs a program without support for it (`manifests/examples/train_ddp.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.faults.environment import STEPS
from benchmarks.faults.recovery import ExpectedRecovery, Run, expect_node_lost
from benchmarks.faults.row import Row

if TYPE_CHECKING:
    from benchmarks.faults.record import FaultRun

_SAVE_EVERY = 5
_LOST = _SAVE_EVERY + 1
"""Most lost steps: those since the program's checkpoint, and the current one."""
_PROGRAM = rf"""
program:
  image: team/own:5
  command:
    - sh
    - -c
    - >-
      echo $$ >$TRAINIUM_FAULTS_DIR/pid-$TRAINIUM_POD_NAME-$LOCAL_RANK;
      exec python /cache/faults/lib/train_ddp.py --folder /checkpoints/$TRAINIUM_NAMESPACE/$TRAINIUM_JOB
      --steps {STEPS} --save-every {_SAVE_EVERY} --seconds-per-step 0.15
  progress: {{pattern: 'step: (?P<step>\d+) loss: (?P<loss>\S+)'}}
  batch: {{globalSize: 12}}
recovery: {{hang: {{saveSeconds: 5}}}}
"""


def _inject(run: Run, signal: str, expect: ExpectedRecovery, pod: str) -> FaultRun:
    return run.inject(lambda: run.target.signal(pod, signal), expect, note=pod)


def _expect(cause: str, pod: str) -> ExpectedRecovery:
    rungs = frozenset({"InPlace"})
    return ExpectedRecovery(causes=frozenset({cause}), rungs=rungs, pod=pod, replaced=0, steps_lost=_LOST, seconds=180)


def _kill_rank(run: Run) -> FaultRun:
    run.target.until_stable(3, seconds=180)
    pod = run.random_member()["podName"]
    return _inject(run, "KILL", _expect("Crash", pod), pod)


def _stop_rank(run: Run) -> FaultRun:
    run.target.until_stable(3, seconds=180)
    pod = run.target.members()[0]["podName"]
    return _inject(run, "STOP", _expect("Hang", pod), pod)


def _fail_node(run: Run) -> FaultRun:
    run.target.until_stable(3, seconds=180)
    member, env = run.random_member(), run.env
    node = member["nodeName"]
    if env.move_operator_off(node):
        run.target.until_stable()
    # Ranks that lose a peer end first, with an error of gloo, which is not a failure.
    expect = expect_node_lost(node, steps_lost=_LOST, seconds=180)
    try:
        return run.inject(lambda: env.site.power_off(node), expect, note=f"power off {node}, rank {member['nodeRank']}")
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
