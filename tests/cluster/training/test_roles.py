"""A job with rollout servers: a lost server and a scaled role, while a real job trains."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster.training.test_program import REPOSITORY, ProgramJob
from tests.testing.suite.timeouts import until

if TYPE_CHECKING:
    from tests.testing.cluster.shared_cluster import SharedCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

STEPS = 600


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
    pods = job.pods()
    return [
        pod["metadata"]["name"]
        for pod in pods
        if pod["metadata"]["labels"]["trainium.dev/role"] == "rollout" and "deletionTimestamp" not in pod["metadata"]
    ]


def ready(status: dict[str, Any]) -> int:
    return int((status.get("roles") or [{}])[0].get("readyReplicas", 0))


def test_a_lost_server_and_a_scaled_role_end_no_generation_and_count_each_prompt_once(
    operator: SharedCluster, namespace: str
) -> None:
    job = rollout_job(operator, namespace)
    job.until("steps", lambda status: int((status.get("progress") or {}).get("step", 0)) >= 5, seconds=180)
    service = operator.get("service", "grpo-rollout", "-n", namespace)
    assert service["spec"]["clusterIP"] == "None"
    plugin = [sys.executable, "-m", "trainium_client.commands.main"]
    operator.check_output(*plugin, "scale", "grpo", "3", "--role", "rollout", "-n", namespace)
    job.until("a third server", lambda status: ready(status) == 3)

    lost = role_pods(job)[0]
    operator.kubectl("delete", "pod", lost, "-n", namespace, "--grace-period=0", "--force", "--wait=false")
    job.until("the server is missing", lambda _: lost not in role_pods(job))
    job.until("it is replaced", lambda status: ready(status) == 3 or status.get("phase") == "Completed")
    status = job.until_phase("Completed", seconds=240)

    assert (status["membership"]["generation"], status["restarts"]["total"]) == (1, 0), "no server ends a generation"
    rewards = [json.loads(line) for line in (job.folder / "rewards.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in rewards] == list(range(1, STEPS + 1))
    assert sum(rewards[-1]["rewards"]) / len(rewards[-1]["rewards"]) > 0.7
    until(lambda: role_pods(job) == [], "the servers end with the job")
