"""The objects of one job in the API server, as raw JSON: one list call per kind.

Invariants: nothing here decides or formats; every refusal is one sentence that names the verb and the resource; what is
read to show and not to act may be `Missing`, so that a person without all rights still sees the rest.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.api_server.errors import ClientError, ConflictError, ForbiddenError, NotFoundError
from trainium_contract.stored_json import read_json
from trainium_contract.wire.worker_env import GROUP, KIND, LABEL_JOB, LABEL_ROLE, PLURAL, ROLE_WORKER, VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_contract.api_server.connection import Answer, Connection

Json = dict[str, Any]
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
APPLY = "application/apply-patch+yaml"
"""JSON is YAML, of the kind that `json.dumps` writes by default."""
_FORBIDDEN, _MISSING, _CONFLICT, _UNAUTHORIZED = 403, 404, 409, 401


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that could not be read, and why."""

    why: str


@dataclass(frozen=True, slots=True)
class Asked:
    """One request by verb and resource, as RBAC names them."""

    verb: str
    resource: str
    namespace: str = ""
    name: str = ""

    @property
    def sentence(self) -> str:
        """`get configmaps/x in namespace y`."""
        name = f"/{self.name}" if self.name else ""
        return f"{self.verb} {self.resource}{name}" + (f" in namespace {self.namespace}" if self.namespace else "")


class Api:
    """The API server, with the namespace of the command."""

    def __init__(self, connection: Connection, namespace: str) -> None:
        self.connection = connection
        self.namespace = namespace

    # --- jobs ----------------------------------------------------------------------------------------------------

    def job(self, name: str) -> Json:
        """Return the TrainingJob. Raises NotFoundError with names that are close to it."""
        return self._jobs("GET", Asked("get", PLURAL, self.namespace, name), f"/{name}")

    def jobs(self) -> list[Json]:
        """All jobs of the namespace."""
        return _items(self._jobs("GET", Asked("list", PLURAL, self.namespace), ""))

    def all_jobs(self) -> list[Json]:
        """All jobs of all namespaces."""
        return _items(self.call("GET", Asked("list", f"{PLURAL}.{GROUP}"), f"/apis/{GROUP}/{VERSION}/{PLURAL}"))

    def create_job(self, manifest: Json, *, dry_run: bool = False) -> Json:
        """Create it; a dry run validates it only."""
        query = {"fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
        return self._jobs("POST", Asked("create", PLURAL, self.namespace), "", body=manifest, query=query)

    def apply_job(self, manifest: Json, manager: str) -> Json:
        """Server-side apply."""
        name = str(manifest["metadata"]["name"])
        query = {"fieldManager": manager, "force": "true", "fieldValidation": "Strict"}
        asked = Asked("patch", PLURAL, self.namespace, name)
        return self._jobs("PATCH", asked, f"/{name}", body=manifest, query=query, content_type=APPLY)

    def patch_job(self, name: str, patch: Json) -> Json:
        """Send a merge patch."""
        asked = Asked("patch", PLURAL, self.namespace, name)
        return self._jobs("PATCH", asked, f"/{name}", body=patch, content_type=MERGE_PATCH)

    def scale_job(self, name: str, size: int) -> Json:
        """Set the size by the scale subresource. Raises ClientError for less than a node, with what to do instead."""
        if size < 1:
            hint = f"to give all of its nodes back, suspend it: kubectl trn suspend {name}"
            raise ClientError(f"{name} cannot train on {size} nodes; {hint}")
        asked = Asked("patch", f"{PLURAL}/scale", self.namespace, name)
        body = {"spec": {"replicas": size}}
        return self._jobs("PATCH", asked, f"/{name}/scale", body=body, content_type=MERGE_PATCH)

    def delete_job(self, name: str, uid: str, *, foreground: bool) -> None:
        """Delete exactly this object; `foreground` keeps it until all that belongs to it is gone."""
        policy = "Foreground" if foreground else "Background"
        body = {"preconditions": {"uid": uid}, "propagationPolicy": policy}
        self._jobs("DELETE", Asked("delete", PLURAL, self.namespace, name), f"/{name}", body=body)

    # --- what belongs to a job -----------------------------------------------------------------------------------

    def membership(self, job: str) -> Json | Missing:
        """Return the ConfigMap that records the members."""
        asked = Asked("get", "configmaps", self.namespace, f"{job}-membership")
        return self.readable(asked, f"/api/v1/namespaces/{self.namespace}/configmaps/{job}-membership")

    def pod_table(self, job: str) -> Json | Missing:
        """Return the worker pods as the server's table: a tenth of the bytes of the pods themselves."""
        query = {"labelSelector": f"{LABEL_JOB}={job},{LABEL_ROLE}={ROLE_WORKER}", "includeObject": "None"}
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        return self.readable(Asked("list", "pods", self.namespace), path, query=query, accept=TABLE)

    def pods(self, job: str) -> list[Json] | Missing:
        """Return the worker pods."""
        query = {"labelSelector": f"{LABEL_JOB}={job},{LABEL_ROLE}={ROLE_WORKER}"}
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        found = self.readable(Asked("list", "pods", self.namespace), path, query=query)
        return found if isinstance(found, Missing) else _items(found)

    def events(self, job: str) -> list[Json] | Missing:
        """Events about the job."""
        query = {"fieldSelector": f"involvedObject.kind={KIND},involvedObject.name={job}"}
        path = f"/api/v1/namespaces/{self.namespace}/events"
        found = self.readable(Asked("list", "events", self.namespace), path, query=query)
        return found if isinstance(found, Missing) else _items(found)

    def log(self, pod: str, *, query: Mapping[str, str], container: str = "worker") -> str | Missing:
        """Return a pod's log, with timestamps if the query asks for them."""
        asked = Asked("get", "pods/log", self.namespace, pod)
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/log"
        chosen = {"container": container} if container else {}
        answer = self.connection.request("GET", path, query={**chosen, **query}, accept="*/*")
        if answer.status >= 400:
            return Missing(str(_refusal(asked, answer)))
        return answer.body.decode(errors="replace")

    # --- anything ------------------------------------------------------------------------------------------------

    def call(self, method: str, asked: Asked, path: str, **more: Any) -> Json:
        """One exchange; raises a ClientError with a sentence."""
        answer = self.connection.request(method, path, **more)
        if answer.status >= 400:
            raise _refusal(asked, answer)
        return _object(asked, answer)

    def readable(self, asked: Asked, path: str, **more: Any) -> Json | Missing:
        """Send a GET whose refusal is returned and not raised."""
        try:
            return self.call("GET", asked, path, **more)
        except (ForbiddenError, NotFoundError) as error:
            return Missing(str(error))

    def _jobs(self, method: str, asked: Asked, tail: str, **more: Any) -> Json:
        path = f"/apis/{GROUP}/{VERSION}/namespaces/{self.namespace}/{PLURAL}{tail}"
        answer = self.connection.request(method, path, **more)
        if answer.status == _MISSING:
            # An unknown resource is answered by plain text, an unknown object by a Status.
            status = _status(answer)
            sentence = self._unknown(asked.name) if asked.name else str(status.get("message") or "not found")
            raise NotFoundError(sentence if status else self._no_definition())
        if answer.status >= 400:
            raise _refusal(asked, answer)
        return _object(asked, answer)

    def _no_definition(self) -> str:
        """Why the cluster does not know TrainingJobs in the version that is spoken here."""
        answer = self.connection.request("GET", f"/apis/{GROUP}")
        served = [str(each.get("version")) for each in _status(answer).get("versions") or ()]
        if answer.status == 200 and served:
            return (
                f"the cluster serves TrainingJobs as {GROUP}/{', '.join(served)} and this command speaks {VERSION}: "
                "install the kubectl-trn of the operator's version"
            )
        return (
            f"the cluster does not know TrainingJobs ({PLURAL}.{GROUP}): install the operator's definitions, "
            "or choose another cluster by --context"
        )

    def _unknown(self, name: str) -> str:
        sentence = f"there is no TrainingJob {name!r} in namespace {self.namespace}"
        elsewhere = self._namespaces_of(name)
        if elsewhere:
            return f"{sentence}; there is one in namespace {' and '.join(elsewhere[:3])}: give it with -n"
        try:
            known = sorted(str(job["metadata"]["name"]) for job in self.jobs())
        except ClientError:
            return sentence
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        if near:
            return f"{sentence}; did you mean {' or '.join(near)}?"
        if not known:
            return f"{sentence}, which has no TrainingJobs; give the namespace with -n"
        more = ", …" if len(known) > 5 else ""
        return f"{sentence}; there are {', '.join(known[:5])}{more}"

    def _namespaces_of(self, name: str) -> list[str]:
        """Return the namespaces that have a job of this name, as far as they may be listed."""
        asked, query = Asked("list", f"{PLURAL}.{GROUP}"), {"fieldSelector": f"metadata.name={name}"}
        try:
            found = self.call("GET", asked, f"/apis/{GROUP}/{VERSION}/{PLURAL}", query=query)
        except ClientError:
            return []
        return sorted({str(job["metadata"].get("namespace")) for job in _items(found)} - {self.namespace})


def _items(found: Json) -> list[Json]:
    items = found.get("items")
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _object(asked: Asked, answer: Answer) -> Json:
    try:
        found = read_json(answer.body)
    except ValueError as error:
        raise ClientError(f"{asked.sentence}: the answer is no JSON ({error}): is this an API server?") from None
    return found if isinstance(found, dict) else {}


def _status(answer: Answer) -> Json:
    try:
        found = read_json(answer.body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _refusal(asked: Asked, answer: Answer) -> ClientError:
    sentence = " ".join(str(_status(answer).get("message") or answer.body[:200].decode(errors="replace")).split())
    if answer.status == _FORBIDDEN:
        return ForbiddenError(
            f"you may not {asked.sentence}; ask for a Role with verb {asked.verb!r} on {asked.resource!r}"
        )
    if answer.status == _UNAUTHORIZED:
        return ForbiddenError("the API server does not know you (401): log in again, or check the kubeconfig's user")
    if answer.status == _MISSING:
        return NotFoundError(sentence or f"{asked.sentence}: not found")
    if answer.status == _CONFLICT:
        return ConflictError(f"{asked.sentence}: {sentence}")
    return ClientError(f"{asked.sentence}: the API server answered {answer.status}: {sentence}")
