"""The chart as the real helm renders it, and what tests read of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.definition.conftest import Api
from trainium_operator.settings import Settings, parse_settings

RELEASE = "checked"
NAME = f"{RELEASE}-trainium-operator"
ROOT = Path(__file__).parents[3]
CHART = ROOT / "helm/trainium-operator"
EVERYTHING = (
    "replicas=3,lease.durationSeconds=6,lease.renewDeadlineSeconds=4,lease.retrySeconds=1,networkPolicy.create=true,metrics.serviceMonitor.create=true,metrics.podMonitor.create=true,"
    "metrics.prometheusRule.create=true,metrics.dashboards.create=true,metrics.namedJobs=50,"
    "metrics.secure=true,metrics.tokenSecret.name=scraper,https.issuer.name=ca,ui.enabled=true,"
    "watchNamespaces={training,research},trainerImagePullSecrets={one,two},image.tag=v7,extraArgs={--log-level=debug},"
    "quarantine.keepMemory=true,workerLogFormat=json"
)
"""Values that render every object."""
_rendered: dict[tuple[str, str], str] = {}


@dataclass(frozen=True, slots=True)
class RenderedChart:
    """The objects of the chart; `suffix` is what follows the name of the operator in an object's name."""

    objects: tuple[dict[str, Any], ...]

    def list_named(self, kind: str, suffix: str = "") -> list[dict[str, Any]]:
        """Return the objects of a kind with this name, in all namespaces."""
        name = f"{NAME}-{suffix}" if suffix else NAME
        return [each for each in self.list_kind(kind) if each["metadata"]["name"] == name]

    def list_kind(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the objects of these kinds."""
        return [each for each in self.objects if each["kind"] in kinds]

    def find(self, kind: str, suffix: str = "") -> dict[str, Any]:
        """Return the only object of a kind with this name."""
        (match,) = self.list_named(kind, suffix)
        return match

    def has(self, kind: str, suffix: str = "") -> bool:
        """Return whether the chart has objects of a kind with this name."""
        return bool(self.list_named(kind, suffix))

    @property
    def kinds(self) -> set[str]:
        return {each["kind"] for each in self.objects}

    @property
    def pod(self) -> dict[str, Any]:
        """The pod template of the operator's Deployment."""
        return dict(self.find("Deployment")["spec"]["template"])

    @property
    def container(self) -> dict[str, Any]:
        """The only container of the operator's pods."""
        (container,) = self.pod["spec"]["containers"]
        return dict(container)

    @property
    def settings(self) -> Settings:
        """The settings of the operator as the Deployment starts it."""
        return parse_settings(self.container["args"])

    def rights(self, kind: str, suffix: str = "") -> set[tuple[str, str, str, str]]:
        """Return each (group, resource, verb, name) that a role grants."""
        return granted_rights(self.find(kind, suffix))


def granted_rights(role: dict[str, Any]) -> set[tuple[str, str, str, str]]:
    """Return each (group, resource, verb, name) of a role; an empty name stands for all names."""
    return {
        (group, resource, verb, name)
        for rule in role["rules"]
        for group in rule.get("apiGroups", [""])
        for resource in rule.get("resources") or rule["nonResourceURLs"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [""])
    }


def render_chart(api: Api, values: str = "replicas=2") -> RenderedChart:
    """Render the chart with these values, in the form of `helm --set`."""
    key = (api.chart, values)
    if key not in _rendered:
        _rendered[key] = api.helm("template", RELEASE, api.chart, "--namespace", "system", "--set", values)
    return RenderedChart(tuple(filter(None, yaml.load_all(_rendered[key], yaml.CSafeLoader))))


def refuse_values(api: Api, values: str) -> str:
    """Return why helm refuses to render the chart with these values."""
    done = api.run("helm", "template", RELEASE, api.chart, "--set", values)
    assert done.returncode != 0
    return done.stderr


def list_selectors(document: Any) -> Iterator[dict[str, str]]:
    """Yield every label selector of an object, at any depth."""
    if isinstance(document, dict):
        for key, value in document.items():
            if key in {"matchLabels", "selector"} and isinstance(value, dict):
                yield {name: each for name, each in value.items() if isinstance(each, str)}
            yield from list_selectors(value)
    elif isinstance(document, list):
        for item in document:
            yield from list_selectors(item)
