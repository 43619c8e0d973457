"""Watch Services and pods, and keep the pods' hosts files up to date.

Guarantees:
- A change of a Service or a pod reaches every hosts file of this node shortly after; changes are batched.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainium_devcluster.node.api.client import Api
from trainium_devcluster.node.api.objects import Json, get_name, get_namespace, get_uid, is_ready, is_terminal
from trainium_devcluster.node.api.reflector import Reflector
from trainium_devcluster.node.api.waiting import wait_for_event
from trainium_devcluster.node.network import hosts

_DEBOUNCE_SECONDS = 0.02
_SYNC_SECONDS = 10.0  # limit of the wait of a pod's start for the first list


@dataclass(frozen=True, slots=True)
class HostsFile:
    """A pod's hosts file and its entries other than Services."""

    path: Path
    address: str
    hostname: str
    pod: Callable[[], Json]


class ServiceDirectory:
    """Provides the Service names of the cluster to the pods of this node."""

    def __init__(self, api: Api, api_server: tuple[str, int]) -> None:
        self._api_server = api_server
        self._services = Reflector(api, "/api/v1/services", {}, self._handle_service)
        self._pods = Reflector(api, "/api/v1/pods", {}, self._handle_pod)
        self._files: dict[str, HostsFile] = {}
        self._pod_states: dict[str, tuple[object, ...]] = {}
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Keep hosts files up to date until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._services.run())
            group.create_task(self._pods.run())
            group.create_task(self._update_files())

    async def add(self, key: str, file: HostsFile) -> None:
        """Write `file` now and keep it up to date until `remove`."""
        await wait_for_event(self._services.synced, _SYNC_SECONDS)
        await wait_for_event(self._pods.synced, _SYNC_SECONDS)
        self._files[key] = file
        self._write(file, self._list_names())

    def remove(self, key: str) -> None:
        """Stop updating a hosts file, because its directory is about to be removed."""
        self._files.pop(key, None)

    async def _update_files(self) -> None:
        while True:
            await self._changed.wait()
            await asyncio.sleep(_DEBOUNCE_SECONDS)
            self._changed.clear()
            names = self._list_names()
            for file in list(self._files.values()):
                self._write(file, names)

    def _list_names(self) -> list[hosts.ServiceNames]:
        pods = list(self._pods.objects.values())
        names = []
        for service in self._services.objects.values():
            if get_namespace(service) == "default" and get_name(service) == "kubernetes":
                endpoints: tuple[hosts.Endpoint, ...] = (hosts.Endpoint(self._api_server[0]),)
            else:
                endpoints = hosts.select_endpoints(service, pods)
            names.append(hosts.ServiceNames(get_namespace(service), get_name(service), endpoints))
        return names

    def _write(self, file: HostsFile, names: list[hosts.ServiceNames]) -> None:
        with contextlib.suppress(FileNotFoundError):
            hosts.write(file.path, hosts.render(file.address, file.hostname, file.pod(), names))

    def _handle_service(self, _: Json, __: bool) -> None:
        self._changed.set()

    def _handle_pod(self, pod: Json, deleted: bool) -> None:
        key, ip = get_uid(pod), pod.get("status", {}).get("podIP")
        state = (
            ip,
            is_ready(pod),
            "deletionTimestamp" in pod["metadata"],
            is_terminal(pod),
            str(pod["metadata"].get("labels")),
        )
        if deleted:
            self._pod_states.pop(key, None)
        elif self._pod_states.get(key) == state:
            return
        else:
            self._pod_states[key] = state
        self._changed.set()
