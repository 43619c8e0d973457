"""Adapters of the cluster for the operator's servers, behind small protocols."""

from __future__ import annotations

import asyncio
import base64
import logging
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from trainium_contract.api_server.errors import ApiError, ConflictError, ForbiddenError, NotFoundError
from trainium_operator.cluster.api.resources import SECRETS, Resource
from trainium_operator.coordinator.certificate_keeper import SecretConflictError, SecretUnavailableError
from trainium_operator.coordinator.token_verifier import KeysUnavailableError
from trainium_operator.http.errors import AuthenticationUnavailableError, PodDeletedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainium_contract.api_server.responses import Json
    from trainium_operator.cluster.api.client import Api
    from trainium_operator.cluster.cache.store import IndexedCache
    from trainium_operator.cluster.cache.views import JobRecord
    from trainium_operator.plan.model.names import JobId
    from trainium_operator.plan.model.observed import PodView


logger = logging.getLogger(__name__)

REVIEW_SECONDS = 5.0
KEYS_SECONDS = 5.0
DISCOVERY_PATH, KEYS_PATH = "/.well-known/openid-configuration", "/openid/v1/jwks"


@dataclass(eq=False)
class KubernetesSecret:
    """One Secret as a SecretStore; its other content (labels, type) is kept."""

    api: Api
    namespace: str
    name: str
    _object: Json = field(default_factory=dict, init=False)

    async def read(self) -> tuple[Mapping[str, bytes], str]:
        """See SecretStore."""
        try:
            self._object = await self.api.get(SECRETS, self.namespace, self.name)
        except NotFoundError:
            raise SecretUnavailableError(
                f"Secret {self.namespace}/{self.name} is missing; the chart creates it empty: install the chart "
                f"again, or run `kubectl create secret generic {self.name} -n {self.namespace}`"
            ) from None
        except ApiError as error:
            raise SecretUnavailableError(str(error)) from error
        data = {key: base64.b64decode(value) for key, value in (self._object.get("data") or {}).items()}
        return data, self._object["metadata"]["resourceVersion"]

    async def write(self, data: Mapping[str, bytes], version: str) -> str:
        """See SecretStore."""
        encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
        metadata = {**self._object["metadata"], "resourceVersion": version}
        metadata.pop("managedFields", None)
        body = {**self._object, "metadata": metadata, "data": {**(self._object.get("data") or {}), **encoded}}
        try:
            self._object = await self.api.replace(SECRETS, self.namespace, self.name, body)
        except ConflictError as error:
            raise SecretConflictError(str(error)) from error
        except ApiError as error:
            raise SecretUnavailableError(str(error)) from error
        return str(self._object["metadata"]["resourceVersion"])


async def read_token_keys(api: Api) -> tuple[str, Json]:
    """Return the issuer of ServiceAccount tokens and its JSON Web Key Set. Raises KeysUnavailableError.

    The keys are read from the API server itself and not from the `jwks_uri`, which may be outside the cluster.
    """
    try:
        async with asyncio.timeout(KEYS_SECONDS):
            issuer = str((await api.read(DISCOVERY_PATH)).get("issuer", ""))
            return issuer, await api.read(KEYS_PATH)
    except NotFoundError:
        raise KeysUnavailableError(
            "the API server does not publish the keys of ServiceAccount tokens, so no agent can register; start it "
            "with an https URL as --service-account-issuer"
        ) from None
    except ForbiddenError:
        raise KeysUnavailableError(
            f"the operator may not get {DISCOVERY_PATH} and {KEYS_PATH}, so no agent can register; see the rights in "
            "docs/install.md"
        ) from None
    except (ApiError, TimeoutError) as error:
        raise KeysUnavailableError(
            f"the keys of ServiceAccount tokens could not be read: {str(error) or 'no answer'}"
        ) from error


@dataclass(eq=False)
class Reviewer:
    """Post reviews of tokens (TOKEN_REVIEWS) or of a user's rights (ACCESS_REVIEWS), for readers."""

    api: Api
    kind: Resource
    _reported: bool = field(default=False, init=False)

    async def review(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Return the status of a review with this spec. Raises AuthenticationUnavailableError."""
        body = {"apiVersion": self.kind.api_version, "kind": self.kind.kind, "spec": spec}
        try:
            async with asyncio.timeout(REVIEW_SECONDS):
                answer = await self.api.create(self.kind, "", body, attempts=2)
        except (ApiError, TimeoutError) as error:
            if isinstance(error, ForbiddenError) and not self._reported:
                self._reported = True  # logged once: clients that send tokens must not fill the log
                logger.warning("the operator may not create %s: see the rights in docs/install.md", self.kind.plural)
            raise AuthenticationUnavailableError from None  # the message of a refusal could repeat the request
        status: dict[str, Any] = answer.get("status") or {}
        return status


@dataclass(frozen=True, slots=True)
class WorkerPods:
    """The worker pods in the cache."""

    pods: IndexedCache[PodView]
    jobs: IndexedCache[JobRecord]
    _: KW_ONLY
    is_current: Callable[[], bool]
    """Return whether the caches hold everything that existed when this process became the leader."""

    def find_job(self, namespace: str, pod_name: str, pod_uid: str) -> JobId | None:
        """Return the job of this incarnation of the pod; None if it is not a worker of an existing job.

        Raises PodDeletedError if the job is missing: an operator creates no pod before it has read the job.
        """
        entry = self.pods.get_entry((namespace, pod_name))
        if entry is None or entry.uid != pod_uid or entry.owner is None:
            return None
        job = self.jobs.get((entry.owner.namespace, entry.owner.name))
        if job is not None and job.id == entry.owner:
            return None if job.managed_elsewhere else entry.owner
        if self.is_current():
            raise PodDeletedError(f"the TrainingJob of pod {pod_name} no longer exists")
        return None
