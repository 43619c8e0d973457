"""Start programs on a cluster in several ways, as a TrainingJob or by peers, and reach their pods and processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import yaml

from trainium_devcluster.demos.frame import Demo
from trainium_devcluster.demos.session import NAMESPACE
from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Json = dict[str, Any]
DemoT = TypeVar("DemoT", bound=Demo)
_INSTALLATION_SECONDS = 60.0


class Launcher(ABC, Generic[DemoT]):
    """A way to start a program on several nodes of a demo's cluster."""

    title: str
    """Heading of its column."""

    def __init__(self, demo: DemoT, name: str) -> None:
        self.demo = demo
        self.name = name
        self.folder = demo.out / "checkpoints" / name

    @abstractmethod
    def stop(self) -> None:
        """Delete everything, and wait until it is deleted."""

    def apply(self, *objects: Mapping[str, Any]) -> None:
        """Apply objects to the namespace."""
        self.demo.cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=yaml.safe_dump_all(objects))

    def delete(self, *objects: str) -> None:
        """Delete objects, and wait until their pods are deleted."""
        options = ("--cascade=foreground", "--ignore-not-found")
        self.demo.cluster.kubectl("delete", *objects, "-n", NAMESPACE, *options, timeout=120)

    def list_pods(self, selector: str) -> list[Json]:
        """Return the pods that are not being deleted, oldest first."""
        path = f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector={selector}"
        pods = [pod for pod in self.demo.cluster.api.get(path)["items"] if "deletionTimestamp" not in pod["metadata"]]
        return sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))

    def find_running_pod(self, selector: str) -> Json:
        """Return the newest pod that runs; raises ClusterError if there is none."""
        pods = [pod for pod in self.list_pods(selector) if pod["status"].get("phase") == "Running"]
        if not pods:
            raise ClusterError(f"{self.title} has no pod {selector} that runs.")
        return pods[-1]

    def kill_process(self, pod: Json, number: int = signal.SIGKILL, *, match: str | None = None) -> None:
        """Send a signal to the main process of a pod, or to its first process whose command line matches."""
        self.demo.cluster.faults.kill_container(NAMESPACE, pod["metadata"]["name"], signal=number, match=match)


class JobSetLauncher(Launcher[DemoT]):
    """A JobSet, whose controller recreates all Jobs at a failure."""

    title = "JobSet, restart all"
    failure_policy: ClassVar[Json] = {"maxRestarts": 100}

    def apply_jobset(self, jobs: Mapping[str, tuple[int, int, Json]], completed_by: tuple[str, ...] = ()) -> None:
        """Apply a JobSet of replicated jobs by name: their replicas, the pods of each, and the spec of a pod.

        `completed_by` are the jobs whose end is that of the JobSet; by default all are.
        """
        spec = {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "startupPolicy": {"startupPolicyOrder": "AnyOrder"},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": list(completed_by)},
            "failurePolicy": self.failure_policy,
            "replicatedJobs": [
                {"name": name, "replicas": replicas, "template": {"spec": _build_job(pods, pod)}}
                for name, (replicas, pods, pod) in jobs.items()
            ],
        }
        meta = {"name": self.name, "namespace": NAMESPACE}
        self.apply({"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": meta, "spec": spec})

    def select(self, job: str, index: int | None = None) -> str:
        """Return the label selector of the pods of a replicated job, or of those with a completion index."""
        selector = f"jobset.sigs.k8s.io/jobset-name={self.name},jobset.sigs.k8s.io/replicatedjob-name={job}"
        return selector if index is None else f"{selector},batch.kubernetes.io/job-completion-index={index}"

    def stop(self) -> None:
        """Delete the JobSet."""
        self.delete(f"jobset/{self.name}")


def _build_job(pods: int, pod: Json) -> Json:
    return {
        "parallelism": pods,
        "completions": pods,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": {"restartPolicy": "Never", **pod}},
    }


@contextlib.contextmanager
def run_jobset(demo: Demo, command: str | None) -> Iterator[None]:
    """Run the command that installs JobSet and runs its controller, if there is one, within the context."""
    if command is None:
        yield
        return
    with (demo.out / "jobset.log").open("wb") as log:
        variables = os.environ | demo.cluster.list_variables()
        controller = subprocess.Popen(
            command, shell=True, env=variables, stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait_for(
            "JobSet's definition",
            lambda: "jobsets" in demo.cluster.kubectl("api-resources", "-o", "name"),
            _INSTALLATION_SECONDS,
        )
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(controller.pid, signal.SIGTERM)
        controller.wait()


def wait_for(what: str, condition: Callable[[], object], seconds: float) -> None:
    """Wait for a condition; raises ClusterError if it does not hold within the limit."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterError(f"{what} did not come within {seconds:.0f} s")
        time.sleep(0.1)
