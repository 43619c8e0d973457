"""SIGTERM to agents whose pods nobody deletes, and jobs that end while no operator runs."""

from __future__ import annotations

import json
import signal
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster.training.test_program import ProgramJob, step_of
from tests.testing.cluster.installed import NAMESPACE, RELEASE
from tests.testing.suite.timeouts import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.testing.cluster.jobs import Job
    from tests.testing.cluster.shared_cluster import SharedCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

STEPS = 300
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
folder, ending, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if ending == "ignores":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif ending != "no handler":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(int(ending)))
step = max((int(path.name.removeprefix("done-")) for path in folder.glob("done-*")), default=0)
while step < last:
    time.sleep(0.1)
    step += 1
    print(f"step: {step} loss: 0.{step}", flush=True)
    if os.environ["RANK"] == "0" and step % 5 == 0:
        (folder / f"done-{step}").touch()
"""


def terminate(job: Job, *pods: str, seconds_apart: float = 0.0) -> None:
    """Send SIGTERM to the agents, as a kubelet does for a failed liveness probe."""
    for pod in pods:
        if job.cluster.devcluster is not None:
            job.cluster.devcluster.faults.kill_container(job.namespace, pod, signal=signal.SIGTERM)
        else:
            job.exec_in_pod(pod, "sh", "-c", "kill -TERM 1")
        time.sleep(seconds_apart)


def members(job: Job) -> list[str]:
    return [member["podName"] for member in job.list_members()]


def until_new_steps(job: Job, entries: int) -> dict[str, Any]:
    """Return the status once the job has recovered and made steps."""
    job.wait_for_recovery(entries, 180)
    reached = step_of(job.read_status())
    return job.wait_until("new steps", lambda status: step_of(status) > reached + 2 or step_of(status) == STEPS, 120)


@pytest.mark.parametrize("ending", ["no handler", "0", "75", "ignores"])
def test_a_program_trains_on_after_its_agents_were_asked_to_end(
    operator: SharedCluster, namespace: str, ending: str
) -> None:
    job = ProgramJob(operator, namespace, "program")
    folder = f"/checkpoints/{namespace}/{job.name}"
    program = {
        "command": ["python", "-c", PROGRAM, folder, ending, str(STEPS)],
        "checkpoints": {"path": folder, "committed": "done-{step}"},
    }
    change = {"workers": {"spares": 1}, "program": program, "recovery": {"gracePeriodSeconds": 2}}
    job.change = json.dumps(change)
    job.apply()
    job.wait_until("steps and a spare", lambda status: step_of(status) >= 10 and status.get("spares") == 1)

    terminate(job, members(job)[1])
    status = until_new_steps(job, 1)
    assert (status["phase"], status["history"][0]["cause"]) == ("Running", "PodLost")
    terminate(job, *members(job))
    status = until_new_steps(job, 2)
    entries = len(status["history"])
    terminate(job, *members(job), seconds_apart=1.6)
    until_new_steps(job, entries + 1)

    status = job.wait_for_phase("Completed", seconds=240)
    assert status["progress"]["step"] == STEPS
    assert {entry["cause"] for entry in status["history"]} <= {"PodLost", "PeerLost", "Crash"}
    assert status["goodput"]["lostSeconds"].get("PodLost", 0) > 0, "the time without training is the interruption's"


@pytest.mark.parametrize("all_at_once", [False, True])
def test_a_trainer_trains_on_after_its_agents_were_asked_to_end_while_it_loads(
    new_job: Callable[..., Job], all_at_once: bool
) -> None:
    job = new_job(change="workers: {spares: 1}\nrecovery: {gracePeriodSeconds: 1}")
    # A stopped rank answers no signal, as one that compiles for longer than the grace period.
    published = job.wait_for("a membership", job.list_members, 60)
    pods = [job.kill_rank(rank, "STOP") for rank, _ in enumerate(published)]
    terminate(job, *(pods if all_at_once else pods[:1]))
    job.wait_for_recovery(1, 180)
    status = job.wait_for_phase("Completed", seconds=240)
    assert status["progress"]["step"] == 60
    assert status["history"][0]["cause"] == "PodLost"


@contextmanager
def without_operator(cluster: SharedCluster) -> Iterator[None]:
    replicas = cluster.get("deployment", RELEASE, "-n", NAMESPACE)["spec"]["replicas"]
    cluster.kubectl("scale", "deployment", RELEASE, "-n", NAMESPACE, "--replicas=0")
    selector = f"app.kubernetes.io/instance={RELEASE}"
    until(lambda: not cluster.get("pods", "-n", NAMESPACE, "-l", selector)["items"], "the operator has ended", 60)
    try:
        yield
    finally:
        cluster.kubectl("scale", "deployment", RELEASE, "-n", NAMESPACE, f"--replicas={replicas}")


def test_a_job_that_ends_without_an_operator_shows_its_final_figures(
    operator: SharedCluster, new_job: Callable[..., Job]
) -> None:
    job = new_job()
    job.wait_for_step(10)
    with without_operator(operator):
        job.kill_rank(0)
        until(
            lambda: all(pod["status"]["phase"] == "Succeeded" for pod in job.list_pods()),
            lambda: f"the pods end: {job.describe()}",
            180,
        )
        before = job.read_status()
        assert before["phase"] == "Running"
    status = job.wait_for_phase("Completed", seconds=180)
    assert status["progress"]["step"] == 60
    assert status["checkpoint"]["durableStep"] == 60
    assert [(entry["response"], entry["cause"]) for entry in status["history"]] == [("InPlace", "Crash")]
    assert status["restarts"]["total"] == 1
    assert status["goodput"]["wallSeconds"] > before["goodput"]["wallSeconds"]
    assert status["goodput"]["productiveSeconds"] > before["goodput"]["productiveSeconds"]


@pytest.mark.parametrize("pods", ["wait for an operator", "have ended"])
def test_a_job_that_fails_without_an_operator_shows_its_final_figures(
    operator: SharedCluster, namespace: str, pods: str
) -> None:
    job = ProgramJob(operator, namespace, "program")
    folder = f"/checkpoints/{namespace}/{job.name}"
    failing = PROGRAM.replace("while step < last:", "while not (folder / 'end').exists():")
    failing += "\nif os.environ['RANK'] == '1':\n    sys.exit('the data is exhausted')\ntime.sleep(600)"
    program = {
        "command": ["python", "-c", failing, folder, "no handler", "0"],
        "checkpoints": {"path": folder, "committed": "done-{step}"},
    }
    rules = [{"exitCodes": [1], "cause": "UserError", "action": "Stop"}]
    job.change = json.dumps({"program": program, "recovery": {"gracePeriodSeconds": 2, "rules": rules}})
    job.apply()
    job.wait_until("steps", lambda status: step_of(status) >= 10)
    with without_operator(operator):
        before = job.read_status()
        failing_pod = members(job)[1]
        time.sleep(3)
        job.exec_in_pod(failing_pod, "touch", f"{folder}/end")
        read_log = partial(operator.kubectl, "logs", failing_pod, "-n", namespace)
        until(lambda: "the data is exhausted" in read_log(), "the program fails", 120)
        if pods == "have ended":  # as by themselves five minutes later
            terminate(job, *members(job))
            until(lambda: all(pod["status"]["phase"] == "Failed" for pod in job.list_pods()), "the pods end", 120)
        assert job.read_status() == before
    status = job.wait_for_phase("Failed", seconds=120)
    assert "the data is exhausted" in status["verdict"]
    assert step_of(status) > step_of(before) + 5
    assert status["checkpoint"]["durableStep"] > before["checkpoint"].get("durableStep", -1)
    assert status["goodput"]["wallSeconds"] > before["goodput"]["wallSeconds"]
