"""A TrainingJob under test: apply it, follow it, disturb it, read what it left."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from tests.testing.suite.timeouts import Deadline
from trainium_contract.wire.recorded_membership import members_of
from trainium_devcluster.demos.metrics import StepLog

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.testing.cluster.sites import Site

BASE = """
workers: {replicas: 2, accelerator: {device: cpu}}
trainer:
  model: {preset: Tiny}
  data: {sequenceLength: 64, tokenizer: {vocabSize: 512}, cacheDirectory: /cache}
  batch: {globalSize: 12, microSize: 1}
  steps: 60
  schedule: {warmupSteps: 5}
  monitor: {tensorboard: false, recordSamples: true}
checkpoint: {durable: {everySteps: 20, keepLast: 3}}
recovery: {rescaleAfterSeconds: 5, gracePeriodSeconds: 20}
"""

TIMEOUT_SECONDS = 90.0
"""For what comes within seconds on the development cluster; a genuine one notices a lost node after 50."""


def within(losses: dict[int, float], reference: dict[int, float], tolerance: float) -> bool:
    """Return whether the curves have the same steps and agree within a relative tolerance."""
    return losses.keys() == reference.keys() and all(
        abs(losses[step] - reference[step]) <= tolerance * abs(reference[step]) for step in losses
    )


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """`change` over `base`, mappings merged."""
    inside = {k: merged(base[k], v) for k, v in change.items() if isinstance(v, dict) and isinstance(base.get(k), dict)}
    return base | change | inside


def _with_lists(site: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """A pod template of the site and one of the job: the volumes of both, the worker with the fields of both."""
    spec, other = site.get("spec", {}), job["spec"]
    worker, own = spec.get("containers", [{}])[0], other["containers"][0]
    lists = {key: [*worker.get(key, []), *own.get(key, [])] for key in ("env", "volumeMounts")}
    container = {**worker, **own, **{key: value for key, value in lists.items() if value}}
    volumes = [*spec.get("volumes", []), *other["volumes"]]
    return {**site, **job, "spec": {**spec, **other, "volumes": volumes, "containers": [container]}}


@dataclass
class Job:
    """One TrainingJob; its checkpoints are below the site's shared folder."""

    site: Site
    namespace: str
    name: str
    change: str = ""
    folder_name: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    log: StepLog = field(init=False)

    def __post_init__(self) -> None:
        self.log = StepLog(self.folder / "metrics.jsonl")

    @property
    def folder(self) -> Path:
        """Checkpoints, metrics and sample records."""
        return self.site.shared / self.namespace / (self.folder_name or self.name)

    @property
    def manifest(self) -> dict[str, Any]:
        spec = merged(yaml.safe_load(BASE), yaml.safe_load(self.change) or {})
        template = merged(self._cache(), spec["workers"].get("template", {}))
        spec["workers"]["template"] = _with_lists(self.site.settings.get("workerTemplate") or {}, template)
        spec["checkpoint"]["storage"] = {"hostPath": {"path": str(self.site.shared)}}
        if "program" in spec:
            del spec["trainer"]
        else:
            spec["checkpoint"]["storage"]["subPath"] = f"{self.namespace}/{self.folder_name or self.name}"
        return {
            "apiVersion": "trainium.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": spec,
        }

    def _cache(self) -> dict[str, Any]:
        """Tokenised text is shared by all tests: making it is not what they are about."""
        volume = {"name": "shared-cache", "hostPath": {"path": str(self.site.shared / "cache"), "type": "Directory"}}
        mount = {"name": "shared-cache", "mountPath": "/cache"}
        environment = [{"name": name, "value": value} for name, value in self.environment.items()]
        worker = {"name": "worker", "volumeMounts": [mount], "env": environment}
        return {"spec": {"volumes": [volume], "containers": [worker]}}

    def apply(self) -> Job:
        # The workers' user makes the folders below it.
        for folder in (self.folder.parent, self.folder, self.site.shared / "cache"):
            folder.mkdir(mode=0o777, exist_ok=True)
            folder.chmod(0o777)
        self.site.kubectl("apply", "-f", "-", stdin=json.dumps(self.manifest))
        return self

    # --- observe -------------------------------------------------------------------------------------------------

    def object(self) -> dict[str, Any]:
        return self.site.get("trainingjob", self.name, "-n", self.namespace)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.object().get("status") or {}
        return status

    def history(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self.status().get("history") or []
        return entries

    def pods(self) -> list[dict[str, Any]]:
        selector = f"trainium.dev/job-name={self.name}"
        pods: list[dict[str, Any]] = self.site.get("pods", "-n", self.namespace, "-l", selector)["items"]
        return pods

    def uids(self) -> set[str]:
        return {pod["metadata"]["uid"] for pod in self.pods()}

    def events(self) -> list[str]:
        items = self.site.get("events.events.k8s.io", "-n", self.namespace)["items"]
        return [f"{item['reason']}: {item['note']}" for item in items if item["regarding"].get("name") == self.name]

    def until(
        self, what: str, condition: Callable[[dict[str, Any]], bool], seconds: float = TIMEOUT_SECONDS
    ) -> dict[str, Any]:
        """The status once `condition` holds for it."""
        deadline = Deadline(seconds)
        while True:
            status = self.status()
            self.log.refresh()
            if condition(status):
                return status
            deadline.check(lambda: f"{what}: {self.describe(self.status())}")
            time.sleep(0.2)

    def describe(self, status: dict[str, Any]) -> str:
        """Describe what a person would read when a test fails."""
        parts = [json.dumps(status, indent=1), f"newest step {self.log.newest}"]
        with contextlib.suppress(Exception):
            parts += [f"{p['metadata']['name']} {p['status'].get('phase')}" for p in self.pods()]
            parts += self.events()
            for pod in self.pods():
                name = pod["metadata"]["name"]
                parts.append(f"--- log of {name}")
                parts.append(self.site.run("kubectl", "logs", "-n", self.namespace, name, "--tail=25").stdout)
        return "\n".join(parts)

    def until_phase(self, phase: str, seconds: float = TIMEOUT_SECONDS) -> dict[str, Any]:
        return self.until(f"phase {phase}", lambda status: status.get("phase") == phase, seconds)

    def until_step(self, step: int, seconds: float = TIMEOUT_SECONDS) -> dict[str, Any]:
        return self.until(f"step {step}", lambda _: self.log.newest >= step, seconds)

    def until_recovered(self, entries: int = 1, seconds: float = TIMEOUT_SECONDS) -> dict[str, Any]:
        """The newest history entry, once there are `entries` and it is over."""
        status = self.until(
            f"{entries} finished interruption(s)",
            lambda status: (
                len(status.get("history") or []) >= entries
                and status["history"][-1].get("recoveredSeconds") is not None
            ),
            seconds,
        )
        entry: dict[str, Any] = status["history"][-1]
        return entry

    def losses(self) -> dict[int, float]:
        self.log.refresh()
        return {step: record["loss"] for step, record in self.log.steps.items()}

    # --- disturb -------------------------------------------------------------------------------------------------

    def members(self) -> list[dict[str, Any]]:
        return members_of(self.site.get("configmap", f"{self.name}-membership", "-n", self.namespace))

    def inside(self, pod: str, *command: str) -> str:
        return self.site.kubectl("exec", pod, "-n", self.namespace, "-c", "worker", "--", *command)

    def kill_rank(self, node_rank: int, signal: str = "KILL") -> str:
        """Send a signal to the training process of a member; returns its pod."""
        pod: str = self.members()[node_rank]["podName"]
        record = self.inside(pod, "python", "-m", "trainium_agent.show_ranks").splitlines()[0]
        # The shell has its own kill; slim images have no program of that name.
        self.inside(pod, "sh", "-c", f"kill -{signal} {json.loads(record)['pid']}")
        return pod

    def scale(self, size: int) -> None:
        self.site.kubectl("scale", "trainingjob", self.name, "-n", self.namespace, f"--replicas={size}")

    def suspend(self, *, yes: bool = True) -> None:
        patch = json.dumps({"spec": {"suspend": yes}})
        self.site.kubectl("patch", "trainingjob", self.name, "-n", self.namespace, "--type=merge", f"-p={patch}")

    def delete(self, *arguments: str) -> None:
        self.site.kubectl("delete", "trainingjob", self.name, "-n", self.namespace, *arguments)
