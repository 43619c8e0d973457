"""Define the command lines, certificates and readiness checks of etcd and the three Kubernetes components.

Guarantees:
- All components listen on loopback and use TLS, verified against the cluster's authority.
- Authorization is Node and RBAC, with the admission plugins of a default cluster.
- Ports do not change during a cluster's life, so that a component can restart without its clients.
"""

from __future__ import annotations

import base64
import contextlib
import json
import random
import socket
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kubernetes.client import Configuration

from trainium_contract.api_server.errors import ApiError
from trainium_contract.api_server.kubeconfig import Access
from trainium_devcluster.api_client import ApiClient
from trainium_devcluster.controlplane.certificates import Authority, KeyPair, create_signing_pair, write_private
from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from pathlib import Path

    from trainium_devcluster.state import ClusterPaths, ClusterSpec

HOST = "127.0.0.1"
SERVICE_RANGE = "10.96.0.0/16"
SERVICE_ACCOUNT_ISSUER = "https://kubernetes.default.svc.cluster.local"
_API_NAMES = (
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
    HOST,
    "10.96.0.1",
)
# Below the kernel's range for outgoing connections, which could use a port between choice and use.
_PORT_RANGE = range(18000, 32000)

# The API server refuses loopback addresses in endpoints, and every pod here has one, so these controllers would fail.
_CONTROLLERS_OFF = ("endpoints-controller", "endpointslice-controller", "endpointslice-mirroring-controller")


class Component(StrEnum):
    """The programs of the control plane; each value also names the log and the pid file."""

    ETCD = "etcd"
    APISERVER = "kube-apiserver"
    CONTROLLER_MANAGER = "kube-controller-manager"
    SCHEDULER = "kube-scheduler"


@dataclass(frozen=True, slots=True)
class Ports:
    """The loopback ports of the components."""

    etcd: int
    etcd_peer: int
    apiserver: int
    controller_manager: int
    scheduler: int

    @property
    def server(self) -> str:
        """The URL of the API server."""
        return f"https://{HOST}:{self.apiserver}"

    def to_json(self) -> str:
        """Return the text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Ports:
        """Parse the text of `to_json`."""
        return cls(**json.loads(text))


def choose_ports() -> Ports:
    """Return ports that are free now; raises ClusterError if the machine has too few."""
    return Ports(*find_free_ports(5))


def find_free_ports(count: int) -> list[int]:
    """Return `count` ports that are free on loopback now; raises ClusterError if there are fewer."""
    chosen: list[int] = []
    for port in random.sample(_PORT_RANGE, 400):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((HOST, port))
            chosen.append(port)
        if len(chosen) == count:
            return chosen
    raise ClusterError(
        f"Fewer than {count} of the ports {_PORT_RANGE.start} to {_PORT_RANGE.stop - 1} are free on loopback."
    )


def prepare(paths: ClusterPaths, ports: Ports) -> None:
    """Write the keys, certificates and kubeconfigs of a new cluster."""
    authority = Authority.create(f"trainium-devcluster-{paths.name}")
    authority.pair.write(paths.pki, "ca")
    private, public = create_signing_pair()
    write_private(paths.pki / "service-account.key", private)
    write_private(paths.pki / "service-account.pub", public)
    local = ("localhost", HOST)
    authority.issue("etcd", names=local).write(paths.pki, "etcd")
    authority.issue("kube-apiserver", names=_API_NAMES).write(paths.pki, "apiserver")
    authority.issue("etcd-client").write(paths.pki, "etcd-client")
    authority.issue("kube-apiserver-kubelet-client", organization="system:masters").write(paths.pki, "kubelet-client")
    # A separate CA: its certificates may impersonate any user.
    front_proxy = Authority.create("front-proxy")
    front_proxy.pair.write(paths.pki, "front-proxy-ca")
    front_proxy.issue("front-proxy-client").write(paths.pki, "front-proxy-client")
    for component in (Component.CONTROLLER_MANAGER, Component.SCHEDULER):
        pair = authority.issue(f"system:{component}", names=local)
        pair.write(paths.pki, component)
        _write_kubeconfig(paths.pki / f"{component}.kubeconfig", paths, ports, authority, component, pair)
    admin = authority.issue("kubernetes-admin", organization="system:masters")
    admin.write(paths.pki, "admin")
    _write_kubeconfig(paths.kubeconfig, paths, ports, authority, "admin", admin)
    paths.endpoints.write_text(ports.to_json())


def issue_node(paths: ClusterPaths, ports: Ports, node: str) -> None:
    """Write the credentials of one node, `kubeconfig` in its folder."""
    authority = Authority.load(paths.pki)
    pair = authority.issue(f"system:node:{node}", organization="system:nodes")
    folder = paths.find_node_folder(node)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _write_kubeconfig(folder / "kubeconfig", paths, ports, authority, node, pair)


def _write_kubeconfig(
    file: Path, paths: ClusterPaths, ports: Ports, authority: Authority, user: str, pair: KeyPair
) -> None:
    """Write a kubeconfig with embedded certificates, so that a client needs one file only (JSON, which is YAML)."""
    ca, certificate, key = (
        base64.b64encode(content).decode() for content in (authority.pair.certificate, pair.certificate, pair.key)
    )
    cluster = {"server": ports.server, "certificate-authority-data": ca}
    credentials = {"client-certificate-data": certificate, "client-key-data": key}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": paths.name, "cluster": cluster}],
        "users": [{"name": user, "user": credentials}],
        "contexts": [{"name": paths.name, "context": {"cluster": paths.name, "user": user}}],
        "current-context": paths.name,
    }
    write_private(file, (json.dumps(document, indent=1) + "\n").encode())


def list_arguments(component: Component, spec: ClusterSpec, paths: ClusterPaths, ports: Ports) -> list[str]:
    """Return the flags of one component; the caller's flags come last, so that they take precedence."""
    match component:
        case Component.ETCD:
            return _list_etcd_flags(paths, ports)
        case Component.APISERVER:
            return [*_list_apiserver_flags(paths, ports), *spec.apiserver_args]
        case Component.CONTROLLER_MANAGER:
            return [*_list_controller_manager_flags(spec, paths, ports), *spec.controller_manager_args]
        case Component.SCHEDULER:
            return [*_list_client_flags(Component.SCHEDULER, paths, ports.scheduler), *spec.scheduler_args]


def _list_etcd_flags(paths: ClusterPaths, ports: Ports) -> list[str]:
    url, peer = f"https://{HOST}:{ports.etcd}", f"https://{HOST}:{ports.etcd_peer}"
    return [
        "--name=default",
        f"--data-dir={paths.root / 'etcd'}",
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        f"--cert-file={paths.pki / 'etcd.crt'}",
        f"--key-file={paths.pki / 'etcd.key'}",
        f"--trusted-ca-file={paths.pki / 'ca.crt'}",
        "--client-cert-auth",
        f"--peer-cert-file={paths.pki / 'etcd.crt'}",
        f"--peer-key-file={paths.pki / 'etcd.key'}",
        f"--peer-trusted-ca-file={paths.pki / 'ca.crt'}",
        "--peer-client-cert-auth",
        # The data must survive a killed process, but not the machine; a write that the kernel has received does.
        "--unsafe-no-fsync",
        # One member elects itself; the default would delay every start by a second, and shorter intervals cost an idle
        # cluster half a percent of a processor.
        "--heartbeat-interval=50",
        "--election-timeout=250",
        "--log-level=warn",
    ]


def _list_apiserver_flags(paths: ClusterPaths, ports: Ports) -> list[str]:
    pki = paths.pki
    return [
        f"--etcd-servers=https://{HOST}:{ports.etcd}",
        f"--etcd-cafile={pki / 'ca.crt'}",
        f"--etcd-certfile={pki / 'etcd-client.crt'}",
        f"--etcd-keyfile={pki / 'etcd-client.key'}",
        f"--bind-address={HOST}",
        f"--advertise-address={HOST}",
        f"--secure-port={ports.apiserver}",
        f"--tls-cert-file={pki / 'apiserver.crt'}",
        f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--client-ca-file={pki / 'ca.crt'}",
        # The identity under which the server calls extension servers; without it, its own controllers log errors.
        f"--requestheader-client-ca-file={pki / 'front-proxy-ca.crt'}",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={pki / 'front-proxy-client.crt'}",
        f"--proxy-client-key-file={pki / 'front-proxy-client.key'}",
        f"--kubelet-certificate-authority={pki / 'ca.crt'}",
        f"--kubelet-client-certificate={pki / 'kubelet-client.crt'}",
        f"--kubelet-client-key={pki / 'kubelet-client.key'}",
        "--kubelet-preferred-address-types=InternalIP",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        f"--service-account-issuer={SERVICE_ACCOUNT_ISSUER}",
        f"--service-account-key-file={pki / 'service-account.pub'}",
        f"--service-account-signing-key-file={pki / 'service-account.key'}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        # Pods reach the server by its loopback address, which an Endpoints object may not hold.
        "--endpoint-reconciler-type=none",
        "--profiling=false",
        "--v=0",
    ]


def _list_controller_manager_flags(spec: ClusterSpec, paths: ClusterPaths, ports: Ports) -> list[str]:
    pki = paths.pki
    flags = [
        *_list_client_flags(Component.CONTROLLER_MANAGER, paths, ports.controller_manager),
        f"--service-account-private-key-file={pki / 'service-account.key'}",
        f"--root-ca-file={pki / 'ca.crt'}",
        f"--cluster-signing-cert-file={pki / 'ca.crt'}",
        f"--cluster-signing-key-file={pki / 'ca.key'}",
        "--use-service-account-credentials=true",
        "--controllers=" + ",".join(["*", *(f"-{name}" for name in _CONTROLLERS_OFF)]),
    ]
    if spec.node_monitor_grace_seconds is not None:
        period = max(0.2, min(5.0, spec.node_monitor_grace_seconds / 5))
        flags += [
            f"--node-monitor-grace-period={spec.node_monitor_grace_seconds:g}s",
            f"--node-monitor-period={period:g}s",
        ]
    return flags


def _list_client_flags(component: Component, paths: ClusterPaths, port: int) -> list[str]:
    """Return the flags that controller manager and scheduler share."""
    kubeconfig = paths.pki / f"{component}.kubeconfig"
    return [
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        f"--bind-address={HOST}",
        f"--secure-port={port}",
        f"--tls-cert-file={paths.pki / f'{component}.crt'}",
        f"--tls-private-key-file={paths.pki / f'{component}.key'}",
        # There is one of each: with a Lease a restart would wait until the old holder's Lease expires.
        "--leader-elect=false",
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
        "--profiling=false",
        "--v=0",
    ]


def create_admin_client(paths: ClusterPaths, port: int, *, seconds: float = 10.0) -> ApiClient:
    """Return a client of the API server, or of another component, with the administrator's certificate."""
    authority, certificate, key = (str(paths.pki / name) for name in ("ca.crt", "admin.crt", "admin.key"))
    configuration = Configuration(f"https://{HOST}:{port}", ssl_ca_cert=authority, cert_file=certificate, key_file=key)
    return ApiClient(Access(configuration), user_agent="trainium-devcluster", seconds=seconds)


def is_ready(component: Component, paths: ClusterPaths, ports: Ports) -> bool:
    """Return whether a component is ready; for etcd, the API server's check decides."""
    port, path = {
        Component.ETCD: (ports.apiserver, "/readyz/etcd"),
        Component.APISERVER: (ports.apiserver, "/readyz"),
        Component.CONTROLLER_MANAGER: (ports.controller_manager, "/healthz"),
        Component.SCHEDULER: (ports.scheduler, "/readyz"),
    }[component]
    try:
        with create_admin_client(paths, port, seconds=2.0) as client:
            client.get_text(path)
    except ApiError:
        return False
    return True


def is_listening(port: int) -> bool:
    """Return whether a process accepts connections on a loopback port."""
    try:
        with socket.create_connection((HOST, port), timeout=1.0):
            return True
    except OSError:
        return False
