"""Set the operator's Deployment as the owner of the operator's own objects: Lease and memory of bad machines.

The operator writes both and not the chart, so that no upgrade changes their content. With the Deployment as their
owner, the garbage collector removes them with it, as after `helm uninstall`.

Invariants: only the leader writes. Nothing waits for this, and no failure here affects the Lease's holder or the
memory. Owners that others set stay.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from trainium_contract.api_server.errors import ApiError, ConflictError, NotFoundError, UnavailableError
from trainium_operator.cluster.api.resources import DEPLOYMENTS, Resource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainium_contract.api_server.responses import Json
    from trainium_operator.cluster.api.client import Api

logger = logging.getLogger(__name__)

POLL_SECONDS = 600.0
"""Interval of checks, because the owner may have been removed meanwhile."""
RETRY_SECONDS = 5.0
"""Pause after a conflict, or while an object does not exist yet."""
REFUSAL_RETRY_SECONDS = 60.0
"""Pause after another error of the API server."""


@dataclass(frozen=True, slots=True)
class OwnedObject:
    """One object of the operator."""

    resource: Resource
    name: str
    survives_uninstall: bool = False
    """Whether it stays when the operator is uninstalled."""


@dataclass(eq=False)
class OwnerReferenceReconciler:
    """Sets the Deployment as the owner of the operator's objects."""

    api: Api
    leading: asyncio.Event
    _: KW_ONLY
    namespace: str
    deployment: str
    """Name of the Deployment; empty where the operator runs in none, and its objects have no owner."""
    owned_objects: Sequence[OwnedObject]
    _owner: Json | None = field(default=None, init=False)
    _reported: str = field(default="", init=False)

    def list_owners(self, resource: Resource) -> list[Json]:
        """Return the `ownerReferences` of a new object of the operator; none while the Deployment is not known."""
        survives = any(owned.survives_uninstall for owned in self.owned_objects if owned.resource == resource)
        return [] if self._owner is None or survives else [dict(self._owner)]

    async def run(self) -> None:
        """Set owners while this process leads."""
        if not self.deployment:
            return
        await self.leading.wait()
        while self.leading.is_set():
            seconds = await self._reconcile_owners()
            await asyncio.sleep(seconds)

    async def _reconcile_owners(self) -> float:
        """Set the owners of all objects; return the seconds until the next try."""
        try:
            if self._owner is None:
                raw = await self.api.get(DEPLOYMENTS, self.namespace, self.deployment)
                reference = {"apiVersion": DEPLOYMENTS.api_version, "kind": DEPLOYMENTS.kind, "name": self.deployment}
                self._owner = {**reference, "uid": raw["metadata"]["uid"]}
            adopted = [await self._adopt(owned, self._owner) for owned in self.owned_objects]
        except (ConflictError, UnavailableError):
            return RETRY_SECONDS
        except ApiError as error:
            self._warn_once(f"the Lease and the memory of bad machines stay when the operator is uninstalled: {error}")
            return REFUSAL_RETRY_SECONDS
        return POLL_SECONDS if all(adopted) else RETRY_SECONDS

    async def _adopt(self, owned: OwnedObject, owner: Json) -> bool:
        """Return whether the object exists and has the expected owners. Raises ApiError."""
        try:
            raw = await self.api.get(owned.resource, self.namespace, owned.name)
        except NotFoundError:
            return False
        owners = raw["metadata"].get("ownerReferences") or []
        others = [reference for reference in owners if not _names_same_object(reference, owner)]
        desired = others if owned.survives_uninstall else [*others, owner]
        if desired != owners:
            metadata = {**raw["metadata"], "ownerReferences": desired}
            body = {**raw, "metadata": metadata}
            await self.api.replace(owned.resource, self.namespace, owned.name, body)
        return True

    def _warn_once(self, sentence: str) -> None:
        if sentence != self._reported:
            self._reported = sentence
            logger.warning("%s", sentence)


def _names_same_object(reference: Json, owner: Json) -> bool:
    """Return whether both name the Deployment, or an earlier incarnation of it."""
    return all(reference.get(key) == owner[key] for key in ("apiVersion", "kind", "name"))
