"""Plain pods on a cluster: making them, waiting for what they do, and looking at what became of them.

Knows nothing of the project's own resources, so that the same tests run on the process node and on genuine kubelets.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.testing.cluster.sites import Site

Json = dict[str, Any]
HOLD = "trainium.dev/test-hold"  # a finalizer: keeps a deleted pod readable after its containers have ended


class StillWaitingError(AssertionError):
    """What a test waited for did not happen."""


@dataclass
class Lab:
    """A namespace of its own on a cluster."""

    site: Site
    namespace: str
    image: str
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def patience(self) -> float:
        """Seconds that a change of a pod may take: a genuine kubelet syncs volumes once a minute."""
        return 30.0 if self.site.kind == "local" else 150.0

    def environment(self) -> dict[str, str]:
        """The environment of a command that speaks to the cluster."""
        return os.environ | self.site.variables

    def name(self, stem: str) -> str:
        return f"{stem}-{next(self._numbers)}"

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        return self.site.kubectl("-n", self.namespace, *arguments, stdin=stdin, seconds=self.patience + 30)

    def create(self, *objects: Json) -> None:
        self.kubectl(
            "create", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        )

    def pod(self, stem: str, *containers: Json, hold: bool = False, labels: Json | None = None, **spec: Any) -> str:
        """Create a pod and return its name; `hold` keeps its final status readable after deletion."""
        name = self.name(stem)
        metadata: Json = {"name": name, "labels": labels or {}}
        if hold:
            metadata["finalizers"] = [HOLD]
        body = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 5, "containers": list(containers), **spec}
        self.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": body})
        return name

    def container(self, script: str | Sequence[str], name: str = "main", **fields: Any) -> Json:
        """A container that runs a shell script, or a command given as a list."""
        command = ["sh", "-c", script] if isinstance(script, str) else list(script)
        return {"name": name, "image": self.image, "imagePullPolicy": "IfNotPresent", "command": command, **fields}

    def python(self, script: str, name: str = "main", **fields: Any) -> Json:
        """A container that runs a Python program."""
        return self.container(["python3", "-u", "-c", script], name, **fields)

    def get(self, pod: str) -> Json:
        return self.site.get("pod", pod, "-n", self.namespace)

    def wait(self, pod: str, what: Callable[[Json], Any], why: str, seconds: float | None = None) -> Json:
        """The pod once `what` holds of it."""
        end = time.monotonic() + (seconds or self.patience)
        found: Json = {}
        while time.monotonic() < end:
            found = self.get(pod)
            if what(found):
                return found
            time.sleep(0.1)
        raise StillWaitingError(
            f"{pod}: waited in vain until {why}; status: {json.dumps(found.get('status'), indent=1)}"
        )

    def ended(self, pod: str) -> Json:
        """The pod once it has Succeeded or Failed."""
        return self.wait(pod, lambda p: p["status"].get("phase") in {"Succeeded", "Failed"}, "it ended")

    def running(self, pod: str) -> Json:
        """The pod once all its containers run and are ready."""
        return self.wait(pod, is_ready, "it was ready")

    def output(self, pod: str, container: str | None = None) -> str:
        """The log of a pod once it has ended."""
        self.ended(pod)
        return self.logs(pod, *(["-c", container] if container else []))

    def logs(self, pod: str, *arguments: str) -> str:
        return self.kubectl("logs", pod, *arguments)

    def says(self, pod: str, text: str, *arguments: str) -> str:
        """The log once it holds `text`."""
        end = time.monotonic() + self.patience
        found = ""
        while time.monotonic() < end:
            done = self.site.run("kubectl", "-n", self.namespace, "logs", pod, *arguments)
            found = done.stdout
            if done.returncode == 0 and text in found:
                return found
            time.sleep(0.1)
        raise StillWaitingError(f"{pod}: {text!r} did not appear in its log: {found!r}")

    def delete(self, pod: str, *arguments: str) -> None:
        self.kubectl("delete", "pod", pod, "--wait=false", *arguments)

    def release(self, pod: str) -> None:
        """Let go of a pod that `hold` kept."""
        self.kubectl("patch", "pod", pod, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')

    def gone(self, pod: str, seconds: float | None = None) -> None:
        """Return when the pod is no more."""
        end = time.monotonic() + (seconds or self.patience)
        while time.monotonic() < end:
            if not self.kubectl("get", "pod", pod, "--ignore-not-found"):
                return
            time.sleep(0.1)
        raise StillWaitingError(f"{pod} is still there")

    def event(self, pod: str, reason: str) -> Json:
        """The first event of that reason about the pod."""
        end = time.monotonic() + self.patience
        seen: list[str] = []
        while time.monotonic() < end:
            about = ("--field-selector", f"involvedObject.name={pod}")
            items = self.site.get("events", "-n", self.namespace, *about)["items"]
            for item in items:
                if item["reason"] == reason:
                    found: Json = item
                    return found
            seen = [item["reason"] for item in items]
            time.sleep(0.1)
        raise StillWaitingError(f"no event {reason} about {pod}; there are {seen}")


def is_ready(pod: Json) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))


def condition(pod: Json, kind: str) -> Json:
    return next(c for c in pod["status"]["conditions"] if c["type"] == kind)


def status(pod: Json, container: str = "main") -> Json:
    """The status of one container, empty while there is none."""
    both = [*pod["status"].get("containerStatuses", []), *pod["status"].get("initContainerStatuses", [])]
    return next((c for c in both if c["name"] == container), {"state": {}, "lastState": {}, "restartCount": 0})


def terminated(pod: Json, container: str = "main") -> Json:
    """How a container ended."""
    found: Json = status(pod, container)["state"].get("terminated", {})
    return found
