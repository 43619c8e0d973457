"""Control a TrainingJob whose workers run with the fault injector."""

from __future__ import annotations

import http.client
import json
import shutil
import time
from typing import TYPE_CHECKING, Any

from tests.testing.cluster.jobs import Job
from tests.testing.suite.timeouts import Deadline
from trainium_contract.api_server.errors import ApiError
from trainium_contract.status.internal import INTERNAL_KEY
from trainium_devcluster.jobs.driver import JobDriver
from trainium_devcluster.jobs.metrics import read_steps

if TYPE_CHECKING:
    from pathlib import Path

    from tests.testing.cluster.shared_cluster import SharedCluster

Json = dict[str, Any]
_POLL_SECONDS = 0.1


class TargetJob(Job):
    """A job into which faults are injected."""

    describe = JobDriver.describe

    def __init__(
        self,
        cluster: SharedCluster,
        namespace: str,
        name: str,
        change: str,
        commands: Path,
        environment: dict[str, str],
    ) -> None:
        """`commands` is the folder of the commands for the fault injector of the workers."""
        super().__init__(cluster, namespace, name, change, environment=environment)
        self.commands = commands
        self._spares = int(self.manifest["spec"]["workers"].get("spares", 0))

    def observe(self) -> None:
        """Read nothing: a poll that reads all records of a long job would delay its steps."""

    def read_records(self) -> dict[int, Json]:
        """Return the lines of metrics.jsonl by step."""
        return read_steps(self.log.path)

    def list_committed_steps(self) -> list[int]:
        """Return the steps of the committed checkpoints, oldest first."""
        return sorted(int(path.parent.name.split("-")[1]) for path in self.folder.glob("step-*/COMMITTED"))

    def wait_until_stable(self, steps: int = 2, seconds: float = 120.0) -> None:
        """Wait until the job trains at its full size with a ready spare and has completed `steps` more steps.

        Further spares warm up at the lowest priority, so they may be missing.
        """

        def is_stable(status: Json) -> bool:
            return (
                all(entry.get("recoveredSeconds") is not None for entry in status.get("history") or [])
                and status.get("phase") == "Running"
                and status.get("spares", 0) >= min(self._spares, 1)
                and status["membership"]["size"] == status.get("desired")
            )

        self.wait_until("stable training with a ready spare", is_stable, seconds)
        self.wait_for_step(self.read_newest_step() + steps, seconds)

    def run_shell(self, pod: str, script: str) -> str:
        """Run a shell script in a worker."""
        return self.exec_in_pod(pod, "sh", "-c", script)

    def find_rank(self, pod: str) -> str:
        """Return the pid that the first training process of a pod has written, as shell text."""
        return f"$(cat /cache/faults/{self.commands.name}/pid-{pod}-0)"

    def inject(self, fault: str, pod: str, **fields: Any) -> float:
        """Let the fault injector inject a fault in the next step of a pod's ranks, and return its time."""
        draft = self.commands / f".draft-{pod}"
        draft.write_text(json.dumps({"fault": fault, **fields}))
        draft.chmod(0o666)
        draft.rename(self.commands / f"do-{pod}")
        path = self.commands / f"injected-{pod}"
        self.wait_for(f"fault in {pod}", path.exists, 30.0)
        injected_at = float(path.read_text() or time.time())
        path.unlink()
        return injected_at

    def clear_commands(self) -> None:
        """Remove all commands and their files."""
        for pattern in ("do-*", "done-*", "injected-*", "stall", "slow"):
            for path in self.commands.glob(pattern):
                path.unlink(missing_ok=True)

    def evict(self, pod: str, seconds: float = 30.0) -> float:
        """Evict a pod through the eviction API; retry while a budget refuses it."""
        metadata = {"name": pod, "namespace": self.namespace}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        deadline = Deadline(seconds)
        while True:
            evicted_at = time.time()
            try:
                self.cluster.api.create(f"/api/v1/namespaces/{self.namespace}/pods/{pod}/eviction", body)
            except ApiError as error:
                if error.status != http.client.TOO_MANY_REQUESTS or deadline.is_over():
                    raise
                time.sleep(_POLL_SECONDS)
            else:
                return evicted_at

    def clear_failures(self) -> None:
        """Clear the failures that budgets and backoff count, because rows measure single faults."""
        self.wait_for("a status without failures", self._try_clear_failures, 30)

    def _try_clear_failures(self) -> bool:
        job = self.read_object()
        internal = json.loads(job["status"].get(INTERNAL_KEY, "{}"))
        if not internal.pop("failures", None):
            return True
        status = {INTERNAL_KEY: json.dumps(internal, separators=(",", ":")), "avoidedNodes": []}
        version = {"resourceVersion": job["metadata"]["resourceVersion"]}
        # A conflict is retried: the operator has written the status meanwhile.
        self.cluster.api.patch(f"{self.path}/status", {"metadata": version, "status": status})
        return True

    def remove(self) -> None:
        """Delete the job and wait until its pods are deleted."""
        self.cluster.api.delete(self.path, {"propagationPolicy": "Background"})
        for pod in self.list_pods():
            self.delete_pod(pod["metadata"]["name"], force=True)
        self.wait_for("deletion of its pods", lambda: not self.list_pods(), 60)
        shutil.rmtree(self.commands, ignore_errors=True)
