"""Run the real Kueue controller beside a cluster's control plane: its CRDs, its webhooks, its certificates.

Kueue generates and signs its certificates itself, and reads them, as in a pod, from a folder that a kubelet fills from
its Secret; here `install_kueue` fills it. A Service of type ExternalName leads to its webhooks, so names and
certificates are those of a real installation.

`install_kueue` returns when Workloads can be created: the controller is ready and its webhooks answer.
"""

from __future__ import annotations

import base64
import contextlib
import time
from typing import TYPE_CHECKING, Any

import yaml

from trainium_contract.api_server.errors import ApiError
from trainium_devcluster.binaries import KUEUE_PROGRAMS, Program, ensure_binaries
from trainium_devcluster.controlplane.components import HOST, find_free_ports
from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from trainium_devcluster.handle import ClusterHandle
    from trainium_devcluster.progress import ReportProgress

NAMESPACE = "kueue-system"
FRAMEWORK = "TrainingJob.v1alpha1.trainium.dev"
"""The kind whose controller creates Workloads itself."""
_SERVICE = "kueue-webhook-service"
_SECRET = "kueue-webhook-server-cert"  # noqa: S105 - the name of an object
_GROUP = "kueue.x-k8s.io"
_CONVERTED_KINDS = frozenset({"localqueues", "clusterqueues", "cohorts", "workloads", "multikueueclusters"})
"""CRDs whose older version the controller converts, as in its kustomization."""
_READY_SECONDS = 120.0
_POLL_SECONDS = 0.1
_DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_ADMISSION = "/apis/admissionregistration.k8s.io/v1"


def install_kueue(cluster: ClusterHandle, *, report: ReportProgress) -> None:
    """Install and start Kueue. Raises ClusterError."""
    binaries = ensure_binaries(programs=KUEUE_PROGRAMS, report=report)
    port, health = find_free_ports(2)
    manifests = binaries.folder / "components"
    report("starting Kueue")
    api = cluster.api
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    api.create("/api/v1/namespaces", namespace, exists_ok=True)
    for kind, document in _build_service_objects(port):
        api.create(f"/api/v1/namespaces/{NAMESPACE}/{kind}", document, exists_ok=True)
    for definition in _read_definitions(manifests, port):
        api.create(_DEFINITIONS, definition, exists_ok=True)
    for webhooks in _read_webhooks(manifests, port):
        api.create(f"{_ADMISSION}/{webhooks['kind'].lower()}s", webhooks, exists_ok=True)
    certificates = cluster.paths.root / "kueue-certificates"
    configuration = cluster.paths.root / "kueue.yaml"
    configuration.write_text(yaml.safe_dump(_build_configuration(certificates, port, health)))
    cluster.request_supervisor(
        {"op": "start-kueue", "program": str(binaries.find_path(Program.KUEUE)), "configuration": str(configuration)}
    )
    deadline = time.monotonic() + _READY_SECONDS
    _wait_until(cluster, deadline, lambda: _write_certificates(cluster, certificates), "its certificates")
    _wait_until(cluster, deadline, lambda: _is_webhook_ready(cluster), "its webhooks")


def _build_configuration(certificates: Path, port: int, health: int) -> dict[str, Any]:
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": NAMESPACE,
        "health": {"healthProbeBindAddress": f"{HOST}:{health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": HOST, "port": port, "certDir": str(certificates)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": True, "webhookServiceName": _SERVICE, "webhookSecretName": _SECRET},
        "integrations": {"frameworks": ["batch/job"], "externalFrameworks": [FRAMEWORK]},
        # An additional API server, with certificates in a folder of root; nothing here uses it.
        "featureGates": {"VisibilityOnDemand": False},
    }


def _build_service_objects(port: int) -> Iterator[tuple[str, dict[str, Any]]]:
    metadata = {"namespace": NAMESPACE}
    yield "secrets", {"apiVersion": "v1", "kind": "Secret", "metadata": {**metadata, "name": _SECRET}}
    spec = {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]}
    yield "services", {"apiVersion": "v1", "kind": "Service", "metadata": {**metadata, "name": _SERVICE}, "spec": spec}


def _read_definitions(manifests: Path, port: int) -> Iterator[dict[str, Any]]:
    for path in sorted((manifests / "crd" / "bases").glob(f"{_GROUP}_*.yaml")):
        definition = yaml.load(path.read_text(), Loader=_Loader)  # noqa: S506 - the C loader of safe_load
        if definition["spec"]["names"]["plural"] in _CONVERTED_KINDS:
            client = {"service": {"namespace": NAMESPACE, "name": _SERVICE, "path": "/convert", "port": port}}
            webhook = {"clientConfig": client, "conversionReviewVersions": ["v1"]}
            definition["spec"]["conversion"] = {"strategy": "Webhook", "webhook": webhook}
        yield definition


def _read_webhooks(manifests: Path, port: int) -> Iterator[dict[str, Any]]:
    """Return the webhooks of Kueue's own objects, without those of the workloads that it could manage."""
    for document in yaml.safe_load_all((manifests / "webhook" / "manifests.yaml").read_text()):
        webhooks = [
            webhook
            for webhook in document["webhooks"]
            if all(rule["apiGroups"] == [_GROUP] for rule in webhook["rules"])
        ]
        for webhook in webhooks:
            webhook["clientConfig"]["service"] |= {"namespace": NAMESPACE, "name": _SERVICE, "port": port}
        yield {**document, "metadata": {"name": f"kueue-{document['metadata']['name']}"}, "webhooks": webhooks}


def _write_certificates(cluster: ClusterHandle, folder: Path) -> bool:
    """Write the Secret's content to the folder that the controller reads; return False while it is empty."""
    data = cluster.api.get(f"/api/v1/namespaces/{NAMESPACE}/secrets/{_SECRET}").get("data") or {}
    if "tls.crt" not in data:
        return False
    folder.mkdir(mode=0o700, exist_ok=True)
    for name, value in sorted(data.items(), key=lambda item: item[0] == "tls.crt"):  # the last file, for which it waits
        (folder / name).write_bytes(base64.b64decode(value))
    return True


def _is_webhook_ready(cluster: ClusterHandle) -> bool:
    """Return whether the webhooks admit a flavor (a dry run)."""
    flavor = {"apiVersion": f"{_GROUP}/v1beta2", "kind": "ResourceFlavor", "metadata": {"name": "probe"}}
    with contextlib.suppress(ApiError):
        cluster.api.create(f"/apis/{_GROUP}/v1beta2/resourceflavors?dryRun=All", flavor)
        return True
    return False


def _wait_until(cluster: ClusterHandle, deadline: float, condition: Any, what: str) -> None:
    while not condition():
        row = cluster.request_supervisor({"op": "status"})["kueue"]
        log = cluster.paths.logs / "kueue.log"
        if row is None or row["code"] is not None:
            raise ClusterError(f"Kueue ended with code {row and row['code']} while it started; its log is {log}.")
        if time.monotonic() > deadline:
            raise ClusterError(f"Kueue still lacks {what} after {_READY_SECONDS:.0f} s; its log is {log}.")
        time.sleep(_POLL_SECONDS)


_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Loads the CRD of Workload, a megabyte, in 0.6 s instead of 6."""
