"""Observe a TrainingJob and inject faults into it.

Guarantees:
- State is read from the API and from the files of the trainer, never from inside operator or agent.
- An injection returns the time (Unix seconds) of the fault.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.testing.suite.timeouts import Deadline
from trainium_contract.api_server.errors import ApiError
from trainium_contract.job import TrainingJobStatus
from trainium_contract.status.internal import INTERNAL_KEY, unpack_internal
from trainium_contract.wire.recorded_membership import parse_members
from trainium_devcluster.demos.metrics import read_steps

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.testing.cluster.jobs import Job
    from tests.testing.cluster.shared_cluster import SharedCluster
    from trainium_contract.api_server.client import ApiClient

Json = dict[str, Any]
POLL_SECONDS = 0.1
_TAIL_BYTES = 8192


class NoProgressError(RuntimeError):
    """A wait timed out; the message ends with the state of the job."""


@dataclass
class TargetJob:
    """Controls a job into which faults are injected."""

    cluster: SharedCluster
    api: ApiClient
    job: Job
    commands: Path
    """Folder of the commands for the fault injector of the workers."""
    spares: int = 0

    @property
    def _path(self) -> str:
        return f"/apis/trainium.dev/v1alpha1/namespaces/{self.job.namespace}/trainingjobs/{self.job.name}"

    def status(self) -> Json:
        """Return the status of the job, with its internal fields; empty before the first one."""
        stored = self.api.get(self._path).get("status")
        return TrainingJobStatus().to_wire() | unpack_internal(stored) if stored else {}

    def size(self) -> int:
        """Return the number of members."""
        return int(self.status()["membership"]["size"])

    def history(self) -> list[Json]:
        """Return the last ten interruptions, oldest first."""
        return list(self.status().get("history") or [])

    def pods(self) -> list[Json]:
        """Return the worker pods."""
        selector = f"labelSelector=trainium.dev/job-name={self.job.name}"
        pods: list[Json] = self.api.get(f"/api/v1/namespaces/{self.job.namespace}/pods?{selector}")["items"]
        return pods

    def members(self) -> list[Json]:
        """Return the members by node rank."""
        path = f"/api/v1/namespaces/{self.job.namespace}/configmaps/{self.job.name}-membership"
        return parse_members(self.api.get(path))

    def member_uids(self) -> set[str]:
        """Return the pod uids of the members."""
        return {member["podUid"] for member in self.members()}

    def condition(self, kind: str) -> Json:
        """Return a condition of the job; empty if there is none of that type."""
        conditions: list[Json] = self.status().get("conditions") or []
        return next((condition for condition in conditions if condition["type"] == kind), {})

    def records(self) -> dict[int, Json]:
        """Return the lines of metrics.jsonl by step."""
        return read_steps(self.job.folder / "metrics.jsonl")

    def losses(self) -> dict[int, float]:
        """Return the losses of the final history by step."""
        return {step: float(record["loss"]) for step, record in self.records().items()}

    def newest_step(self) -> int:
        """Return the newest completed step; 0 before the first."""
        with contextlib.suppress(OSError), (self.job.folder / "metrics.jsonl").open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            for line in reversed(file.read().split(b"\n")):
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    return int(json.loads(line)["step"])
        return 0

    def committed_steps(self) -> list[int]:
        """Return the steps of the committed checkpoints, oldest first."""
        return sorted(int(path.parent.name.split("-")[1]) for path in self.job.folder.glob("step-*/COMMITTED"))

    def wait_until(self, condition: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
        """Return the value of the condition once it is true; retry if the API server does not answer."""
        deadline = Deadline(seconds)
        while True:
            with contextlib.suppress(ApiError, OSError, KeyError):
                if value := condition():
                    return value
            if deadline.is_over():
                raise NoProgressError(f"no {what} within {deadline.elapsed_seconds():.0f} s. {self.describe()}")
            time.sleep(POLL_SECONDS)

    def wait_for_step(self, step: int, seconds: float = 60.0) -> None:
        """Wait until `step` is completed."""
        self.wait_until(lambda: self.newest_step() >= step, f"step {step}", seconds)

    def wait_until_stable(self, steps: int = 2, seconds: float = 120.0) -> None:
        """Wait until the job trains at its full size with a ready spare and has completed `steps` more steps.

        Further spares warm up at the lowest priority, so they may be missing.
        """

        def is_stable() -> bool:
            status = self.status()
            return (
                all(entry.get("recoveredSeconds") is not None for entry in status.get("history") or [])
                and status.get("phase") == "Running"
                and status.get("spares", 0) >= min(self.spares, 1)
                and status["membership"]["size"] == status.get("desired")
            )

        self.wait_until(is_stable, "stable training with a ready spare", seconds)
        self.wait_for_step(self.newest_step() + steps, seconds)

    def describe(self) -> str:
        """Describe the state of the job in a few lines."""
        with contextlib.suppress(ApiError, OSError, KeyError):
            status = self.status()
            pods = [f"{p['metadata']['name']}={p['status'].get('phase')}" for p in self.pods()]
            conditions = [f"{c['type']}={c['status']}({c['reason']})" for c in status.get("conditions") or []]
            last = (status.get("history") or [{}])[-1]
            return (
                f"Phase {status.get('phase')}, step {self.newest_step()}, pods {', '.join(pods)}; "
                f"{', '.join(conditions)}; verdict {status.get('verdict')!r}; last interruption {last}"
            )
        return "The API server does not answer."

    def shell(self, pod: str, script: str) -> str:
        """Run a shell script in a worker."""
        command = ("exec", pod, "-n", self.job.namespace, "-c", "worker", "--", "sh", "-c", script)
        return self.cluster.kubectl(*command)

    def signal(self, pod: str, name: str) -> float:
        """Send a signal (by its short name) to the first training process of a pod."""
        pid = f"/cache/faults/{self.commands.name}/pid-{pod}-0"
        return float(self.shell(pod, f"date +%s.%N; kill -{name} $(cat {pid})").split()[0])

    def inject(self, fault: str, pod: str, **fields: Any) -> float:
        """Let the fault injector inject a fault in the next step of a pod's ranks, and return its time."""
        draft = self.commands / f".draft-{pod}"
        draft.write_text(json.dumps({"fault": fault, **fields}))
        draft.chmod(0o666)
        draft.rename(self.commands / f"do-{pod}")
        path = self.commands / f"injected-{pod}"
        self.wait_until(path.exists, f"fault in {pod}", 30.0)
        injected_at = float(path.read_text() or time.time())
        path.unlink()
        return injected_at

    def clear_commands(self) -> None:
        """Remove all commands and their files."""
        for pattern in ("do-*", "done-*", "injected-*", "stall", "slow"):
            for path in self.commands.glob(pattern):
                path.unlink(missing_ok=True)

    def delete_pod(self, pod: str, *, force: bool = False) -> float:
        """Delete a pod through the API."""
        deleted_at = time.time()
        options = {"gracePeriodSeconds": 0} if force else None
        self.api.delete(f"/api/v1/namespaces/{self.job.namespace}/pods/{pod}", options)
        return deleted_at

    def evict(self, pod: str, seconds: float = 30.0) -> float:
        """Evict a pod through the eviction API; retry while a budget refuses it."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": self.job.namespace},
        }
        deadline = Deadline(seconds)
        while True:
            evicted_at = time.time()
            try:
                self.api.create(f"/api/v1/namespaces/{self.job.namespace}/pods/{pod}/eviction", body)
            except ApiError as error:
                if error.status != http.client.TOO_MANY_REQUESTS or deadline.is_over():
                    raise
                time.sleep(POLL_SECONDS)
            else:
                return evicted_at

    def patch(self, change: Json) -> None:
        """Apply a merge patch to the job."""
        self.api.patch(self._path, change)

    def clear_failures(self) -> None:
        """Clear the failures that budgets and backoff count, because rows measure single faults."""
        self.wait_until(self._try_clear_failures, "a status without failures", 30)

    def _try_clear_failures(self) -> bool:
        job = self.api.get(self._path)
        internal = json.loads(job["status"].get(INTERNAL_KEY, "{}"))
        if not internal.pop("failures", None):
            return True
        status = {INTERNAL_KEY: json.dumps(internal, separators=(",", ":")), "avoidedNodes": []}
        version = {"resourceVersion": job["metadata"]["resourceVersion"]}
        # A conflict is retried: the operator has written the status meanwhile.
        self.api.patch(f"{self._path}/status", {"metadata": version, "status": status})
        return True

    def remove(self) -> None:
        """Delete the job and wait until its pods are deleted."""
        self.api.delete(self._path, {"propagationPolicy": "Background"})
        for pod in self.pods():
            self.delete_pod(pod["metadata"]["name"], force=True)
        self.wait_until(lambda: not self.pods(), "deletion of its pods", 60)
        shutil.rmtree(self.commands, ignore_errors=True)
