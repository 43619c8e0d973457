"""Create plain pods on a cluster, wait for their states, and read their logs and events.

It uses none of the project's resources, so that the same tests run on the process node and on genuine kubelets.
"""

import itertools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.testing.cluster.marks import HOLD
from tests.testing.cluster.shared_cluster import SharedCluster
from tests.testing.suite.timeouts import until
from trainium_devcluster.node.api.objects import is_ready

Json = dict[str, Any]


@dataclass
class PodClient:
    """A client for pods in one namespace of a cluster."""

    cluster: SharedCluster
    namespace: str
    image: str
    _numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    @property
    def timeout(self) -> float:
        """Seconds that a change of a pod may take: a genuine kubelet syncs volumes once a minute."""
        return 30.0 if self.cluster.kind == "local" else 150.0

    def environment(self) -> dict[str, str]:
        """Return the environment of a command that connects to the cluster."""
        return os.environ | self.cluster.variables

    def name(self, stem: str) -> str:
        return f"{stem}-{next(self._numbers)}"

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        return self.cluster.kubectl("-n", self.namespace, *arguments, stdin=stdin, seconds=self.timeout + 30)

    def create(self, *objects: Json) -> None:
        self.kubectl(
            "create", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        )

    def create_pod(
        self,
        stem: str,
        *containers: Json,
        hold: bool = False,
        labels: Json | None = None,
        as_root: bool = True,
        **spec: Any,
    ) -> str:
        """Create a pod and return its name; `hold` keeps its final status readable after deletion.

        With `as_root` the pod runs as root, otherwise as the user of the image. The process node has only its user.
        """
        name = self.name(stem)
        metadata: Json = {"name": name, "labels": labels or {}}
        if hold:
            metadata["finalizers"] = [HOLD]
        if as_root and self.cluster.kind != "local":
            spec["securityContext"] = {"runAsUser": 0, **spec.get("securityContext", {})}
        body = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 5, "containers": list(containers), **spec}
        self.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": body})
        return name

    def container(self, script: str | Sequence[str], name: str = "main", **fields: Any) -> Json:
        """Return a container that runs a shell script, or a command given as a list."""
        command = ["sh", "-c", script] if isinstance(script, str) else list(script)
        return {"name": name, "image": self.image, "imagePullPolicy": "IfNotPresent", "command": command, **fields}

    def python(self, script: str, name: str = "main", **fields: Any) -> Json:
        """Return a container that runs a Python program."""
        return self.container(["python3", "-u", "-c", script], name, **fields)

    def get(self, pod: str) -> Json:
        return self.cluster.get("pod", pod, "-n", self.namespace)

    def wait(self, pod: str, condition: Callable[[Json], Any], description: str, seconds: float | None = None) -> Json:
        """Return the pod once the condition is true of it."""
        current: Json = {}

        def is_met() -> bool:
            nonlocal current
            current = self.get(pod)
            return bool(condition(current))

        def describe() -> str:
            return f"{pod}: waited until {description}; status: {json.dumps(current.get('status'), indent=1)}"

        until(is_met, describe, seconds or self.timeout)
        return current

    def wait_ended(self, pod: str) -> Json:
        """Return the pod once it has Succeeded or Failed."""
        return self.wait(pod, lambda pod: pod["status"].get("phase") in {"Succeeded", "Failed"}, "it ended")

    def wait_ready(self, pod: str) -> Json:
        """Return the pod once all its containers run and are ready."""
        return self.wait(pod, is_ready, "it was ready")

    def output(self, pod: str) -> str:
        """Return the log of a pod once it has ended."""
        self.wait_ended(pod)
        return self.logs(pod)

    def logs(self, pod: str, *arguments: str) -> str:
        return self.kubectl("logs", pod, *arguments)

    def wait_for_log(self, pod: str, text: str, *arguments: str) -> str:
        """Return the log once it contains `text`."""
        log = ""

        def has_text() -> bool:
            nonlocal log
            done = self.cluster.run("kubectl", "-n", self.namespace, "logs", pod, *arguments)
            log = done.stdout
            return done.returncode == 0 and text in log

        until(has_text, lambda: f"{pod}: {text!r} appears in its log: {log!r}", self.timeout)
        return log

    def delete(self, pod: str, *arguments: str) -> None:
        self.kubectl("delete", "pod", pod, "--wait=false", *arguments)

    def release(self, pod: str) -> None:
        """Remove the finalizer of a pod that was created with `hold`."""
        self.kubectl("patch", "pod", pod, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')

    def wait_deleted(self, pod: str, seconds: float | None = None) -> None:
        """Wait until the pod does not exist."""
        until(
            lambda: not self.kubectl("get", "pod", pod, "--ignore-not-found"),
            f"{pod} is deleted",
            seconds or self.timeout,
        )

    def event(self, pod: str, reason: str) -> Json:
        """Return the first event of that reason about the pod."""
        events: list[Json] = []

        def find() -> Json | None:
            selector = ("--field-selector", f"involvedObject.name={pod}")
            events[:] = self.cluster.get("events", "-n", self.namespace, *selector)["items"]
            return next((item for item in events if item["reason"] == reason), None)

        def describe() -> str:
            return f"an event {reason} about {pod}; there are {[item['reason'] for item in events]}"

        event = until(find, describe, self.timeout)
        assert event is not None
        return event


def condition(pod: Json, kind: str) -> Json:
    return next(condition for condition in pod["status"]["conditions"] if condition["type"] == kind)


def status(pod: Json, container: str = "main") -> Json:
    """Return the status of one container, or an empty one."""
    statuses = [*pod["status"].get("containerStatuses", []), *pod["status"].get("initContainerStatuses", [])]
    return next(
        (item for item in statuses if item["name"] == container), {"state": {}, "lastState": {}, "restartCount": 0}
    )


def terminated_state(pod: Json, container: str = "main") -> Json:
    """Return the terminated state of a container, or an empty one."""
    state: Json = status(pod, container)["state"].get("terminated", {})
    return state
