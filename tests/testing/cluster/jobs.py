"""A TrainingJob under test: apply it, watch it, inject faults, read its results."""

import contextlib
import json
import os
import random
import string
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml

from tests.testing.cluster.policies import apply_objects, build_mutation, build_refusal, build_rule
from tests.testing.cluster.shared_cluster import SharedCluster
from tests.testing.suite.timeouts import Deadline
from trainium_contract.job import TrainingJobStatus
from trainium_contract.status.internal import unpack_internal
from trainium_contract.wire.recorded_membership import parse_members
from trainium_devcluster.demos.metrics import StepLog

BASE = """
workers: {replicas: 2, accelerator: {device: cpu}}
trainer:
  model: {preset: Tiny}
  data: {source: /cache/text.txt, sequenceLength: 64, tokenizer: {vocabSize: 512}, cacheDirectory: /cache}
  batch: {globalSize: 12, microSize: 1}
  steps: 60
  schedule: {warmupSteps: 5}
  monitor: {tensorboard: false, recordSamples: true}
checkpoint: {durable: {everySteps: 20, keepLast: 3}}
recovery: {rescaleAfterSeconds: 5, gracePeriodSeconds: 20}
"""

STATUS_REFUSAL = "a TrainingJob needs the label cost-center"
TIMEOUT_SECONDS = 90.0
"""Timeout of what takes seconds on the development cluster; a genuine one detects a lost node after 50."""


def _write_text(folder: Path) -> None:
    """Write the text of all jobs, which is tokenized once, in a second, into the same folder."""
    generator = random.Random(0)
    words = ["".join(generator.choices(string.ascii_lowercase, k=generator.randint(3, 9))) for _ in range(400)]
    lines = (" ".join(generator.choices(words, k=12)) for _ in range(4000))
    (folder / "text.txt").write_text("\n".join(lines), encoding="utf-8")


def curves_agree(losses: dict[int, float], reference: dict[int, float], tolerance: float) -> bool:
    """Return whether the curves have the same steps and agree within a relative tolerance."""
    return losses.keys() == reference.keys() and all(
        abs(losses[step] - reference[step]) <= tolerance * abs(reference[step]) for step in losses
    )


def merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with `change`, with merged mappings."""
    nested = {
        key: merge(base[key], value)
        for key, value in change.items()
        if isinstance(value, dict) and isinstance(base.get(key), dict)
    }
    return base | change | nested


def _merge_pod_templates(cluster: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """Merge two pod templates: the volumes of both, and the worker container with the fields of both."""
    cluster_spec, job_spec = cluster.get("spec", {}), job["spec"]
    cluster_worker, job_worker = cluster_spec.get("containers", [{}])[0], job_spec["containers"][0]
    lists = {key: [*cluster_worker.get(key, []), *job_worker.get(key, [])] for key in ("env", "volumeMounts")}
    container = {**cluster_worker, **job_worker, **{key: value for key, value in lists.items() if value}}
    volumes = [*cluster_spec.get("volumes", []), *job_spec["volumes"]]
    return {**cluster, **job, "spec": {**cluster_spec, **job_spec, "volumes": volumes, "containers": [container]}}


@dataclass
class Job:
    """One TrainingJob, with checkpoints in the cluster's shared folder."""

    cluster: SharedCluster
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
        """Return the folder of checkpoints, metrics and sample records."""
        return self.cluster.shared / self.namespace / (self.folder_name or self.name)

    @property
    def manifest(self) -> dict[str, Any]:
        spec = merge(yaml.safe_load(BASE), yaml.safe_load(self.change) or {})
        template = merge(self._text_cache_template(), spec["workers"].get("template", {}))
        spec["workers"]["template"] = _merge_pod_templates(self.cluster.settings.get("workerTemplate") or {}, template)
        spec["checkpoint"]["storage"] = {"hostPath": {"path": str(self.cluster.shared)}}
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

    def _text_cache_template(self) -> dict[str, Any]:
        """Return a pod template with the folder of tokenized text, which all tests share."""
        volume = {"name": "shared-cache", "hostPath": {"path": str(self.cluster.shared / "cache"), "type": "Directory"}}
        mount = {"name": "shared-cache", "mountPath": "/cache"}
        environment = [{"name": name, "value": value} for name, value in self.environment.items()]
        worker = {"name": "worker", "volumeMounts": [mount], "env": environment}
        return {"spec": {"volumes": [volume], "containers": [worker]}}

    def apply(self) -> Self:
        # The user of the workers creates folders below it.
        for folder in (self.folder.parent, self.folder, self.cluster.shared / "cache"):
            folder.mkdir(mode=0o777, exist_ok=True)
            folder.chmod(0o777)
        if not (self.cluster.shared / "cache/text.txt").exists():
            _write_text(self.cluster.shared / "cache")
        self.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(self.manifest))
        return self

    # --- observe -------------------------------------------------------------------------------------------------

    def object(self) -> dict[str, Any]:
        return self.cluster.get("trainingjob", self.name, "-n", self.namespace)

    def status(self) -> dict[str, Any]:
        """Return the status with the operator's internal fields in their places."""
        stored = self.object().get("status")
        return TrainingJobStatus().to_wire() | unpack_internal(stored) if stored else {}

    def history(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self.status().get("history") or []
        return entries

    def pods(self) -> list[dict[str, Any]]:
        selector = f"trainium.dev/job-name={self.name}"
        pods: list[dict[str, Any]] = self.cluster.get("pods", "-n", self.namespace, "-l", selector)["items"]
        return pods

    def uids(self) -> set[str]:
        return {pod["metadata"]["uid"] for pod in self.pods()}

    def condition(self, kind: str) -> dict[str, Any]:
        """Return a condition of the status; empty without one."""
        conditions = self.status().get("conditions") or []
        return next((condition for condition in conditions if condition["type"] == kind), {})

    def why(self) -> str:
        """Return the output of `kubectl trn why`."""
        command = (sys.executable, "-m", "trainium_client.commands.main", "why", self.name, "-n", self.namespace)
        variables = {**os.environ, **self.cluster.variables}
        return subprocess.run(command, env=variables, capture_output=True, check=True, text=True).stdout

    def events(self) -> list[str]:
        items = self.cluster.get("events.events.k8s.io", "-n", self.namespace)["items"]
        return [f"{item['reason']}: {item['note']}" for item in items if item["regarding"].get("name") == self.name]

    def until(
        self, what: str, condition: Callable[[dict[str, Any]], bool], seconds: float = TIMEOUT_SECONDS
    ) -> dict[str, Any]:
        """Return the status once it fulfils the condition."""
        deadline = Deadline(seconds)
        while True:
            status = self.status()
            self.log.refresh()
            if condition(status):
                return status
            deadline.check(lambda: f"{what}: {self.describe(self.status())}")
            time.sleep(0.2)

    def describe(self, status: dict[str, Any]) -> str:
        """Describe the job for the message of a failed test."""
        parts = [json.dumps(status, indent=1), f"newest step {self.log.newest}"]
        with contextlib.suppress(Exception):
            parts += [f"{pod['metadata']['name']} {pod['status'].get('phase')}" for pod in self.pods()]
            parts += self.events()
            for pod in self.pods():
                name = pod["metadata"]["name"]
                parts.append(f"--- log of {name}")
                parts.append(self.cluster.run("kubectl", "logs", "-n", self.namespace, name, "--tail=25").stdout)
        return "\n".join(parts)

    def until_phase(self, phase: str, seconds: float = TIMEOUT_SECONDS) -> dict[str, Any]:
        return self.until(f"phase {phase}", lambda status: status.get("phase") == phase, seconds)

    def until_step(self, step: int, seconds: float = TIMEOUT_SECONDS) -> dict[str, Any]:
        return self.until(f"step {step}", lambda _: self.log.newest >= step, seconds)

    def until_recovered(self, entries: int = 1, seconds: float = TIMEOUT_SECONDS) -> dict[str, Any]:
        """Return the newest history entry once there are `entries` and it has ended."""
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

    @contextlib.contextmanager
    def refused_statuses(self) -> Iterator[None]:
        """Let a policy refuse every status of the namespace's jobs, as one on `trainingjobs/*` of others does."""
        rule = build_rule("trainium.dev", "trainingjobs/*", operations=["UPDATE"])
        policy = build_refusal(self.namespace, "false", STATUS_REFUSAL, rule)
        probe = ("patch", "trainingjob", self.name, "-n", self.namespace, "--subresource=status", "--type=merge",
                 "--dry-run=server", "-p", '{"status": {"desired": 7}}')  # fmt: skip
        with apply_objects(self.cluster, *policy):
            deadline = Deadline(TIMEOUT_SECONDS)
            while STATUS_REFUSAL not in self.cluster.run("kubectl", *probe).stderr:
                deadline.check(lambda: "the policy is in force")
                time.sleep(0.2)
            yield

    def removed_annotations(self) -> contextlib.AbstractContextManager[None]:
        """Let a policy remove the annotations of the namespace's ConfigMaps and budgets."""
        rules = build_rule("", "configmaps"), build_rule("policy", "poddisruptionbudgets")
        patch = 'JSONPatch{op: "remove", path: "/metadata/annotations"}'
        condition = "has(object.metadata.annotations)"
        return apply_objects(self.cluster, *build_mutation(self.namespace, patch, *rules, condition=condition))

    def write_eviction(self, pod: str, message: str) -> None:
        """Write what a kubelet writes when it has evicted a pod."""
        condition = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
        status = {"phase": "Failed", "reason": "Evicted", "message": message, "conditions": [condition]}
        patch = ("patch", "pod", pod, "-n", self.namespace, "--subresource=status", "--type=strategic")
        self.cluster.kubectl(*patch, "-p", json.dumps({"status": status}))

    def members(self) -> list[dict[str, Any]]:
        return parse_members(self.cluster.get("configmap", f"{self.name}-membership", "-n", self.namespace))

    def exec_in_pod(self, pod: str, *command: str) -> str:
        return self.cluster.kubectl("exec", pod, "-n", self.namespace, "-c", "worker", "--", *command)

    def kill_rank(self, node_rank: int, signal: str = "KILL") -> str:
        """Send a signal to the training process of a member; return its pod."""
        pod: str = self.members()[node_rank]["podName"]
        record = self.exec_in_pod(pod, "python", "-m", "trainium_agent.show_ranks").splitlines()[0]
        # The shell has its own kill; slim images have no program of that name.
        self.exec_in_pod(pod, "sh", "-c", f"kill -{signal} {json.loads(record)['pid']}")
        return pod

    def scale(self, size: int) -> None:
        self.cluster.kubectl("scale", "trainingjob", self.name, "-n", self.namespace, f"--replicas={size}")

    def suspend(self, *, yes: bool = True) -> None:
        patch = json.dumps({"spec": {"suspend": yes}})
        self.cluster.kubectl("patch", "trainingjob", self.name, "-n", self.namespace, "--type=merge", f"-p={patch}")

    def delete(self, *arguments: str) -> None:
        self.cluster.kubectl("delete", "trainingjob", self.name, "-n", self.namespace, *arguments)
