"""Read and write the objects of one job in the API server, as raw JSON: one list call per kind.

Invariants: every refusal is one sentence that names the verb and the resource. Objects that are only shown may be
`Unreadable`, so that a person without all rights still sees the rest.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.api_server.errors import ClientError, ConflictError, ForbiddenError, NotFoundError
from trainium_contract.stored_json import read_json
from trainium_contract.views.raw import read_mapping, read_objects
from trainium_contract.wire.worker_env import GROUP, KIND, LABEL_JOB, LABEL_ROLE, PLURAL, ROLE_WORKER, VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_contract.api_server.connection import Connection, HttpResponse

Json = dict[str, Any]
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
APPLY = "application/apply-patch+yaml"
"""JSON is YAML, in the form that `json.dumps` writes by default."""
_FORBIDDEN, _NOT_FOUND, _CONFLICT, _UNAUTHORIZED = 403, 404, 409, 401


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Why an object could not be read."""

    reason: str
    forbidden: bool
    not_found: bool

    @classmethod
    def from_error(cls, error: ClientError) -> Unreadable:
        """Build it from a refusal of the API server."""
        return cls(str(error), isinstance(error, ForbiddenError), isinstance(error, NotFoundError))


@dataclass(frozen=True, slots=True)
class Request:
    """One request by verb and resource, in RBAC's terms."""

    verb: str
    resource: str
    """`pods`, or `pods/log` for a subresource."""
    namespace: str = ""
    """Empty for all namespaces, and for resources without one."""
    name: str = ""

    @property
    def method(self) -> str:
        """HTTP method of the verb."""
        return {"create": "POST", "patch": "PATCH", "delete": "DELETE"}.get(self.verb, "GET")

    @property
    def path(self) -> str:
        """Path at the API server."""
        kind, _, subresource = self.resource.partition("/")
        kind = kind.removesuffix(f".{GROUP}")
        root = f"/apis/{GROUP}/{VERSION}" if kind == PLURAL else "/api/v1"
        namespace_path = f"namespaces/{self.namespace}" if self.namespace else ""
        return "/".join(filter(None, (root, namespace_path, kind, self.name, subresource)))

    @property
    def text(self) -> str:
        """`get configmaps/x in namespace y`."""
        name = f"/{self.name}" if self.name else ""
        return f"{self.verb} {self.resource}{name}" + (f" in namespace {self.namespace}" if self.namespace else "")


class Api:
    """The API server, with the namespace of the command."""

    def __init__(self, connection: Connection, namespace: str) -> None:
        self.connection = connection
        self.namespace = namespace

    # --- jobs ----------------------------------------------------------------------------------------------------

    def read_job(self, name: str) -> Json:
        """Return the TrainingJob. Raises NotFoundError with similar names."""
        return self._call_jobs("get", name)

    def list_jobs(self) -> list[Json]:
        """Return all jobs of the namespace."""
        return _list_items(self._call_jobs("list"))

    def list_all_jobs(self) -> list[Json]:
        """Return all jobs of all namespaces."""
        return _list_items(self.call(Request("list", f"{PLURAL}.{GROUP}")))

    def create_job(self, manifest: Json, *, dry_run: bool = False) -> Json:
        """Create the job; a dry run only validates it."""
        query = {"fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
        return self._call_jobs("create", body=manifest, query=query)

    def apply_job(self, manifest: Json, manager: str) -> Json:
        """Server-side apply."""
        query = {"fieldManager": manager, "force": "true", "fieldValidation": "Strict"}
        name = str(manifest["metadata"]["name"])
        return self._call_jobs("patch", name, body=manifest, query=query, content_type=APPLY)

    def patch_job(self, name: str, patch: Json) -> Json:
        """Send a merge patch."""
        return self._call_jobs("patch", name, body=patch, content_type=MERGE_PATCH)

    def scale_job(self, name: str, size: int) -> Json:
        """Set the size by the scale subresource. Raises ClientError for less than one node, with the alternative."""
        if size < 1:
            hint = f"to release all of its nodes, suspend it: kubectl trn suspend {name}"
            raise ClientError(f"{name} cannot train on {size} nodes; {hint}")
        body = {"spec": {"replicas": size}}
        return self._call_jobs("patch", name, resource=f"{PLURAL}/scale", body=body, content_type=MERGE_PATCH)

    def scale_role(self, job: Json, role: str, replicas: int) -> None:
        """Set the number of pods of a role of a job as it was read. Raises ClientError for an unknown role."""
        name = str(job["metadata"]["name"])
        names = [str(entry.get("name")) for entry in read_objects(read_mapping(job, "spec"), "roles")]
        if role not in names:
            roles = f"its roles are {', '.join(names)}" if names else "it has no roles (spec.roles)"
            raise ClientError(f"{name} has no role {role}; {roles}")
        path = f"/spec/roles/{names.index(role)}"
        patch = [
            {"op": "test", "path": f"{path}/name", "value": role},
            {"op": "add", "path": f"{path}/replicas", "value": replicas},
        ]
        self._call_jobs("patch", name, body=patch, content_type=JSON_PATCH)

    def delete_job(self, name: str, uid: str, *, foreground: bool) -> None:
        """Delete exactly this object; `foreground` keeps it until all dependents are deleted."""
        policy = "Foreground" if foreground else "Background"
        self._call_jobs("delete", name, body={"preconditions": {"uid": uid}, "propagationPolicy": policy})

    # --- objects of a job ----------------------------------------------------------------------------------------

    def read_membership(self, job: str) -> Json | Unreadable:
        """Return the ConfigMap that records the members."""
        return self.read_config_map(f"{job}-membership")

    def read_config_map(self, name: str) -> Json | Unreadable:
        """Return a ConfigMap."""
        return self._read(Request("get", "configmaps", self.namespace, name))

    def read_pod_table(self, job: str) -> Json | Unreadable:
        """Return the worker pods as the server's table: a tenth of the bytes of the pods."""
        query = {"labelSelector": build_worker_selector(job), "includeObject": "None"}
        return self._read(Request("list", "pods", self.namespace), query=query, accept=TABLE)

    def list_pods(self, selector: str) -> list[Json] | Unreadable:
        """Return the pods with these labels."""
        return self._list_objects(Request("list", "pods", self.namespace), {"labelSelector": selector})

    def list_events(self, job: str) -> list[Json] | Unreadable:
        """Return events about the job."""
        query = {"fieldSelector": f"involvedObject.kind={KIND},involvedObject.name={job}"}
        return self._list_objects(Request("list", "events", self.namespace), query)

    def list_nodes(self) -> list[Json] | Unreadable:
        """Return all nodes."""
        return self._list_objects(Request("list", "nodes"), {})

    def read_log(self, pod: str, *, query: Mapping[str, str], container: str = "worker") -> str | Unreadable:
        """Return a pod's log, with timestamps if the query asks for them."""
        request = Request("get", "pods/log", self.namespace, pod)
        chosen = {"container": container} if container else {}
        response = self.connection.request("GET", request.path, query={**chosen, **query}, accept="*/*")
        if response.status >= 400:
            return Unreadable.from_error(_build_refusal(request, response))
        return response.body.decode(errors="replace")

    # --- any object ----------------------------------------------------------------------------------------------

    def call(self, request: Request, **more: Any) -> Json:
        """Send a request; raises a ClientError with a sentence."""
        response = self.connection.request(request.method, request.path, **more)
        if response.status >= 400:
            raise _build_refusal(request, response)
        return _read_object(request, response)

    def _read(self, request: Request, **more: Any) -> Json | Unreadable:
        """Send a request whose refusal is returned instead of raised."""
        try:
            return self.call(request, **more)
        except (ForbiddenError, NotFoundError) as error:
            return Unreadable.from_error(error)

    def _list_objects(self, request: Request, query: Mapping[str, str]) -> list[Json] | Unreadable:
        response = self._read(request, query=query)
        return response if isinstance(response, Unreadable) else _list_items(response)

    def _call_jobs(self, verb: str, name: str = "", *, resource: str = PLURAL, **more: Any) -> Json:
        request = Request(verb, resource, self.namespace, name)
        response = self.connection.request(request.method, request.path, **more)
        if response.status == _NOT_FOUND:
            # The server responds to an unknown resource with plain text, to an unknown object with a Status.
            status = _read_status(response)
            sentence = self._explain_unknown_job(name) if name else str(status.get("message") or "not found")
            raise NotFoundError(sentence if status else self._explain_missing_definition())
        if response.status >= 400:
            raise _build_refusal(request, response)
        return _read_object(request, response)

    def _explain_missing_definition(self) -> str:
        """Return why the cluster does not serve TrainingJobs in this version."""
        response = self.connection.request("GET", f"/apis/{GROUP}")
        served = [str(version.get("version")) for version in _read_status(response).get("versions") or ()]
        if response.status == 200 and served:
            return (
                f"the cluster serves TrainingJobs as {GROUP}/{', '.join(served)} and this command uses {VERSION}: "
                "install the kubectl-trn of the operator's version"
            )
        return (
            f"the cluster does not know TrainingJobs ({PLURAL}.{GROUP}): install the operator's definitions, "
            "or choose another cluster by --context"
        )

    def _explain_unknown_job(self, name: str) -> str:
        sentence = f"there is no TrainingJob {name!r} in namespace {self.namespace}"
        elsewhere = self._find_namespaces(name)
        if elsewhere:
            return f"{sentence}; there is one in namespace {' and '.join(elsewhere[:3])}: give it with -n"
        try:
            job_names = sorted(str(job["metadata"]["name"]) for job in self.list_jobs())
        except ClientError:
            return sentence
        near = difflib.get_close_matches(name, job_names, n=3, cutoff=0.5)
        if near:
            return f"{sentence}; did you mean {' or '.join(near)}?"
        if not job_names:
            return f"{sentence}, which has no TrainingJobs; give the namespace with -n"
        more = ", …" if len(job_names) > 5 else ""
        return f"{sentence}; it has {', '.join(job_names[:5])}{more}"

    def _find_namespaces(self, name: str) -> list[str]:
        """Return the namespaces with a job of this name, as far as they may be listed."""
        query = {"fieldSelector": f"metadata.name={name}"}
        try:
            job_list = self.call(Request("list", f"{PLURAL}.{GROUP}"), query=query)
        except ClientError:
            return []
        return sorted({str(job["metadata"].get("namespace")) for job in _list_items(job_list)} - {self.namespace})


def build_worker_selector(job: str) -> str:
    """Return the label selector of a job's workers."""
    return f"{LABEL_JOB}={job},{LABEL_ROLE}={ROLE_WORKER}"


def _list_items(response: Json) -> list[Json]:
    items = response.get("items")
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _read_object(request: Request, response: HttpResponse) -> Json:
    try:
        body = read_json(response.body)
    except ValueError as error:
        raise ClientError(f"{request.text}: the response is not JSON ({error}): is this an API server?") from None
    return body if isinstance(body, dict) else {}


def _read_status(response: HttpResponse) -> Json:
    try:
        body = read_json(response.body)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _build_refusal(request: Request, response: HttpResponse) -> ClientError:
    sentence = " ".join(
        str(_read_status(response).get("message") or response.body[:200].decode(errors="replace")).split()
    )
    if response.status == _FORBIDDEN:
        return ForbiddenError(
            f"you may not {request.text}; ask for a Role with verb {request.verb!r} on {request.resource!r}"
        )
    if response.status == _UNAUTHORIZED:
        return ForbiddenError("the API server does not know you (401): log in again, or check the kubeconfig's user")
    if response.status == _NOT_FOUND:
        return NotFoundError(sentence or f"{request.text}: not found")
    if response.status == _CONFLICT:
        return ConflictError(f"{request.text}: {sentence}")
    return ClientError(f"{request.text}: the API server answered {response.status}: {sentence}")
