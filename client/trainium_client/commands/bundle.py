"""`support-bundle`: everything that a bug report needs, in one archive, without secrets.

Guarantees:
- Values of environment variables, arguments that look like secrets, kubectl's copy of what was applied and the
  managers' bookkeeping are left out.
- Everything else that looks like a key, token or password is replaced.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from trainium_client.api import Api, Asked, Missing
from trainium_client.commands.inspect import (
    DEFAULT_NAMESPACE,
    DEFAULT_QUARANTINE,
    OperatorNamespace,
    Quarantine,
)
from trainium_client.commands.options import JobName, Session
from trainium_client.pod_exec import for_each_pod
from trainium_client.read import decode_members
from trainium_client.render.machine import as_json
from trainium_contract.api_server.errors import ClientError
from trainium_contract.pages.formatting import plural, size
from trainium_contract.redaction import redact_secrets
from trainium_contract.views.raw import mapping, objects, text

HIDDEN = "***"
_DROPPED = frozenset({"managedFields", "kubectl.kubernetes.io/last-applied-configuration"})
_SECRET_NAME = re.compile(r"(?i)secret|token|passw|credential|api[-_]?key|access[-_]?key|private")
_REFERENCES = frozenset({
    "secretName", "secretRef", "secretKeyRef", "serviceAccountToken", "automountServiceAccountToken", "tokenizer",
    "imagePullSecrets", "tokensPerSecond", "tokens", "tokenExpirationSeconds",
})  # fmt: skip
"""Names that speak of secrets and hold none."""
_LOG_LINES = "5000"
_MOST_PODS = 64
"""Pods whose logs are taken: those that are not well, and the first members."""
_OPERATOR = "app.kubernetes.io/name=trainium-operator"
_ABOUT = """What is in here: the job with its status, its events, membership, pods and their logs, the nodes that they
are on, and what may be read of the operator. Values of environment variables, annotations of kubectl and what looks
like a key, token or password are replaced by ***. Logs are as the programs wrote them otherwise: look before you
publish.
"""


def support_bundle(
    session: Session,
    name: JobName,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Archive; has a default.")] = None,
    operator_namespace: OperatorNamespace = DEFAULT_NAMESPACE,
    quarantine: Quarantine = DEFAULT_QUARANTINE,
) -> None:
    """Everything for a bug report, in one archive; secrets are left out."""
    api = session.open()
    operator = Api(api.connection, operator_namespace)
    job = api.job(name)  # an unknown job leaves no archive behind
    parts = {"README.txt": _ABOUT, "job.json": _json(job)}
    missing: list[str] = []
    _take_job(api, name, parts, missing)
    _take_operator(operator, quarantine, parts, missing)
    parts["missing.txt"] = "".join(f"{line}\n" for line in missing) or "nothing is missing\n"
    path = file or Path(f"{name}-support-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(time.time()))}.tar.gz")
    try:
        _write(path, f"{name}-support", parts)
    except OSError as error:
        raise ClientError(f"cannot write {path}: {error.strerror or error}") from error
    written = path.stat().st_size
    lacks = f"{plural(len(missing), 'thing')} could not be read (missing.txt)" if missing else "nothing is missing"
    sentence = f"{path}: {len(parts)} files, {size(written)}; {lacks}"
    session.report(sentence, file=str(path), bytes=written, files=sorted(parts), missing=missing)


def _take_job(api: Api, name: str, parts: dict[str, str], missing: list[str]) -> None:
    record, pods, events = api.membership(name), api.pods(name), api.events(name)
    members = decode_members(record)
    if members is not None:
        parts["membership.json"] = as_json(members)
    elif isinstance(record, Missing):
        missing.append(f"membership: {record.why}")
    if isinstance(events, Missing):
        missing.append(f"events: {events.why}")
    else:
        parts["events.json"] = _json({"items": events})
    if isinstance(pods, Missing):
        missing.append(f"pods: {pods.why}")
        return
    parts["pods.json"] = _json({"items": pods})
    chosen = sorted(pods, key=lambda pod: text(mapping(pod, "status"), "phase") == "Running")[:_MOST_PODS]
    if len(pods) > len(chosen):
        missing.append(f"logs of {len(pods) - len(chosen)} pods: only {_MOST_PODS} are taken")
    _take_logs(api, [text(mapping(pod, "metadata"), "name") for pod in chosen], "worker", parts, missing)
    _take_nodes(api, {text(mapping(pod, "spec"), "nodeName") for pod in pods} - {""}, parts, missing)


def _take_nodes(api: Api, names: set[str], parts: dict[str, str], missing: list[str]) -> None:
    found = api.readable(Asked("list", "nodes"), "/api/v1/nodes")
    if isinstance(found, Missing):
        missing.append(f"nodes: {found.why}")
        return
    used = [node for node in objects(found, "items") if text(mapping(node, "metadata"), "name") in names]
    kept = ("capacity", "allocatable", "conditions", "nodeInfo")
    lean = [
        {
            "metadata": node.get("metadata"),
            "spec": node.get("spec"),
            "status": {key: mapping(node, "status").get(key) for key in kept},
        }
        for node in used
    ]
    parts["nodes.json"] = _json({"items": lean})


def _take_operator(api: Api, quarantine: str, parts: dict[str, str], missing: list[str]) -> None:
    base = f"/api/v1/namespaces/{api.namespace}"
    machines = api.readable(Asked("get", "configmaps", api.namespace, quarantine), f"{base}/configmaps/{quarantine}")
    if isinstance(machines, Missing):
        missing.append(f"machines: {machines.why}")
    else:
        parts["operator/machines.json"] = _json(machines)
    pods = api.readable(Asked("list", "pods", api.namespace), f"{base}/pods", query={"labelSelector": _OPERATOR})
    if isinstance(pods, Missing):
        missing.append(f"operator: {pods.why}")
        return
    found = objects(pods, "items")
    if not found:
        missing.append(f"operator: no pods of it in namespace {api.namespace} (--operator-namespace)")
    parts["operator/pods.json"] = _json({"items": found})
    _take_logs(
        api, [text(mapping(pod, "metadata"), "name") for pod in found], "", parts, missing, folder="operator/logs"
    )


def _take_logs(
    api: Api, pods: list[str], container: str, parts: dict[str, str], missing: list[str], folder: str = "logs"
) -> None:
    query = {"timestamps": "true", "tailLines": _LOG_LINES}
    found = for_each_pod(pods, lambda pod: api.log(pod, query=query, container=container))
    for pod, log in found.items():
        if isinstance(log, Missing):
            missing.append(f"log of {pod}: {log.why}")
        else:
            parts[f"{folder}/{pod}.log"] = redacted_text(str(log))


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(redacted(value), indent=1) + "\n"


def _write(path: Path, folder: str, parts: Mapping[str, str]) -> None:
    """Write an archive that only this user can read."""
    path.touch(mode=0o600)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in sorted(parts.items()):
            data = content.encode(errors="replace")
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(data))


def redacted(value: Any) -> Any:
    """Copy a value without secrets."""
    if isinstance(value, Mapping):
        return {key: _field(str(key), each) for key, each in value.items() if key not in _DROPPED}
    if isinstance(value, list):
        return [redacted(each) for each in value]
    return redacted_text(value) if isinstance(value, str) else value


def redacted_text(text: str) -> str:
    """Text without what looks like a secret."""
    return "\n".join(redact_secrets(line) for line in text.split("\n"))


def _field(key: str, value: Any) -> Any:
    if key == "env" and isinstance(value, list):
        return [_variable(each) for each in value]
    if isinstance(value, str) and value and _SECRET_NAME.search(key) and key not in _REFERENCES:
        return HIDDEN
    return redacted(value)


def _variable(raw: Any) -> Any:
    """Copy an environment variable: its name, and the source of its value; the operator's own are not secret."""
    if not isinstance(raw, Mapping) or "value" not in raw:
        return redacted(raw)
    name = str(raw.get("name") or "")
    ours = name.startswith("TRAINIUM_") or name in {"POD_IP", "OMP_NUM_THREADS", "PYTHONPATH"}
    return {**raw, "value": redacted_text(str(raw["value"])) if ours else HIDDEN}
