"""Which cluster, and as whom: kubeconfig files as kubectl reads them, else the pod's own ServiceAccount.

Why not the Kubernetes client library: importing it takes longer than the whole of a command may (decision 0086).
Invariants: files are merged as kubectl does (the first that names something wins); paths inside a file are relative to
it; `as` in a kubeconfig is honoured, so a command never has more rights than kubectl would; nothing here is printed.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import subprocess
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trainium_contract.api_server.errors import NoClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PLUGIN_SECONDS = 60.0
_FILE_SECONDS = 60.0
"""Age of a token that was read from a file, and time before the end of one that a plugin gave, to ask again."""


@dataclass(frozen=True, slots=True)
class Access:
    """Where the API server is and what it wants to see; PEM texts are bytes, empty for none."""

    server: str
    namespace: str = "default"
    context: str = ""
    authority: bytes = b""
    certificate: bytes = b""
    key: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    verify: bool = True
    server_name: str = ""
    proxy: str = ""
    keep_seconds: float | None = None
    """Seconds for which the headers may be used before they are read again; None: no limit."""


def find_access(kubeconfig: str | None, context: str | None, environment: Mapping[str, str]) -> Access:
    """Access by the option, else KUBECONFIG, else ~/.kube/config, else the pod's own. Raises NoClusterError."""
    given = kubeconfig or environment.get("KUBECONFIG")
    home = Path(environment.get("HOME") or Path.home()) / ".kube" / "config"
    paths = [Path(part) for part in given.split(os.pathsep) if part] if given else [home]
    there = [path for path in paths if path.is_file()]
    if there:
        return _from_files(there, context)
    if not given and environment.get("KUBERNETES_SERVICE_HOST"):
        return pod_access(environment)
    searched = ", ".join(str(path) for path in paths)
    raise NoClusterError(
        f"no cluster: there is no kubeconfig at {searched}; "
        "give --kubeconfig FILE, set KUBECONFIG, or run in a pod with a ServiceAccount"
    )


def pod_access(environment: Mapping[str, str]) -> Access:
    """Access by the pod's own ServiceAccount, whose token the kubelet renews. Raises NoClusterError."""
    host, port = environment["KUBERNETES_SERVICE_HOST"], environment.get("KUBERNETES_SERVICE_PORT", "443")
    try:
        token = (_ACCOUNT / "token").read_text(encoding="utf-8").strip()
        authority = (_ACCOUNT / "ca.crt").read_bytes()
        namespace = (_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
    except OSError as error:
        raise NoClusterError(f"no cluster: the pod's ServiceAccount cannot be read ({error})") from error
    shown = f"[{host}]" if ":" in host else host
    address = f"https://{shown}:{port}"
    return Access(address, namespace, "pod", authority, headers=_bearer(token), keep_seconds=_FILE_SECONDS)


def _from_files(paths: list[Path], wanted: str | None) -> Access:
    documents = [(path.parent, _document(path)) for path in paths]
    names = (str(document.get("current-context") or "") for _, document in documents)
    context = wanted or next((name for name in names if name), "")
    where = ", ".join(str(path) for path in paths)
    if not context:
        raise NoClusterError(f"no cluster: {where} has no current-context; give --context NAME")
    _, chosen = _named(documents, "contexts", "context", context, where)
    cluster_folder, cluster = _named(documents, "clusters", "cluster", str(chosen.get("cluster") or ""), where)
    server = str(cluster.get("server") or "").rstrip("/")
    if not server.startswith(("https://", "http://")):
        raise NoClusterError(f"no cluster: the context {context} of {where} names no server")
    user_folder, user = Path(), dict[str, Any]()
    if chosen.get("user"):
        user_folder, user = _named(documents, "users", "user", str(chosen["user"]), where)
    authority = _material(cluster, "certificate-authority", cluster_folder)
    certificate, key, headers, keep = _identity(user, user_folder, cluster, server, authority)
    return Access(
        server=server,
        namespace=str(chosen.get("namespace") or "default"),
        context=context,
        authority=authority,
        certificate=certificate,
        key=key,
        headers=headers,
        verify=cluster.get("insecure-skip-tls-verify") is not True,
        server_name=str(cluster.get("tls-server-name") or ""),
        proxy=str(cluster.get("proxy-url") or ""),
        keep_seconds=keep,
    )


def _document(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        # libyaml where it is built in: a kubeconfig with many contexts takes long otherwise.
        found = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise NoClusterError(f"no cluster: the kubeconfig {path} cannot be read: {_one_line(error)}") from error
    if not isinstance(found, dict):
        raise NoClusterError(f"no cluster: {path} is no kubeconfig")
    return found


def _named(
    documents: list[tuple[Path, dict[str, Any]]], kind: str, inner: str, name: str, where: str
) -> tuple[Path, dict[str, Any]]:
    """Return the first entry of that name, with the folder of its file."""
    for folder, document in documents:
        for entry in document.get(kind) or ():
            if isinstance(entry, dict) and entry.get("name") == name and isinstance(entry.get(inner), dict):
                return folder, entry[inner]
    raise NoClusterError(f"no cluster: {where} has no {inner} named {name!r}")


def _material(fields: Mapping[str, Any], name: str, folder: Path) -> bytes:
    """`name` as a path, or `name`-data in base64; the data wins, as in kubectl."""
    try:
        if fields.get(f"{name}-data"):
            return base64.b64decode(str(fields[f"{name}-data"]), validate=False)
        return (folder / str(fields[name])).read_bytes() if fields.get(name) else b""
    except (OSError, binascii.Error) as error:
        raise NoClusterError(f"no cluster: {name} of the kubeconfig cannot be read: {_one_line(error)}") from error


def _identity(
    user: Mapping[str, Any], folder: Path, cluster: Mapping[str, Any], server: str, authority: bytes
) -> tuple[bytes, bytes, tuple[tuple[str, str], ...], float | None]:
    """Client certificate, its key, headers, and how long these may be kept."""
    certificate, key = _material(user, "client-certificate", folder), _material(user, "client-key", folder)
    headers: tuple[tuple[str, str], ...] = ()
    keep: float | None = None
    if user.get("tokenFile"):
        keep = _FILE_SECONDS
        try:
            headers = _bearer((folder / str(user["tokenFile"])).read_text(encoding="utf-8").strip())
        except OSError as error:
            raise NoClusterError(f"no cluster: the token file cannot be read: {_one_line(error)}") from error
    elif user.get("token"):
        headers = _bearer(str(user["token"]))
    elif user.get("username"):
        pair = base64.b64encode(f"{user['username']}:{user.get('password', '')}".encode()).decode()
        headers = (("Authorization", f"Basic {pair}"),)
    elif isinstance(user.get("exec"), dict):
        status = _ask_plugin(user["exec"], folder, cluster, server, authority)
        certificate = str(status.get("clientCertificateData") or "").encode() or certificate
        key = str(status.get("clientKeyData") or "").encode() or key
        headers = _bearer(str(status["token"])) if status.get("token") else ()
        keep = _seconds_until(str(status.get("expirationTimestamp") or ""))
    elif user.get("auth-provider"):
        raise NoClusterError("the kubeconfig uses an auth-provider, which is not supported: use an exec plugin instead")
    if user.get("as"):
        headers = (*headers, ("Impersonate-User", str(user["as"])))
        headers += tuple(("Impersonate-Group", str(group)) for group in user.get("as-groups") or ())
    return certificate, key, headers, keep


def _seconds_until(expiry: str) -> float | None:
    """Return how long a plugin's credential may be kept; None where it names no time."""
    try:
        return max(_FILE_SECONDS, datetime.fromisoformat(expiry).timestamp() - time.time() - _FILE_SECONDS)
    except ValueError:
        return None


def _ask_plugin(
    plugin: Mapping[str, Any], folder: Path, cluster: Mapping[str, Any], server: str, authority: bytes
) -> Mapping[str, Any]:
    """Return the credential of an exec plugin, such as `aws eks get-token`."""
    spec: dict[str, Any] = {"interactive": False}
    if plugin.get("provideClusterInfo"):
        data = base64.b64encode(authority).decode()
        spec["cluster"] = {"server": server, "certificate-authority-data": data}
        extensions = cluster.get("extensions") or ()
        own = [each.get("extension") for each in extensions if each.get("name") == "client.authentication.k8s.io/exec"]
        spec["cluster"] |= {"config": own[0]} if own else {}
    version = str(plugin.get("apiVersion") or "client.authentication.k8s.io/v1")
    asked = json.dumps({"apiVersion": version, "kind": "ExecCredential", "spec": spec})
    variables = {str(each["name"]): str(each["value"]) for each in plugin.get("env") or ()}
    command = str(plugin.get("command") or "")
    # A path with a slash is relative to the kubeconfig, a bare name is searched up on PATH.
    program = str(folder / command) if "/" in command else command
    try:
        done = subprocess.run(
            [program, *map(str, plugin.get("args") or ())],
            env={**os.environ, **variables, "KUBERNETES_EXEC_INFO": asked},
            stdout=subprocess.PIPE,
            timeout=_PLUGIN_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        hint = f" ({plugin['installHint']})" if plugin.get("installHint") else ""
        raise NoClusterError(f"the kubeconfig's login program {command} failed: {_one_line(error)}{hint}") from error
    try:
        status = json.loads(done.stdout)["status"]
    except (ValueError, KeyError, TypeError) as error:
        raise NoClusterError(f"the kubeconfig's login program {command} gave no credential; log in again") from error
    return status if isinstance(status, dict) else {}


def _bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("Authorization", f"Bearer {token}"),)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
