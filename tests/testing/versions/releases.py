"""helm's releases of two versions on one cluster, and who leads among their replicas."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.testing.cluster.access import ROOT
from tests.testing.suite.patience import patient, until
from trainium_devcluster.cluster import system_values

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.testing.cluster.sites import Site
    from tests.testing.versions.previous import Previous

RELEASE = "trainium-operator"
NAMESPACE = "trainium-system"
OLD, NEW, BROKEN = "previous", "present", "never-pushed"
"""Tags of images: the version before, this one, and one that no registry has."""
PRESENT_CHART = ROOT / "helm" / "trainium-operator"


@dataclass
class Releases:
    """The operator on a cluster: installed, upgraded, rolled back as a person does it."""

    site: Site
    previous: Previous
    story: list[str] = field(default_factory=list)
    """What was done and seen, for the page about upgrading."""

    def __post_init__(self) -> None:
        cluster = self.site.cluster
        assert cluster is not None
        here = Path(__file__).parent / "entries"
        for program in ("operator", "trainer"):
            cluster.set_image(f"trainium-{program}:{OLD}", [*self.previous.modules, here])
            cluster.set_image(f"trainium-{program}:{NEW}", [here])
            cluster.set_image(f"trainium-{program}:{BROKEN}", None)

    def say(self, text: str) -> None:
        self.story.append(f"{time.strftime('%H:%M:%S')} {text}")

    def keep_story(self) -> None:
        """Leave it where somebody asked for it."""
        if path := os.environ.get("TRAINIUM_UPGRADE_STORY"):
            Path(path).write_text("\n".join(self.story) + "\n")

    # --- helm ------------------------------------------------------------------------------------------------------

    def install_previous(self) -> None:
        self._helm(
            "install", self.previous.chart, OLD, "--create-namespace", "--wait", f"--timeout={patient(120):.0f}s"
        )

    def upgrade(self, tag: str = NEW) -> None:
        """To this version; returns when helm has written all, before the roll-out is over."""
        self._helm("upgrade", PRESENT_CHART, tag)

    def go_back(self) -> None:
        """To the chart of the version before, without its definition: the newer one stays."""
        self._helm("upgrade", self.previous.chart, OLD, "--set", "crds.install=false")

    def _helm(self, verb: str, chart: Path, tag: str, *options: str) -> None:
        image = {"image": {"tag": tag}, "trainerImage": f"trainium-trainer:{tag}"}
        values = self.site.shared / f"values-{tag}.json"
        values.write_text(json.dumps({"statusIntervalSeconds": 1, "logFormat": "text"} | image | system_values()))
        self.site.helm(verb, RELEASE, str(chart), "-n", NAMESPACE, "-f", str(values), *options)
        self.say(f"helm {verb} to {tag}{''.join(f', {each}' for each in options if '=' in each)}")

    def rollback(self, revision: int) -> None:
        self.site.helm("rollback", RELEASE, str(revision), "-n", NAMESPACE)
        self.say(f"helm rollback to revision {revision}")

    def apply_definition(self) -> None:
        """The new definition alone: what a cluster has for a moment in each upgrade, and for days where it is apart."""
        crd = str(ROOT / "manifests" / "crd.yaml")
        self.site.kubectl("apply", "--server-side", "--force-conflicts", "--field-manager=helm", "-f", crd)
        self.say("the new definition alone")

    def knows(self, *path: str) -> bool:
        """Whether the installed definition has this field of the spec."""
        definition = self.site.get("crd", "trainingjobs.trainium.dev")
        schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
        for name in path:
            schema = schema.get("properties", {}).get(name)
            if schema is None:
                return False
        return True

    # --- replicas --------------------------------------------------------------------------------------------------

    def pods(self) -> dict[str, dict[str, Any]]:
        """Replicas that are not leaving, by name."""
        selector = f"app.kubernetes.io/instance={RELEASE}"
        items = self.site.get("pods", "-n", NAMESPACE, "-l", selector)["items"]
        return {pod["metadata"]["name"]: pod for pod in items if "deletionTimestamp" not in pod["metadata"]}

    def tags(self, *, ready: bool = True) -> list[str]:
        """The image tags of the replicas that are ready (or of all)."""
        return sorted(_tag(pod) for pod in self.pods().values() if not ready or _is_ready(pod))

    def leader(self) -> str:
        """The replica that leads."""
        lease = self.site.get("lease", RELEASE, "-n", NAMESPACE)
        holder = lease["spec"].get("holderIdentity") or ""
        return next((name for name in self.pods() if name in holder), "")

    def leading_tag(self) -> str:
        """The image tag of the replica that leads; empty while none does."""
        pod = self.pods().get(self.leader())
        return "" if pod is None else _tag(pod)

    def hold_roll_out(self, seconds: int) -> None:
        """A new replica counts only so long after it is ready: a roll-out stands still with both versions there."""
        patch = json.dumps({"spec": {"minReadySeconds": seconds}})
        self.site.kubectl("patch", "deployment", RELEASE, "-n", NAMESPACE, f"-p={patch}")

    def kill_leader(self) -> str:
        name = self.leader()
        self.site.kubectl("delete", "pod", name, "-n", NAMESPACE, "--grace-period=0", "--force")
        return name

    def until(self, what: str, holds: Callable[[], bool]) -> None:
        until(holds, lambda: f"{what}; {self.describe()}", 90, pause=0.3)

    def until_rolled_out(self, tag: str) -> None:
        self.until(f"both replicas are {tag}", lambda: self.tags(ready=False) == self.tags() == [tag, tag])
        self.until(f"one of {tag} leads", lambda: self.leading_tag() == tag)

    def describe(self) -> str:
        """What a person would look at."""
        listed = self.site.run("kubectl", "get", "pods,deployments,leases", "-n", NAMESPACE, "-o", "wide").stdout
        logs = [self.site.run("kubectl", "logs", name, "-n", NAMESPACE, "--tail=25").stdout for name in self.pods()]
        return "\n".join([listed, *logs, *self.story])


def _tag(pod: dict[str, Any]) -> str:
    return str(pod["spec"]["containers"][0]["image"]).rpartition(":")[2]


def _is_ready(pod: dict[str, Any]) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", ()))
