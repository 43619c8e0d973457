"""Drive a TrainingJob: apply it, wait for its states, inject faults, and read its status and its files.

Guarantees:
- State is read from the API and from the files of a run, never from inside operator or agent.
- A wait continues while the API server does not answer. At its limit it raises JobTimeoutError with the job's state.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import yaml

from trainium_contract.api_server.errors import ApiError
from trainium_contract.job import TrainingJobStatus
from trainium_contract.status.internal import unpack_internal
from trainium_contract.wire.recorded_membership import parse_members
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.jobs.metrics import StepLog, read_newest_step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from trainium_devcluster.api_client import ApiClient

Json = dict[str, Any]
T = TypeVar("T")
WAIT_SECONDS = 90.0
"""Limit of what takes seconds on the development cluster; a genuine kubelet reports a lost node after 50."""
_POLL_SECONDS = 0.1


class JobTimeoutError(ClusterError):
    """A wait reached its limit; the message ends with the state of the job."""


class ClusterTools(Protocol):
    """The clients of a cluster that a driver uses."""

    @property
    def api(self) -> ApiClient:
        """A client of the API server."""

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        """Run kubectl and return its output."""


class JobDriver:
    """Drives one TrainingJob of a cluster."""

    def __init__(self, cluster: ClusterTools, namespace: str, name: str, folder: Path) -> None:
        """`folder` has the checkpoints and records of the run, on this machine."""
        self.cluster = cluster
        self.namespace = namespace
        self.name = name
        self.folder = folder
        self.log = StepLog(folder / "metrics.jsonl")

    @property
    def path(self) -> str:
        """Path of the TrainingJob in the API."""
        return f"/apis/trainium.dev/v1alpha1/namespaces/{self.namespace}/trainingjobs/{self.name}"

    # --- observe -------------------------------------------------------------------------------------------------

    def read_object(self) -> Json:
        """Return the TrainingJob."""
        return self.cluster.api.get(self.path)

    def read_status(self) -> Json:
        """Return the status with the operator's internal fields in their places; empty before the first one."""
        stored = self.read_object().get("status")
        return TrainingJobStatus().to_wire() | unpack_internal(stored) if stored else {}

    def read_history(self) -> list[Json]:
        """Return the last interruptions, oldest first."""
        return list(self.read_status().get("history") or [])

    def find_condition(self, kind: str) -> Json:
        """Return a condition of the status; empty if there is none of that type."""
        conditions: list[Json] = self.read_status().get("conditions") or []
        return next((condition for condition in conditions if condition["type"] == kind), {})

    def read_size(self) -> int:
        """Return the number of members."""
        return int(self.read_status()["membership"]["size"])

    def list_members(self) -> list[Json]:
        """Return the members by node rank."""
        path = f"/api/v1/namespaces/{self.namespace}/configmaps/{self.name}-membership"
        return parse_members(self.cluster.api.get(path))

    def list_pods(self) -> list[Json]:
        """Return the worker pods."""
        selector = f"labelSelector=trainium.dev/job-name={self.name}"
        pods: list[Json] = self.cluster.api.get(f"/api/v1/namespaces/{self.namespace}/pods?{selector}")["items"]
        return pods

    def list_uids(self) -> set[str]:
        """Return the uids of the worker pods."""
        return {pod["metadata"]["uid"] for pod in self.list_pods()}

    def list_events(self) -> list[str]:
        """Return the events about the job, as `REASON: NOTE`."""
        items = self.cluster.api.get(f"/apis/events.k8s.io/v1/namespaces/{self.namespace}/events")["items"]
        return [f"{item['reason']}: {item['note']}" for item in items if item["regarding"].get("name") == self.name]

    def read_newest_step(self) -> int:
        """Return the newest completed step; 0 before the first."""
        return read_newest_step(self.log.path)

    def read_losses(self) -> dict[int, float]:
        """Return the losses of the final history by step."""
        self.log.refresh()
        return self.log.list_losses()

    # --- wait ----------------------------------------------------------------------------------------------------

    def observe(self) -> None:
        """Read what every poll of a wait needs; subclasses may do more."""
        self.log.refresh()

    def measure_slowness(self) -> float:
        """Return the factor by which limits are longer now: the load of a processor; subclasses may measure it."""
        return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))

    def wait_for(self, what: str, condition: Callable[[], T], seconds: float = WAIT_SECONDS) -> T:
        """Return the first value of the condition that is true."""
        started_at, error = time.monotonic(), ""
        while True:
            try:
                self.observe()
                if value := condition():
                    return value
                error = ""
            except (ApiError, OSError, KeyError) as problem:
                error = f" ({problem!r})"
            elapsed = time.monotonic() - started_at
            if elapsed > seconds and elapsed > seconds * self.measure_slowness():
                raise JobTimeoutError(
                    f"Job {self.namespace}/{self.name} did not reach {what} within {elapsed:.0f} s{error}: "
                    f"{self.describe()}"
                )
            time.sleep(_POLL_SECONDS)

    def wait_until(self, what: str, condition: Callable[[Json], Any], seconds: float = WAIT_SECONDS) -> Json:
        """Return the status once it fulfils the condition."""

        def find_matching_status() -> Json | None:
            status = self.read_status()
            return status if condition(status) else None

        status = self.wait_for(what, find_matching_status, seconds)
        assert status is not None
        return status

    def wait_for_phase(self, phase: str, seconds: float = WAIT_SECONDS) -> Json:
        """Return the status once it has this phase."""
        return self.wait_until(f"phase {phase}", lambda status: status.get("phase") == phase, seconds)

    def wait_for_step(self, step: int, seconds: float = WAIT_SECONDS) -> None:
        """Wait until `step` is completed."""
        self.wait_for(f"step {step}", lambda: self.read_newest_step() >= step, seconds)

    def wait_for_recovery(self, entries: int = 1, seconds: float = WAIT_SECONDS) -> Json:
        """Return the newest interruption once there are `entries` and it has ended."""
        status = self.wait_until(
            f"{entries} finished interruption(s)",
            lambda status: (
                len(status.get("history") or []) >= entries
                and status["history"][-1].get("recoveredSeconds") is not None
            ),
            seconds,
        )
        entry: Json = status["history"][-1]
        return entry

    def describe(self) -> str:
        """Describe the state of the job in a few lines."""
        with contextlib.suppress(ApiError, OSError, KeyError):
            status = self.read_status()
            pods = [f"{pod['metadata']['name']}={pod['status'].get('phase')}" for pod in self.list_pods()]
            conditions = [
                f"{item['type']}={item['status']}({item['reason']})" for item in status.get("conditions") or []
            ]
            last = (status.get("history") or [{}])[-1]
            return (
                f"Phase {status.get('phase')}, step {self.read_newest_step()}, pods {', '.join(pods)}; "
                f"{', '.join(conditions)}; verdict {status.get('verdict')!r}; last interruption {last}"
            )
        return "The API server does not answer."

    # --- change --------------------------------------------------------------------------------------------------

    def apply_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Apply the TrainingJob."""
        self.cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(manifest, sort_keys=False))

    def patch(self, change: Json) -> None:
        """Apply a merge patch to the job."""
        self.cluster.api.patch(self.path, change)

    def scale(self, size: int) -> None:
        """Scale the job to `size` nodes."""
        self.cluster.kubectl("scale", "trainingjob", self.name, "-n", self.namespace, f"--replicas={size}")

    def suspend(self, *, yes: bool = True) -> None:
        """Suspend or resume the job."""
        self.patch({"spec": {"suspend": yes}})

    def delete(self, *arguments: str) -> None:
        """Delete the job with kubectl, which waits."""
        self.cluster.kubectl("delete", "trainingjob", self.name, "-n", self.namespace, *arguments)

    # --- inject faults -------------------------------------------------------------------------------------------

    def exec_in_pod(self, pod: str, *command: str) -> str:
        """Run a command in a worker and return its output."""
        return self.cluster.kubectl("exec", pod, "-n", self.namespace, "-c", "worker", "--", *command)

    def show_ranks(self, pod: str) -> list[Json]:
        """Return what the agent of a pod records of its training processes; empty until they have started."""
        lines = self.exec_in_pod(pod, "python", "-m", "trainium_agent.show_ranks").splitlines()
        return [json.loads(line) for line in lines]

    def find_rank(self, pod: str) -> str:
        """Return the pid of the first training process of a pod, as shell text; wait until it has started."""
        return str(self.wait_for(f"ranks of {pod}", lambda: self.show_ranks(pod), 60.0)[0]["pid"])

    def signal_rank(self, pod: str, signal: str = "KILL") -> float:
        """Send a signal to the first training process of a pod; return the time of the fault (Unix seconds)."""
        # The shell has its own kill; slim images have no program of that name.
        script = f"date +%s.%N; kill -{signal} {self.find_rank(pod)}"
        return float(self.exec_in_pod(pod, "sh", "-c", script).split()[0])

    def kill_rank(self, node_rank: int, signal: str = "KILL") -> str:
        """Send a signal to the training process of a member; return its pod."""
        pod: str = self.list_members()[node_rank]["podName"]
        self.signal_rank(pod, signal)
        return pod

    def delete_pod(self, pod: str, *, force: bool = False) -> float:
        """Delete a pod through the API; return the time of the fault (Unix seconds)."""
        deleted_at = time.time()
        options = {"gracePeriodSeconds": 0} if force else None
        self.cluster.api.delete(f"/api/v1/namespaces/{self.namespace}/pods/{pod}", options)
        return deleted_at
