"""Hold the objects that the pods of a node share: connections, directories, the node's address and capacity.

Guarantees:
- It is built once at start.
- Only `active_pods` gives access to the state of pods.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

import aiohttp

from trainium_devcluster.node.api import quantities
from trainium_devcluster.node.api.client import Api
from trainium_devcluster.node.api.events import EventSeverity, EventSink
from trainium_devcluster.node.api.objects import Json, get_name, get_namespace, get_uid
from trainium_devcluster.node.api.reflector import ObjectCache
from trainium_devcluster.node.network.service_directory import ServiceDirectory
from trainium_devcluster.node.options import NodeOptions
from trainium_devcluster.node.processes.launcher_client import Launcher
from trainium_devcluster.node.spec import unsupported_fields
from trainium_devcluster.state import MARKER

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(slots=True, eq=False)
class NodeServices:
    """The services of the node for its pods."""

    options: NodeOptions
    api: Api
    cache: ObjectCache
    events: EventSink
    directory: ServiceDirectory
    launcher: Launcher
    http: aiohttp.ClientSession
    address: str
    node: Callable[[], Json]
    active_pods: Callable[[], Iterable[Json]]
    release_address: Callable[[str], None]
    programs: tuple[str, ...] = ()
    """Folders that replace the contents of an image, see `programs`."""
    _reported: set[str] = field(default_factory=set)

    @property
    def agent_folder(self) -> Path:
        """Contents of the agent's image."""
        return self.options.state_dir / "agent"

    def build_base_environment(self, hostname: str) -> dict[str, str]:
        """Return the variables that every container has."""
        host, port = self.options.api_server
        env = {
            "PATH": f"{self.options.venv_bin}:{_SYSTEM_PATH}",
            "HOSTNAME": hostname,
            "HOME": os.path.expanduser("~"),  # noqa: PTH111 - works without a home directory too
            "KUBERNETES_SERVICE_HOST": host,
            "KUBERNETES_SERVICE_PORT": str(port),
            "KUBERNETES_SERVICE_PORT_HTTPS": str(port),
            "KUBERNETES_PORT": f"tcp://{host}:{port}",
        }
        # The supervisor finds a node's processes by this marker.
        if MARKER in os.environ:
            env[MARKER] = os.environ[MARKER]
        return env

    def find_insufficient_resource(self, pod: Json) -> tuple[str, str] | None:
        """Return the first resource that the node lacks for `pod`, with the message of a kubelet."""
        others = [p for p in self.active_pods() if get_uid(p) != get_uid(pod)]
        for resource, requested in quantities.sum_pod_requests(pod).items():
            capacity = quantities.parse(self.options.capacity.get(resource, "0"))
            if not requested or resource.startswith("hugepages-"):
                continue
            used = sum((quantities.sum_pod_requests(p).get(resource, Decimal(0)) for p in others), Decimal(0))
            if used + requested > capacity:
                amounts = f"requested: {requested}, used: {used}, capacity: {capacity}"
                message = f"Node didn't have enough resource: {resource}, {amounts}"
                return resource, message
        return None

    def report_unenforced(self, pod: Json) -> None:
        """Report once per node and field that a field is accepted without effect."""
        new_fields = [text for text in unsupported_fields.find_unenforced_fields(pod) if text not in self._reported]
        if new_fields:
            self._reported.update(new_fields)
            message = (
                f"accepted without effect on a process node: {', '.join(new_fields)} "
                f"(first seen in pod {get_namespace(pod)}/{get_name(pod)}; reported once per node)"
            )
            self.events.emit(self.node(), "Node", EventSeverity.NORMAL, "NotEnforced", message)
