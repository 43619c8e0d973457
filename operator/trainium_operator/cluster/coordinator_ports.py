"""Adapters of the cluster for the operator's servers, behind small protocols."""

from __future__ import annotations

import asyncio
import base64
import logging
from typing import TYPE_CHECKING, Any

from trainium_operator.cluster.api.errors import ApiError, ConflictError, ForbiddenError, NotFoundError
from trainium_operator.cluster.api.resources import SECRETS, Resource
from trainium_operator.coordinator.certificate_keeper import SecretConflictError, SecretUnavailableError
from trainium_operator.http.errors import ReviewUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainium_operator.cluster.api.client import Api, Json
    from trainium_operator.cluster.cache.store import IndexedCache
    from trainium_operator.cluster.cache.views import JobRecord
    from trainium_operator.plan.model.names import JobId
    from trainium_operator.plan.model.observed import PodView


logger = logging.getLogger(__name__)

REVIEW_SECONDS = 5.0
"""An agent waits for 3; what takes longer must not keep others from being asked about."""


class KubernetesSecret:
    """One Secret as a SecretBox; what else the object carries (labels, type) is kept."""

    def __init__(self, api: Api, namespace: str, name: str) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._object: Json = {}

    async def read(self) -> tuple[Mapping[str, bytes], str]:
        """See SecretBox."""
        try:
            self._object = await self._api.get(SECRETS, self._namespace, self._name)
        except NotFoundError:
            raise SecretUnavailableError(
                f"Secret {self._namespace}/{self._name} is missing; the chart creates it empty: install the chart "
                f"again, or run `kubectl create secret generic {self._name} -n {self._namespace}`"
            ) from None
        except ApiError as error:
            raise SecretUnavailableError(str(error)) from error
        data = {key: base64.b64decode(value) for key, value in (self._object.get("data") or {}).items()}
        return data, self._object["metadata"]["resourceVersion"]

    async def write(self, data: Mapping[str, bytes], version: str) -> str:
        """See SecretBox."""
        encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
        metadata = {**self._object["metadata"], "resourceVersion": version}
        metadata.pop("managedFields", None)
        body = {**self._object, "metadata": metadata, "data": {**(self._object.get("data") or {}), **encoded}}
        try:
            self._object = await self._api.replace(SECRETS, self._namespace, self._name, body)
        except ConflictError as error:
            raise SecretConflictError(str(error)) from error
        except ApiError as error:
            raise SecretUnavailableError(str(error)) from error
        return str(self._object["metadata"]["resourceVersion"])


class Reviewer:
    """Asks the API server about tokens (TOKEN_REVIEWS), or what a user may do (ACCESS_REVIEWS)."""

    def __init__(self, api: Api, kind: Resource) -> None:
        self._api = api
        self._kind = kind
        self._reported = False

    async def review(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Status of a review with this spec. Raises ReviewUnavailableError."""
        body = {"apiVersion": self._kind.api_version, "kind": self._kind.kind, "spec": spec}
        try:
            async with asyncio.timeout(REVIEW_SECONDS):
                answer = await self._api.create(self._kind, "", body, attempts=2)
        except (ApiError, TimeoutError) as error:
            if isinstance(error, ForbiddenError) and not self._reported:
                self._reported = True  # once: clients that send tokens must not fill the log
                logger.warning("the operator may not create %s: see the rights in docs/install.md", self._kind.plural)
            # The message of a refused request could repeat the request: only its class is passed on.
            raise ReviewUnavailableError(type(error).__name__) from None
        status: dict[str, Any] = answer.get("status") or {}
        return status


class WorkerPods:
    """The pod cache as a PodDirectory."""

    def __init__(
        self, pods: IndexedCache[PodView], jobs: IndexedCache[JobRecord], *, is_current: Callable[[], bool]
    ) -> None:
        """`is_current()`: the caches hold all that existed when this process became the leader."""
        self._pods = pods
        self._jobs = jobs
        self._is_current = is_current

    def job_of(self, namespace: str, pod_name: str, pod_uid: str) -> JobId | None:
        """See PodDirectory."""
        entry = self._pods.entry((namespace, pod_name))
        if entry is None or entry.uid != pod_uid or entry.owner is None:
            return None
        job = self._jobs.get((entry.owner.namespace, entry.owner.name))
        return entry.owner if job is not None and job.id == entry.owner and not job.elsewhere else None

    def is_orphaned(self, namespace: str, pod_name: str, pod_uid: str) -> bool:
        """See PodDirectory. An operator creates no pod before it knows the job, so a missing job was deleted."""
        entry = self._pods.entry((namespace, pod_name))
        if entry is None or entry.uid != pod_uid or entry.owner is None or not self._is_current():
            return False
        job = self._jobs.get((entry.owner.namespace, entry.owner.name))
        return job is None or job.id != entry.owner
