"""Discover optional features of this cluster: gang APIs by API discovery, network layers by node labels.

Discovery runs before the first plan and periodically, because upgrades and installations add and remove APIs.

Guarantees:
- Only versions whose fields are known here are used.
- While the API server does not answer, the last result is kept.
- A network layer is known with the first node that has its label, without a scan of all nodes.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING

from trainium_contract.api_server.errors import ApiError, ForbiddenError, NotFoundError
from trainium_operator.cluster.api.resources import NAMESPACES, TEMPLATES, WORKLOADS, Resource
from trainium_operator.plan.model.names import LAYERS
from trainium_operator.plan.model.observed import GangApi, NodeView

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainium_operator.cluster.api.client import Api
    from trainium_operator.cluster.cache.store import Entry, IndexedCache, Key

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 300.0
FIRST_RETRY_SECONDS = 2.0

_NATIVE, _COSCHEDULING = "scheduling.k8s.io", "scheduling.x-k8s.io"
_SOURCES: tuple[tuple[GangApi, str, tuple[str, ...], str], ...] = (
    # API, group, known versions (the best first), required kind
    (GangApi.SCHEDULING_GROUP, _NATIVE, ("v1beta1", "v1alpha3", "v1alpha2"), "PodGroup"),
    (GangApi.WORKLOAD_REF, _NATIVE, ("v1alpha1",), "Workload"),
    (GangApi.COSCHEDULING, _COSCHEDULING, ("v1alpha1",), "PodGroup"),
)


async def discover_gang_apis(api: Api) -> dict[GangApi, str]:
    """Return the gang APIs that are served, each with its `apiVersion`. Raises ApiError."""
    groups = {group["name"]: group for group in (await api.read("/apis")).get("groups") or ()}
    served_kinds: dict[GangApi, str] = {}
    for gang, name, known, kind in _SOURCES:
        served = {entry["version"] for entry in (groups.get(name) or {}).get("versions") or ()}
        for version in known:
            if version in served and kind in await _list_kinds(api, f"/apis/{name}/{version}"):
                served_kinds[gang] = f"{name}/{version}"
                break
    return served_kinds


async def is_served(api: Api, resource: Resource) -> bool:
    """Return whether the kind is served in a known version. Raises ApiError."""
    groups = (await api.read("/apis")).get("groups") or ()
    served = {
        version["version"] for group in groups if group["name"] == resource.group for version in group["versions"]
    }
    if resource.version not in served:
        return False
    return resource.kind in await _list_kinds(api, f"/apis/{resource.api_version}")


async def read_cluster_uid(api: Api) -> str:
    """Return the uid of the namespace kube-system; empty where it may not be read. Raises ApiError."""
    try:
        uid: str = (await api.get(NAMESPACES, "", "kube-system"))["metadata"]["uid"]
    except (ForbiddenError, NotFoundError) as error:
        logger.warning(
            "the cluster's identity is not known, so storage cannot distinguish jobs of one name in two clusters: %s",
            error,
        )
        return ""
    return uid


async def _list_kinds(api: Api, path: str) -> set[str]:
    """Return the kinds that can be created; none for a group that was removed or whose server does not answer."""
    try:
        resources = (await api.read(path)).get("resources") or ()
    except NotFoundError:
        return set()
    return {
        resource["kind"]
        for resource in resources
        if "create" in (resource.get("verbs") or ()) and "/" not in resource["name"]
    }


class Discovery:
    """The discovered features; `run` keeps them up to date."""

    def __init__(self, api: Api, nodes: IndexedCache[NodeView] | None, *, on_change: Callable[[], None]) -> None:
        self.gang_apis: Mapping[GangApi, str] = {}
        self.kueue = False
        """Whether Kueue is served."""
        self.claims = False
        """Whether devices can be claimed."""
        self.cluster = ""
        """uid of the namespace kube-system, which identifies the cluster."""
        self.topology_layers: frozenset[str] = frozenset()
        self.known = asyncio.Event()
        self._api = api
        self._on_change = on_change
        if nodes is not None:
            nodes.listen(self._handle_node_change)

    async def run(self) -> None:
        """Refresh periodically until cancelled."""
        while True:
            await self.refresh()
            pause = REFRESH_SECONDS * random.uniform(0.8, 1.2)  # noqa: S311 - spreads load, no secret
            await asyncio.sleep(pause if self.known.is_set() else FIRST_RETRY_SECONDS)

    async def refresh(self) -> None:
        """Refresh once; a result that could not be read stays as it was."""
        try:
            cluster = self.cluster or await read_cluster_uid(self._api)
            gang_apis, kueue = await discover_gang_apis(self._api), await is_served(self._api, WORKLOADS)
            claims = await is_served(self._api, TEMPLATES)
        except ForbiddenError as error:
            logger.warning("API discovery is forbidden, so no gang API is used: %s", error)
            cluster, gang_apis, kueue, claims = self.cluster, {}, False, False
        except ApiError as error:
            logger.warning("API discovery: %s", error)
            return
        self.known.set()
        before = (self.gang_apis, self.cluster, self.kueue, self.claims)
        changed = (gang_apis, cluster, kueue, claims) != before
        if gang_apis != self.gang_apis:
            logger.info("gang APIs: %s", ", ".join(sorted(gang_apis.values())) or "none")
        if kueue != self.kueue:
            logger.info("Kueue is %s", "served" if kueue else "not served any more")
        self.gang_apis, self.cluster, self.kueue, self.claims = gang_apis, cluster, kueue, claims
        if changed:
            self._on_change()

    def _handle_node_change(self, _key: Key, _old: Entry[NodeView] | None, new: Entry[NodeView] | None) -> None:
        if new is None:
            return
        carried = {layer for layer in LAYERS if layer in new.view.labels} - self.topology_layers
        if carried:
            self.topology_layers |= carried
            self._on_change()
