"""Jobs of an independent program: a shell script that counts, and resumes from its own checkpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.api.json_objects import merge
from tests.testing.cluster.jobs import Job
from tests.testing.suite.timeouts import scaled, until

if TYPE_CHECKING:
    from tests.testing.cluster.shared_cluster import SharedCluster

REPOSITORY = Path(__file__).parents[3]

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

STEPS = 80
SCRIPT = f"""
folder=$1; step=$(ls $folder | sed -n 's/^done-//p' | sort -n | tail -n 1); step=${{step:-0}}
echo "rank $RANK of $WORLD_SIZE, local $LOCAL_RANK, at $MASTER_ADDR:$MASTER_PORT, attempt $TORCHELASTIC_RESTART_COUNT"
while [ $step -lt {STEPS} ]; do
  sleep 0.3; step=$((step + 1)); echo "step: $step loss: 0.$step"
  if [ $RANK = 0 ] && [ $((step % 10)) = 0 ]; then touch $folder/done-$step; fi
done
"""
# A pattern that does not match the command that looks for it.
FIND = r"""
for each in /proc/[0-9]*; do
  if tr '\0\n' '  ' <$each/cmdline | grep -q '^sh -c .*coun[t] /checkpoints'; then echo ${each#/proc/}; fi
done
"""


class ProgramJob(Job):
    """A job that runs the script."""

    @property
    def manifest(self) -> dict[str, Any]:
        manifest = super().manifest
        spec = manifest["spec"]
        folder = f"/checkpoints/{self.namespace}/{self.name}"
        program = {
            "image": (self.cluster.settings.get("chartValues") or {}).get("trainerImage", "team/script:1"),
            "command": ["sh", "-c", SCRIPT, "count", folder],
            "progress": {"pattern": r"step: (?P<step>\d+) loss: (?P<loss>\S+)"},
            "checkpoints": {"path": folder, "committed": "done-{step}"},
        }
        spec["program"] = merge(program, spec["program"])
        return manifest

    def kill_program(self, node_rank: int) -> str:
        """Send SIGKILL to the script of a member; return its pod."""
        pod: str = self.list_members()[node_rank]["podName"]
        (pid,) = self.exec_in_pod(pod, "sh", "-c", FIND).split()
        self.exec_in_pod(pod, "sh", "-c", f"kill -9 {pid}")
        return pod


def apply_program_job(cluster: SharedCluster, namespace: str, change: str) -> ProgramJob:
    job = ProgramJob(cluster, namespace, "program", change)
    job.apply()
    return job


def ddp_job(cluster: SharedCluster, namespace: str) -> ProgramJob:
    """Return a job that was written for torchrun, and knows of no TrainingJob."""
    source = (REPOSITORY / "tests" / "testing" / "cluster" / "train_ddp.py").read_text(encoding="utf-8")
    job = ProgramJob(cluster, namespace, "program", "{workers: {spares: 1}, program: {}}")
    folder = f"/checkpoints/{namespace}/{job.name}"
    options = ["--folder", folder, "--steps", str(STEPS), "--save-every", "5", "--seconds-per-step", "0.2"]
    program = {
        "command": ["python", "-c", source, *options],
        "checkpoints": {"path": folder, "committed": "step-{step}/complete"},
    }
    job.change = json.dumps({"workers": {"spares": 1}, "program": program})
    job.apply()
    return job


def step_of(status: dict[str, Any]) -> int:
    return int((status.get("progress") or {}).get("step", 0))


def test_a_program_completes_after_a_killed_process_and_a_lost_node(operator: SharedCluster, namespace: str) -> None:
    job = apply_program_job(operator, namespace, "{workers: {spares: 1}, program: {}}")
    status = job.wait_until("steps and a spare", lambda status: step_of(status) >= 5 and status.get("spares") == 1)
    assert status["hangDetection"] == "Steps"
    plugin = [sys.executable, "-m", "trainium_client.commands.main", "ranks", job.name, "-n", namespace, "-o", "json"]

    def ranks_with_steps() -> set[int]:
        return {row["rank"] for row in json.loads(operator.check_output(*plugin)) if row["step"] > 0}

    until(lambda: ranks_with_steps() == {0, 1}, "each rank reports its own steps", pause=0.5)
    before = job.list_uids()

    pod = job.kill_program(1)
    entry = job.wait_for_recovery()

    assert (entry["response"], entry["cause"], entry["pod"]) == ("InPlace", "Crash", pod)
    assert job.list_uids() == before
    lost = job.list_members()[1]
    operator.power_off(lost["nodeName"])
    try:
        entry = job.wait_for_recovery(2)
        # Nothing of the script waits for its peers, so the loss is known by the node alone, by then with another pod.
        assert entry["response"] in {"Spare", "Replace"}, entry
        assert entry["node"] == lost["nodeName"]
        status = job.wait_for_phase("Completed", seconds=180)
    finally:
        operator.power_on(lost["nodeName"])

    assert step_of(status) == STEPS
    assert status["checkpoint"]["durableStep"] == STEPS, "the last checkpoint is looked for at the end"
    conditions = {condition["type"]: condition for condition in status["conditions"]}
    assert conditions["Complete"]["message"] == f"the program ended with code 0 on all workers, after step {STEPS}"
    assert conditions["ProgressReported"]["status"] == "True"


def test_steps_that_a_program_makes_after_an_ignored_suspension_are_counted_as_lost(
    operator: SharedCluster, namespace: str
) -> None:
    job = ProgramJob(operator, namespace, "program", "{}")
    folder = f"/checkpoints/{namespace}/{job.name}"
    program = {"command": ["sh", "-c", f"trap '' TERM; {SCRIPT}", "count", folder]}
    job.change = json.dumps({"program": program, "recovery": {"gracePeriodSeconds": 6}})
    job.apply()
    job.wait_until("steps", lambda status: step_of(status) >= 3)
    job.suspend()
    job.wait_for_phase("Suspended")
    job.suspend(yes=False)
    status = job.wait_until(
        "steps after it", lambda status: status["history"][-1].get("stepsLost") is not None, seconds=120
    )
    (entry,) = status["history"]
    assert (entry["response"], entry["resumeStep"]) == ("Suspend", entry["stepBefore"] // 10 * 10), entry
    assert entry["stepsLost"] == entry["stepBefore"] % 10
    assert entry["stepBefore"] > 6, "its ranks trained on for the grace period"
    assert "did not end in the grace period after SIGTERM" in entry["message"]
    assert status["restarts"]["total"] == 0


@pytest.mark.long
def test_a_lost_node_and_the_ranks_that_miss_it_are_one_interruption(operator: SharedCluster, namespace: str) -> None:
    job = ddp_job(operator, namespace)
    job.wait_until("steps and a spare", lambda status: step_of(status) >= 12 and status.get("spares") == 1, seconds=180)
    lost = job.list_members()[1]
    operator.power_off(lost["nodeName"])
    try:
        job.wait_for_recovery(seconds=180)
        status = job.wait_for_phase("Completed", seconds=180)
    finally:
        operator.power_on(lost["nodeName"])

    (entry,) = status["history"]
    found = (entry["cause"], entry["response"], entry["pod"], entry["node"])
    assert found == ("NodeLost", "Spare", lost["podName"], lost["nodeName"]), entry
    assert entry["stepsLost"] <= 6, "the steps since its checkpoint, and the current one"
    assert step_of(status) == STEPS


def test_a_program_that_cannot_start_fails_with_its_name_in_the_message(
    operator: SharedCluster, namespace: str
) -> None:
    job = apply_program_job(operator, namespace, "program: {command: [no-such-program]}")
    status = job.wait_for_phase("Failed", seconds=scaled(120))
    assert "no-such-program" in status["verdict"], json.dumps(status)
