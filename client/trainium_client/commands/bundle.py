"""`support-bundle`: collect the information for a bug report in one archive, without secrets.

Guarantees:
- Values of environment variables, arguments that look like secrets, kubectl's copy of the applied object and managed
  fields are left out.
- Other strings that look like a key, token or password are replaced.
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

from trainium_client.api import Api, Unreadable, build_worker_selector
from trainium_client.commands.inspect import (
    DEFAULT_NAMESPACE,
    DEFAULT_QUARANTINE,
    OperatorNamespace,
    Quarantine,
)
from trainium_client.commands.options import JobName, Session
from trainium_client.pod_exec import call_concurrently
from trainium_client.read import decode_members
from trainium_client.render.json_output import format_json
from trainium_contract.api_server.errors import ClientError
from trainium_contract.pages.formatting import format_bytes, pluralize
from trainium_contract.redaction import redact_secrets
from trainium_contract.views.raw import read_mapping, read_text

HIDDEN = "***"
_OMITTED_KEYS = frozenset({"managedFields", "kubectl.kubernetes.io/last-applied-configuration"})
_SECRET_NAME = re.compile(r"(?i)secret|token|passw|credential|api[-_]?key|access[-_]?key|private")
_HARMLESS_KEYS = frozenset({
    "secretName", "secretRef", "secretKeyRef", "serviceAccountToken", "automountServiceAccountToken", "tokenizer",
    "imagePullSecrets", "tokensPerSecond", "tokens", "tokenExpirationSeconds",
})  # fmt: skip
"""Keys that match `_SECRET_NAME` but have no secret value."""
_LOG_LINES = "5000"
_MAX_LOG_PODS = 64
"""Number of pods whose logs are included: unhealthy ones, and the first members."""
_OPERATOR_SELECTOR = "app.kubernetes.io/name=trainium-operator"
_README = """This archive has the job with its status, its events, membership, pods and their logs, the nodes of the
pods, and the readable objects of the operator. Values of environment variables, annotations of kubectl and strings
that look like a key, token or password are replaced by ***. The rest of the logs is unchanged: check it before you
publish.
"""


def support_bundle(
    session: Session,
    name: JobName,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Archive; has a default.")] = None,
    operator_namespace: OperatorNamespace = DEFAULT_NAMESPACE,
    quarantine: Quarantine = DEFAULT_QUARANTINE,
) -> None:
    """Collect everything for a bug report in one archive, without secrets."""
    api = session.open()
    operator = Api(api.connection, operator_namespace)
    job = api.read_job(name)  # an unknown job creates no archive
    files = {"README.txt": _README, "job.json": _format_json(job)}
    missing: list[str] = []
    _add_job(api, name, files, missing)
    _add_operator(operator, quarantine, files, missing)
    files["missing.txt"] = "".join(f"{line}\n" for line in missing) or "nothing is missing\n"
    path = file or Path(f"{name}-support-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(time.time()))}.tar.gz")
    try:
        _write(path, f"{name}-support", files)
    except OSError as error:
        raise ClientError(f"cannot write {path}: {error.strerror or error}") from error
    archive_bytes = path.stat().st_size
    gaps = f"{pluralize(len(missing), 'thing')} could not be read (missing.txt)" if missing else "nothing is missing"
    sentence = f"{path}: {len(files)} files, {format_bytes(archive_bytes)}; {gaps}"
    session.print_message(sentence, file=str(path), bytes=archive_bytes, files=sorted(files), missing=missing)


def _add_job(api: Api, name: str, files: dict[str, str], missing: list[str]) -> None:
    record, pods, events = api.read_membership(name), api.list_pods(build_worker_selector(name)), api.list_events(name)
    members = decode_members(record)
    if members is not None:
        files["membership.json"] = format_json(members)
    elif isinstance(record, Unreadable):
        missing.append(f"membership: {record.reason}")
    if isinstance(events, Unreadable):
        missing.append(f"events: {events.reason}")
    else:
        files["events.json"] = _format_json({"items": events})
    if isinstance(pods, Unreadable):
        missing.append(f"pods: {pods.reason}")
        return
    files["pods.json"] = _format_json({"items": pods})
    logged = sorted(pods, key=lambda pod: read_text(read_mapping(pod, "status"), "phase") == "Running")[:_MAX_LOG_PODS]
    if len(pods) > len(logged):
        missing.append(f"logs of {len(pods) - len(logged)} pods: only {_MAX_LOG_PODS} are included")
    _add_logs(api, [read_text(read_mapping(pod, "metadata"), "name") for pod in logged], "worker", files, missing)
    _add_nodes(api, {read_text(read_mapping(pod, "spec"), "nodeName") for pod in pods} - {""}, files, missing)


def _add_nodes(api: Api, names: set[str], files: dict[str, str], missing: list[str]) -> None:
    nodes = api.list_nodes()
    if isinstance(nodes, Unreadable):
        missing.append(f"nodes: {nodes.reason}")
        return
    used = [node for node in nodes if read_text(read_mapping(node, "metadata"), "name") in names]
    status_fields = ("capacity", "allocatable", "conditions", "nodeInfo")
    reduced = [
        {
            "metadata": node.get("metadata"),
            "spec": node.get("spec"),
            "status": {key: read_mapping(node, "status").get(key) for key in status_fields},
        }
        for node in used
    ]
    files["nodes.json"] = _format_json({"items": reduced})


def _add_operator(api: Api, quarantine: str, files: dict[str, str], missing: list[str]) -> None:
    machines = api.read_config_map(quarantine)
    if isinstance(machines, Unreadable):
        missing.append(f"machines: {machines.reason}")
    else:
        files["operator/machines.json"] = _format_json(machines)
    pods = api.list_pods(_OPERATOR_SELECTOR)
    if isinstance(pods, Unreadable):
        missing.append(f"operator: {pods.reason}")
        return
    if not pods:
        missing.append(f"operator: no pods of it in namespace {api.namespace} (--operator-namespace)")
    files["operator/pods.json"] = _format_json({"items": pods})
    _add_logs(
        api,
        [read_text(read_mapping(pod, "metadata"), "name") for pod in pods],
        "",
        files,
        missing,
        folder="operator/logs",
    )


def _add_logs(
    api: Api, pods: list[str], container: str, files: dict[str, str], missing: list[str], folder: str = "logs"
) -> None:
    query = {"timestamps": "true", "tailLines": _LOG_LINES}
    logs = call_concurrently(pods, lambda pod: api.read_log(pod, query=query, container=container))
    for pod, log in logs.items():
        if isinstance(log, Unreadable):
            missing.append(f"log of {pod}: {log.reason}")
        else:
            files[f"{folder}/{pod}.log"] = redact_text(str(log))


def _format_json(value: Mapping[str, Any]) -> str:
    return json.dumps(redact(value), indent=1) + "\n"


def _write(path: Path, folder: str, files: Mapping[str, str]) -> None:
    """Write an archive that only this user can read."""
    path.touch(mode=0o600)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in sorted(files.items()):
            data = content.encode(errors="replace")
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(data))


def redact(value: Any) -> Any:
    """Return a value without secrets."""
    if isinstance(value, Mapping):
        return {key: _redact_field(str(key), item) for key, item in value.items() if key not in _OMITTED_KEYS}
    if isinstance(value, list):
        return [redact(item) for item in value]
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """Return a text without strings that look like secrets."""
    return "\n".join(redact_secrets(line) for line in text.split("\n"))


def _redact_field(key: str, value: Any) -> Any:
    if key == "env" and isinstance(value, list):
        return [_redact_variable(variable) for variable in value]
    if isinstance(value, str) and value and _SECRET_NAME.search(key) and key not in _HARMLESS_KEYS:
        return HIDDEN
    return redact(value)


def _redact_variable(raw: Any) -> Any:
    """Return an environment variable with its value hidden, except for the operator's variables."""
    if not isinstance(raw, Mapping) or "value" not in raw:
        return redact(raw)
    name = str(raw.get("name") or "")
    is_public = name.startswith("TRAINIUM_") or name in {"POD_IP", "OMP_NUM_THREADS", "PYTHONPATH"}
    return {**raw, "value": redact_text(str(raw["value"])) if is_public else HIDDEN}
