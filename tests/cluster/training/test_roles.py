"""A job with rollout servers: a lost server and a scaled role, while a real job trains."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.rollouts.rewards import compute_reward_curve, count_updates, list_unequal_repetitions, read_rewards
from tests.cluster.training.test_program import REPOSITORY, ProgramJob
from tests.testing.suite.timeouts import until

if TYPE_CHECKING:
    from tests.testing.cluster.shared_cluster import SharedCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

STEPS = 1500


def rollout_job(cluster: SharedCluster, namespace: str) -> ProgramJob:
    """Return the example of GRPO, with two servers that its two workers ask."""
    job = ProgramJob(cluster, namespace, "grpo", "{program: {}}")
    source, folder = f"/checkpoints/{namespace}/source", f"/checkpoints/{namespace}/{job.name}"
    shutil.copytree(REPOSITORY / "manifests/examples", cluster.shared / namespace / "source")
    container = {
        "command": ["python", f"{source}/rollout_server.py", folder],
        "volumeMounts": [{"name": "data", "mountPath": "/checkpoints"}],
    }
    volumes = [{"name": "data", "hostPath": {"path": str(cluster.shared)}}]
    role = {
        "name": "rollout",
        "replicas": 2,
        "minReady": 1,
        "port": 18_080,
        "startupPolicy": "BeforeWorkers",
        "template": {"spec": {"containers": [container], "volumes": volumes}},
    }
    program = {
        "command": ["python", f"{source}/grpo_rollout.py", folder, str(STEPS)],
        "progress": None,
        "checkpoints": {"path": folder, "committed": "policy-{step}.pt"},
    }
    job.change = json.dumps({"program": program, "roles": [role]})
    job.apply()
    return job


def role_pods(job: ProgramJob) -> list[str]:
    pods = job.list_pods()
    return [
        pod["metadata"]["name"]
        for pod in pods
        if pod["metadata"]["labels"]["trainium.dev/role"] == "rollout" and "deletionTimestamp" not in pod["metadata"]
    ]


def ready(status: dict[str, Any]) -> int:
    return int((status.get("roles") or [{}])[0].get("readyReplicas", 0))


def kill_server(job: ProgramJob, lost: str) -> None:
    """Delete a server at once, and wait until another one is ready in its place."""
    job.delete_pod(lost, force=True)
    job.wait_until("the server is missing", lambda _: lost not in role_pods(job))
    job.wait_until("it is replaced", lambda status: ready(status) == 3 or status.get("phase") == "Completed")


def test_lost_servers_a_scaled_role_and_a_killed_rank_count_each_prompt_once(
    operator: SharedCluster, namespace: str
) -> None:
    job = rollout_job(operator, namespace)
    job.wait_until("steps", lambda status: int((status.get("progress") or {}).get("step", 0)) >= 5, seconds=180)
    service = operator.get("service", "grpo-rollout", "-n", namespace)
    assert service["spec"]["clusterIP"] == "None"
    plugin = [sys.executable, "-m", "trainium_client.commands.main"]
    operator.check_output(*plugin, "scale", "grpo", "3", "--role", "rollout", "-n", namespace)
    job.wait_until("a third server", lambda status: ready(status) == 3)

    kill_server(job, role_pods(job)[0])
    job.kill_rank(1)
    job.wait_until("the rank is replaced", lambda status: status["restarts"]["total"] == 1)
    kill_server(job, role_pods(job)[1])
    status = job.wait_for_phase("Completed", seconds=300)

    history = [(entry["cause"], entry["response"]) for entry in status["history"]]
    assert history == [("Crash", "InPlace")], "no server interrupts the training"
    ledger = read_rewards(job.folder)
    assert list(ledger.list_history()) == list(range(1, STEPS + 1))
    assert list_unequal_repetitions(ledger) == [], "a repeated step gets the same answers"
    assert count_updates(job.folder, STEPS) == STEPS, "each step counts once"
    assert compute_reward_curve(ledger)[STEPS] > 0.7
    until(lambda: role_pods(job) == [], "the servers end with the job")
