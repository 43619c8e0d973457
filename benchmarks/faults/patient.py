"""A TrainingJob that faults are injected into: what it says of itself, and the ways to hurt it.

Invariants: what is read comes from the API and from the files that the trainer leaves, never from inside operator or
agent; an injection returns the moment (Unix seconds) at which the fault struck.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.faults.api import ApiError
from tests.testing.suite.patience import Deadline
from trainium_contract.wire.recorded_membership import members_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from benchmarks.faults.api import Api
    from tests.testing.cluster.jobs import Job
    from tests.testing.cluster.sites import Site

Json = dict[str, Any]
POLL_SECONDS = 0.1
_TAIL_BYTES = 8192


class StuckError(RuntimeError):
    """What was waited for did not come; the text ends with the state of the job."""


@dataclass
class Patient:
    """One job; `job` makes its manifest and knows its folder."""

    site: Site
    api: Api
    job: Job
    orders: Path
    """Where the saboteur in the workers looks."""
    spares: int = 0
    skipped_steps: set[int] = field(default_factory=set)

    @property
    def _path(self) -> str:
        return f"/apis/trainium.dev/v1alpha1/namespaces/{self.job.namespace}/trainingjobs/{self.job.name}"

    @property
    def name(self) -> str:
        """namespace/name."""
        return f"{self.job.namespace}/{self.job.name}"

    # --- look ------------------------------------------------------------------------------------------------------

    def object(self) -> Json:
        """The TrainingJob."""
        return self.api.get(self._path)

    def status(self) -> Json:
        """Its status, empty before the first one."""
        status: Json = self.object().get("status") or {}
        return status

    def size(self) -> int:
        """Workers in the present generation."""
        return int(self.status()["membership"]["size"])

    def history(self) -> list[Json]:
        """Interruptions, oldest first; at most the last ten."""
        return list(self.status().get("history") or [])

    def pods(self) -> list[Json]:
        """Its worker pods."""
        selector = f"labelSelector=trainium.dev/job-name={self.job.name}"
        pods: list[Json] = self.api.get(f"/api/v1/namespaces/{self.job.namespace}/pods?{selector}")["items"]
        return pods

    def members(self) -> list[Json]:
        """The current generation by node rank."""
        path = f"/api/v1/namespaces/{self.job.namespace}/configmaps/{self.job.name}-membership"
        return members_of(self.api.get(path))

    def member_uids(self) -> set[str]:
        """Pod uids of the current generation."""
        return {member["podUid"] for member in self.members()}

    def spare_pods(self) -> list[Json]:
        """Running pods outside the membership."""
        inside = self.member_uids()
        return [pod for pod in self.pods() if pod["metadata"]["uid"] not in inside and not _leaving(pod)]

    def condition(self, kind: str) -> Json:
        """A condition of the job; empty when it has none of that type."""
        found = [one for one in self.status().get("conditions") or [] if one["type"] == kind]
        return found[0] if found else {}

    def records(self) -> dict[int, Json]:
        """Step -> line of metrics.jsonl, of the final history so far."""
        from trainium_devcluster.story.metrics import read_steps  # noqa: PLC0415 - not needed before a job runs

        return read_steps(self.job.folder / "metrics.jsonl")

    def step(self) -> int:
        """The newest completed step; 0 before the first."""
        with contextlib.suppress(OSError), (self.job.folder / "metrics.jsonl").open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            for line in reversed(file.read().split(b"\n")):
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    return int(json.loads(line)["step"])
        return 0

    def committed(self) -> list[int]:
        """Steps of the committed checkpoints, oldest first."""
        return sorted(int(path.parent.name.split("-")[1]) for path in self.job.folder.glob("step-*/COMMITTED"))

    # --- wait ------------------------------------------------------------------------------------------------------

    def until(self, what: str, condition: Callable[[], Any], seconds: float = 60.0) -> Any:
        """The condition's value once it is true; an API server that does not answer counts as not yet."""
        deadline = Deadline(seconds)
        while True:
            with contextlib.suppress(ApiError, OSError, KeyError):
                found = condition()
                if found:
                    return found
            if deadline.is_over():
                raise StuckError(f"{what} did not come within {deadline.waited():.0f} s. {self.describe()}")
            time.sleep(POLL_SECONDS)

    def until_step(self, step: int, seconds: float = 60.0) -> None:
        """Return when `step` has been completed."""
        self.until(f"step {step}", lambda: self.step() >= step, seconds)

    def settle(self, steps: int = 2, seconds: float = 120.0) -> None:
        """Return when the job trains at its size, a spare is warm, and `steps` more steps are done.

        Further spares warm up at the lowest priority, so they need not be waited for.
        """

        def calm() -> bool:
            status = self.status()
            over = all(entry.get("recoveredSeconds") is not None for entry in status.get("history") or [])
            return (
                over
                and status.get("phase") == "Running"
                and status.get("spares", 0) >= min(self.spares, 1)
                and status["membership"]["size"] == status.get("desired")
            )

        self.until("calm training with warm spares", calm, seconds)
        begun = self.step()
        self.until_step(begun + steps, seconds)

    def describe(self) -> str:
        """The state of the job in a few lines, for a person."""
        with contextlib.suppress(ApiError, OSError, KeyError):
            status = self.status()
            pods = [f"{p['metadata']['name']}={p['status'].get('phase')}" for p in self.pods()]
            conditions = [f"{c['type']}={c['status']}({c['reason']})" for c in status.get("conditions") or []]
            last = (status.get("history") or [{}])[-1]
            return (
                f"Phase {status.get('phase')}, step {self.step()}, pods {', '.join(pods)}; {', '.join(conditions)}; "
                f"verdict {status.get('verdict')!r}; last interruption {last}"
            )
        return "The API server does not answer."

    # --- hurt ------------------------------------------------------------------------------------------------------

    def shell(self, pod: str, script: str) -> str:
        """Run a shell script in a worker."""
        command = ("exec", pod, "-n", self.job.namespace, "-c", "worker", "--", "sh", "-c", script)
        return self.site.kubectl(*command)

    def signal(self, pod: str, name: str, local_rank: int = 0) -> float:
        """Send a signal (by its short name) to a training process; the moment."""
        pid = f"/cache/faults/{self.orders.name}/pid-{pod}-{local_rank}"
        return float(self.shell(pod, f"date +%s.%N; kill -{name} $(cat {pid})").split()[0])

    def order(self, what: str, pod: str = "all", **more: Any) -> float:
        """Have the saboteur do something in the next step of a pod's ranks; the moment of the order."""
        draft = self.orders / f".draft-{pod}"
        draft.write_text(json.dumps({"what": what, **more}))
        draft.chmod(0o666)
        draft.rename(self.orders / f"do-{pod}")
        return time.time()

    def obeyed(self, pod: str, seconds: float = 30.0) -> float:
        """The moment at which a pod's saboteur struck."""
        path = self.orders / f"struck-{pod}"
        self.until(f"the order to {pod}", path.exists, seconds)
        moment = float(path.read_text() or time.time())
        path.unlink()
        return moment

    def withdraw_orders(self) -> None:
        """No order is left, nor a trace of one."""
        for pattern in ("do-*", "done-*", "struck-*", "stall", "slow"):
            for path in self.orders.glob(pattern):
                path.unlink(missing_ok=True)

    def delete_pod(self, pod: str, *, force: bool = False) -> float:
        """Delete a pod through the API, as a person or a controller does."""
        moment = time.time()
        options = {"gracePeriodSeconds": 0} if force else None
        self.api.delete(f"/api/v1/namespaces/{self.job.namespace}/pods/{pod}", options)
        return moment

    def evict(self, pod: str, seconds: float = 30.0) -> float:
        """Evict a pod by the eviction API, as a drain does: again while a budget refuses it; the moment it was let."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": self.job.namespace},
        }
        deadline = Deadline(seconds)
        while True:
            moment = time.time()
            try:
                self.api.create(f"/api/v1/namespaces/{self.job.namespace}/pods/{pod}/eviction", body)
            except ApiError as error:
                if error.code != http.client.TOO_MANY_REQUESTS or deadline.is_over():
                    raise
                time.sleep(POLL_SECONDS)
            else:
                return moment

    def patch(self, change: Json) -> None:
        """Change the job, as `kubectl patch` does."""
        self.api.patch(self._path, change)

    def forget_failures(self) -> None:
        """Let the windows of budgets and back-off pass: the rows measure single faults, not a storm of them."""
        if self.status().get("failures"):
            self.api.patch(f"{self._path}/status", {"status": {"failures": [], "avoidedNodes": []}})

    # --- end -------------------------------------------------------------------------------------------------------

    def remove(self) -> None:
        """Delete the job and wait until its pods are gone."""
        self.api.delete(self._path, {"propagationPolicy": "Background"})
        for pod in self.pods():
            self.delete_pod(pod["metadata"]["name"], force=True)
        self.until("the end of its pods", lambda: not self.pods(), 60)
        shutil.rmtree(self.orders, ignore_errors=True)


def _leaving(pod: Json) -> bool:
    return "deletionTimestamp" in pod["metadata"] or pod["status"].get("phase") not in ("Pending", "Running")


def newcomers(before: set[str], patient: Patient) -> Iterator[Json]:
    """Members that were none before."""
    return (member for member in patient.members() if member["podUid"] not in before)
