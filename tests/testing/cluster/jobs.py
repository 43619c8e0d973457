"""A TrainingJob under test: apply it, watch it, inject faults, read its results."""

import contextlib
import json
import os
import random
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import yaml

from tests.testing.api.json_objects import merge
from tests.testing.cluster.policies import apply_objects, build_mutation, build_refusal, build_rule
from tests.testing.cluster.shared_cluster import SharedCluster
from tests.testing.suite.timeouts import slowness, until
from trainium_devcluster.jobs.driver import JobDriver

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


def _merge_pod_templates(cluster: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """Merge two pod templates: the volumes of both, and the worker container with the fields of both."""
    cluster_spec, job_spec = cluster.get("spec", {}), job["spec"]
    cluster_worker, job_worker = cluster_spec.get("containers", [{}])[0], job_spec["containers"][0]
    lists = {key: [*cluster_worker.get(key, []), *job_worker.get(key, [])] for key in ("env", "volumeMounts")}
    container = {**cluster_worker, **job_worker, **{key: value for key, value in lists.items() if value}}
    volumes = [*cluster_spec.get("volumes", []), *job_spec["volumes"]]
    return {**cluster, **job, "spec": {**cluster_spec, **job_spec, "volumes": volumes, "containers": [container]}}


class Job(JobDriver):
    """One TrainingJob, with checkpoints in the cluster's shared folder."""

    cluster: SharedCluster

    def __init__(
        self,
        cluster: SharedCluster,
        namespace: str,
        name: str,
        change: str = "",
        folder_name: str = "",
        environment: dict[str, str] | None = None,
    ) -> None:
        """`change` is a YAML fragment of the spec, `folder_name` that of another job whose folder this one uses."""
        self.change = change
        self.environment = environment or {}
        super().__init__(cluster, namespace, name, cluster.shared / namespace / (folder_name or name))

    @property
    def manifest(self) -> dict[str, Any]:
        spec = merge(yaml.safe_load(BASE), yaml.safe_load(self.change) or {})
        template = merge(self._text_cache_template(), spec["workers"].get("template", {}))
        spec["workers"]["template"] = _merge_pod_templates(self.cluster.settings.get("workerTemplate") or {}, template)
        spec["checkpoint"]["storage"] = {"hostPath": {"path": str(self.cluster.shared)}}
        if "program" in spec:
            del spec["trainer"]
        else:
            spec["checkpoint"]["storage"]["subPath"] = f"{self.namespace}/{self.folder.name}"
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
        self.apply_manifest(self.manifest)
        return self

    def measure_slowness(self) -> float:
        return slowness()

    def why(self) -> str:
        """Return the output of `kubectl trn why`."""
        command = (sys.executable, "-m", "trainium_client.commands.main", "why", self.name, "-n", self.namespace)
        variables = {**os.environ, **self.cluster.variables}
        return subprocess.run(command, env=variables, capture_output=True, check=True, text=True).stdout

    def describe(self) -> str:
        """Describe the job for the message of a failed test."""
        parts = [super().describe()]
        with contextlib.suppress(Exception):
            parts += [json.dumps(self.read_status(), indent=1), *self.list_events()]
            for pod in self.list_pods():
                name = pod["metadata"]["name"]
                parts.append(f"--- log of {name}")
                parts.append(self.cluster.run("kubectl", "logs", "-n", self.namespace, name, "--tail=25").stdout)
        return "\n".join(parts)

    @contextlib.contextmanager
    def refused_statuses(self) -> Iterator[None]:
        """Let a policy refuse every status of the namespace's jobs, as one on `trainingjobs/*` of others does."""
        rule = build_rule("trainium.dev", "trainingjobs/*", operations=["UPDATE"])
        policy = build_refusal(self.namespace, "false", STATUS_REFUSAL, rule)
        probe = (
            "patch",
            "trainingjob",
            self.name,
            "-n",
            self.namespace,
            "--subresource=status",
            "--type=merge",
            "--dry-run=server",
            "-p",
            '{"status": {"desired": 7}}',
        )
        with apply_objects(self.cluster, *policy):
            until(lambda: STATUS_REFUSAL in self.cluster.run("kubectl", *probe).stderr, "the policy is in force")
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
