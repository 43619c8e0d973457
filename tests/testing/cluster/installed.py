"""The definition and the operator on a cluster, as the tests need them: the definition alone, or both.

Rings share an existing cluster. Tests of the definition write the status themselves, so no operator may run; tests of
training need the operator of the chart. Each ring installs its parts, whichever ran before.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

from tests.testing.cluster.access import ROOT, Access, CommandError
from tests.testing.cluster.marks import LABELS, is_marked
from tests.testing.suite.timeouts import scaled, until
from trainium_contract.definition.crd import build_custom_resource_definition

RELEASE = "trainium-operator"
NAMESPACE = "trainium-system"
DEFINITION = "trainingjobs.trainium.dev"
CHART = ROOT / "helm/trainium-operator"


class InstalledParts(StrEnum):
    """Parts of the project that are installed on a cluster."""

    DEFINITION = "the definition alone"
    OPERATOR = "the operator"


class Installed:
    """Installations of this session on a cluster."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._installed: InstalledParts | None = None

    def ensure(self, need: InstalledParts) -> None:
        """Install or uninstall until the cluster has exactly these parts."""
        if need is self._installed:
            return
        self._installed = None
        if need is InstalledParts.OPERATOR:
            install_operator(self._access)
        else:
            apply_definition(self._access)
            uninstall_operator(self._access)
        self._installed = need


def install_operator(access: Access, values: Mapping[str, Any] | None = None, *options: str) -> None:
    """Install the chart, with the cluster's values over these, until it runs, or raise CommandError with the reason."""
    defaults = {"statusIntervalSeconds": 1, "metrics": {"namedJobs": 20}}
    chart_values = {**(defaults if values is None else values), **access.settings.get("chartValues", {})}
    if access.is_existing:  # its definition may belong to another installation, without release and marks
        apply_definition(access)
        chart_values |= {"crds": {"install": False}, "commonLabels": chart_values.get("commonLabels", {}) | LABELS}
    file = access.shared / "values.json"
    file.write_text(json.dumps(chart_values))
    make_namespace(access, NAMESPACE)
    command = ("upgrade", "--install", RELEASE, str(CHART), "-n", NAMESPACE, "-f", str(file), *options)
    try:
        access.helm(*command, "--wait", f"--timeout={scaled(120):.0f}s")
    except CommandError as error:
        # Helm reports only that the operator is not ready; its pod and its log have the reason.
        pods = access.run("kubectl", "get", "pods", "-n", NAMESPACE).stdout
        log = access.run("kubectl", "logs", "-n", NAMESPACE, f"deployment/{RELEASE}", "--tail=25").stdout
        raise CommandError(f"{error}\n{pods}\n{log}") from error


@contextlib.contextmanager
def second_release(access: Access) -> Iterator[str]:
    """Install a second release of the chart for the same namespaces until the block ends; yield its namespace/name."""
    name = namespace = "second-release"
    make_namespace(access, namespace)
    first = json.loads(access.helm("get", "values", RELEASE, "-n", NAMESPACE, "-o", "json"))
    file = access.shared / f"{name}.json"
    file.write_text(json.dumps({**first, "fullnameOverride": name, "crds": {"install": False}, "replicas": 1}))
    wait = ("--wait", f"--timeout={scaled(120):.0f}s")
    try:
        access.helm("install", name, str(CHART), "-n", namespace, "-f", str(file), *wait)
        yield f"{namespace}/{name}"
    finally:
        access.helm("uninstall", name, "-n", namespace, "--ignore-not-found", "--wait")
        access.kubectl("delete", "namespace", namespace, "--wait=false")


def uninstall_operator(access: Access) -> None:
    """Uninstall the chart in any state; jobs and the definition stay."""
    access.helm("uninstall", RELEASE, "-n", NAMESPACE, "--wait", "--ignore-not-found")


def apply_definition(access: Access) -> None:
    """Apply this checkout's definition, with the mark of tests unless one without it exists."""
    existing = access.run("kubectl", "get", "crd", DEFINITION, "-o", "json")
    document = build_custom_resource_definition()
    if existing.returncode != 0 or is_marked(json.loads(existing.stdout)):
        document["metadata"]["labels"] = LABELS
    # A separate field manager keeps the mark when another one applies the definition.
    apply = ("apply", "--server-side", "--force-conflicts", "--field-manager=trainium-tests")
    access.kubectl(*apply, "-f", "-", stdin=json.dumps(document))
    await_definition(access, DEFINITION)


def await_definition(access: Access, name: str) -> None:
    """Wait until objects of the definition can be written; kubectl's own wait fails before its first condition."""
    arguments = ("get", "crd", name, "-o", 'jsonpath={.status.conditions[?(@.type=="Established")].status}')
    until(lambda: access.run("kubectl", *arguments).stdout == "True", f"the definition {name} is established", 20)


def make_namespace(access: Access, name: str, **labels: str) -> None:
    """Create a namespace with the mark of tests, after the end of a terminating one; keep an existing one."""
    metadata = {"name": name, "labels": LABELS | labels}
    document = json.dumps({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})

    def is_active() -> bool:
        created = access.run("kubectl", "create", "-f", "-", stdin=document)
        if created.returncode == 0:
            return True
        if "AlreadyExists" not in created.stderr:
            raise CommandError(f"namespace {name}: {created.stderr.strip()}")
        state = access.run("kubectl", "get", "namespace", name, "-o", "jsonpath={.metadata.name} {.status.phase}")
        return state.stdout == f"{name} Active"

    until(is_active, f"the terminating namespace {name} is deleted", 90)
