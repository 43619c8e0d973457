"""Write the pod's /etc/hosts: Service names without a DNS server.

The API server accepts no loopback addresses in EndpointSlices, so this module computes addresses from Services and the
pods that they select, as the endpoints controller does. Every name of a Service resolves to the addresses of all its
ready pods (of all its pods with publishNotReadyAddresses); a pod with host name and subdomain has its own name too.
Ports are not translated.
Invariants: pure functions but for `write`, which changes the file in place so that bind mounts of it see the change.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trainium_devcluster.node.api.objects import Json, get_name, get_namespace, is_ready, is_terminal

DOMAIN = "cluster.local"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A pod behind a Service; `hostname` is set if it has a name below the Service's."""

    address: str
    hostname: str = ""


@dataclass(frozen=True, slots=True)
class ServiceNames:
    """A Service, and the addresses of its names."""

    namespace: str
    name: str
    endpoints: tuple[Endpoint, ...]


def select_endpoints(service: Json, pods: Iterable[Json]) -> tuple[Endpoint, ...]:
    """Return the pods behind `service`, sorted by address."""
    selector = service["spec"].get("selector")
    if not selector:
        return ()
    unready_too = bool(service["spec"].get("publishNotReadyAddresses"))
    found = []
    for pod in pods:
        if get_namespace(pod) != get_namespace(service) or is_terminal(pod):
            continue
        address = pod.get("status", {}).get("podIP")
        labels = pod["metadata"].get("labels") or {}
        if not address or any(labels.get(key) != value for key, value in selector.items()):
            continue
        if unready_too or (is_ready(pod) and "deletionTimestamp" not in pod["metadata"]):
            has_hostname = pod["spec"].get("subdomain") == get_name(service)
            found.append(Endpoint(address, pod["spec"].get("hostname", "") if has_hostname else ""))
    return tuple(sorted(found, key=lambda e: tuple(int(part) for part in e.address.split("."))))


def render(pod_address: str, hostname: str, pod: Json, services: Iterable[ServiceNames]) -> str:
    """Return the text of the hosts file of `pod`."""
    pod_namespace = get_namespace(pod)
    own = [hostname]
    subdomain = pod["spec"].get("subdomain")
    if subdomain:
        own.insert(0, f"{hostname}.{subdomain}.{pod_namespace}.svc.{DOMAIN}")
    lines = [
        "# Written by the process node; Service names follow the pods behind them.",
        "127.0.0.1\tlocalhost",
        "::1\tlocalhost ip6-localhost ip6-loopback",
        f"{pod_address}\t{' '.join(own)}",
    ]
    aliases = pod["spec"].get("hostAliases") or []
    lines += [f"{alias['ip']}\t{' '.join(alias.get('hostnames') or [])}" for alias in aliases]
    for service in sorted(services, key=lambda s: (s.namespace, s.name)):
        names = _list_service_dns_names(service.name, service.namespace, pod_namespace)
        lines += [f"{endpoint.address}\t{' '.join(names)}" for endpoint in service.endpoints]
        for endpoint in service.endpoints:
            if endpoint.hostname:
                named = [f"{endpoint.hostname}.{suffix}" for suffix in names]
                lines.append(f"{endpoint.address}\t{' '.join(named)}")
    return "\n".join(lines) + "\n"


def write(path: Path, text: str) -> None:
    """Write `text` to the existing file, so that bind mounts of it show the new text."""
    data = text.encode()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if os.pread(fd, len(data) + 1, 0) != data:
            # Write, then truncate: a reader in between sees new lines first, never an empty file.
            os.pwrite(fd, data, 0)
            os.ftruncate(fd, len(data))
    finally:
        os.close(fd)


def _list_service_dns_names(service: str, service_namespace: str, pod_namespace: str) -> list[str]:
    short_name = f"{service}.{service_namespace}"
    names = [f"{short_name}.svc.{DOMAIN}", f"{short_name}.svc", short_name]
    return [*names, service] if service_namespace == pod_namespace else names
