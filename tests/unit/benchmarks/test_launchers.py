"""The JobSets that the benchmarks compare a TrainingJob with, and the pods that their launchers find."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from benchmarks.harness.launchers import wait_for
from benchmarks.rollouts.launchers import RANKS, SERVERS, JobSetLauncher, JobSetRulesLauncher, RolloutDemo, Training
from trainium_devcluster.errors import ClusterError


class FakeCluster:
    """Records what is applied, and answers with the same pods."""

    def __init__(self, *pods: dict[str, Any]) -> None:
        self.applied: list[dict[str, Any]] = []
        self.killed: list[str] = []
        self.api = SimpleNamespace(get=lambda path: {"items": pods if "index=1" in path else []})
        self.faults = SimpleNamespace(kill_container=lambda _, pod, **__: self.killed.append(pod))

    def kubectl(self, *_: str, stdin: str = "", **__: Any) -> str:
        self.applied += yaml.safe_load_all(stdin)
        return ""


def build_launcher(kind: type[JobSetLauncher], cluster: FakeCluster, out: Path) -> JobSetLauncher:
    demo: Any = RolloutDemo(cluster, None, out)  # type: ignore[arg-type]
    return kind(demo, Training("run", steps=10))


def build_pod(name: str, created: str, phase: str = "Running", **metadata: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "creationTimestamp": created, **metadata}, "status": {"phase": phase}}


@pytest.mark.parametrize(("kind", "rules"), [(JobSetLauncher, 0), (JobSetRulesLauncher, 1)])
def test_a_jobset_has_a_job_of_all_ranks_and_a_job_for_each_server(
    kind: type[JobSetLauncher], rules: int, tmp_path: Path
) -> None:
    cluster = FakeCluster()
    build_launcher(kind, cluster, tmp_path).start()
    (jobset,) = cluster.applied
    spec = jobset["spec"]
    jobs = {job["name"]: (job["replicas"], job["template"]["spec"]) for job in spec["replicatedJobs"]}
    assert {name: (replicas, job["parallelism"]) for name, (replicas, job) in jobs.items()} == {
        "rollout": (SERVERS, 1),
        "trainer": (1, RANKS),
    }
    pods = [job["template"]["spec"] for _, job in jobs.values()]
    assert {(pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) for pod in pods} == {("Never", 1)}
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["trainer"]}
    assert len(spec["failurePolicy"].get("rules", [])) == rules


def test_the_newest_running_pod_of_the_second_rank_is_killed(tmp_path: Path) -> None:
    cluster = FakeCluster(
        build_pod("newer", "2026-01-02T00:00:00Z"),
        build_pod("older", "2026-01-01T00:00:00Z"),
        build_pod("pending", "2026-01-03T00:00:00Z", phase="Pending"),
        build_pod("deleted", "2026-01-04T00:00:00Z", deletionTimestamp="2026-01-05T00:00:00Z"),
    )
    build_launcher(JobSetLauncher, cluster, tmp_path).kill_rank()
    assert cluster.killed == ["newer"]


def test_a_missing_pod_is_named(tmp_path: Path) -> None:
    launcher = build_launcher(JobSetLauncher, FakeCluster(), tmp_path)
    with pytest.raises(ClusterError, match=r"JobSet, restart all has no pod .*index=1 that runs"):
        launcher.kill_rank()


def test_a_wait_without_success_is_an_error() -> None:
    wait_for("the start", lambda: True, 0.0)
    with pytest.raises(ClusterError, match="the start did not come within 0 s"):
        wait_for("the start", lambda: False, 0.0)
