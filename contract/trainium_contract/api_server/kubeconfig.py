"""Find the cluster and the credentials: kubeconfig files as kubectl reads them, else the pod's ServiceAccount.

The Kubernetes client library is not used, because its import takes longer than a whole command may (decision 0086).

Invariants: files are merged as kubectl does (the first that defines a name wins). Paths inside a file are relative to
it. `as` in a kubeconfig is honoured, so a command never has more rights than kubectl. Nothing here is printed.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trainium_contract.api_server.errors import NoClusterError
from trainium_contract.rfc3339 import parse_rfc3339

if TYPE_CHECKING:
    from collections.abc import Mapping

_SERVICE_ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_EXEC_EXTENSION = "client.authentication.k8s.io/exec"
_PLUGIN_SECONDS = 60.0
_FILE_SECONDS = 60.0
"""Age of a token from a file, and margin before the expiry of a plugin's token, at which it is read again."""


@dataclass(frozen=True, slots=True)
class Access:
    """Address and credentials of the API server; PEM texts are bytes, empty for none."""

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
    valid_seconds: float | None = None
    """Seconds after which the headers are read again; None without a limit."""


@dataclass(frozen=True, slots=True)
class _Credentials:
    """The fields of `Access` that prove an identity."""

    certificate: bytes
    key: bytes
    headers: tuple[tuple[str, str], ...] = ()
    valid_seconds: float | None = None


def find_access(kubeconfig: str | None, context: str | None, environment: Mapping[str, str]) -> Access:
    """Return the access by the option, else KUBECONFIG, ~/.kube/config, or the pod. Raises NoClusterError."""
    configured = kubeconfig or environment.get("KUBECONFIG")
    home = Path(environment.get("HOME") or Path.home()) / ".kube" / "config"
    paths = [Path(part) for part in configured.split(os.pathsep) if part] if configured else [home]
    existing = [path for path in paths if path.is_file()]
    if existing:
        return _access_from_files(existing, context)
    if not configured and environment.get("KUBERNETES_SERVICE_HOST"):
        return pod_access(environment)
    searched = ", ".join(str(path) for path in paths)
    raise NoClusterError(
        f"no cluster: there is no kubeconfig at {searched}; "
        "give --kubeconfig FILE, set KUBECONFIG, or run in a pod with a ServiceAccount"
    )


def pod_access(environment: Mapping[str, str]) -> Access:
    """Return the access of the pod's ServiceAccount, whose token the kubelet renews. Raises NoClusterError."""
    host, port = environment["KUBERNETES_SERVICE_HOST"], environment.get("KUBERNETES_SERVICE_PORT", "443")
    try:
        token = (_SERVICE_ACCOUNT_FOLDER / "token").read_text(encoding="utf-8").strip()
        authority = (_SERVICE_ACCOUNT_FOLDER / "ca.crt").read_bytes()
        namespace = (_SERVICE_ACCOUNT_FOLDER / "namespace").read_text(encoding="utf-8").strip()
    except OSError as error:
        raise NoClusterError(f"no cluster: the pod's ServiceAccount cannot be read ({error})") from error
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return Access(server, namespace, "pod", authority, headers=_bearer_header(token), valid_seconds=_FILE_SECONDS)


def _access_from_files(paths: list[Path], context: str | None) -> Access:
    documents = [(path.parent, _load_document(path)) for path in paths]
    names = (str(document.get("current-context") or "") for _, document in documents)
    context = context or next((name for name in names if name), "")
    files = ", ".join(str(path) for path in paths)
    if not context:
        raise NoClusterError(f"no cluster: {files} has no current-context; give --context NAME")
    _, context_entry = _find_entry(documents, "contexts", "context", context, files)
    cluster_folder, cluster = _find_entry(
        documents, "clusters", "cluster", str(context_entry.get("cluster") or ""), files
    )
    server = str(cluster.get("server") or "").rstrip("/")
    if not server.startswith(("https://", "http://")):
        raise NoClusterError(f"no cluster: the context {context} of {files} names no server")
    user_folder, user = Path(), dict[str, Any]()
    if context_entry.get("user"):
        user_folder, user = _find_entry(documents, "users", "user", str(context_entry["user"]), files)
    authority = _read_pem(cluster, "certificate-authority", cluster_folder)
    credentials = _read_credentials(user, user_folder, cluster, server, authority)
    return Access(
        server=server,
        namespace=str(context_entry.get("namespace") or "default"),
        context=context,
        authority=authority,
        certificate=credentials.certificate,
        key=credentials.key,
        headers=credentials.headers,
        verify=cluster.get("insecure-skip-tls-verify") is not True,
        server_name=str(cluster.get("tls-server-name") or ""),
        proxy=str(cluster.get("proxy-url") or ""),
        valid_seconds=credentials.valid_seconds,
    )


def _load_document(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        # libyaml if available: a kubeconfig with many contexts is slow without it.
        document = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise NoClusterError(f"no cluster: the kubeconfig {path} cannot be read: {_one_line(error)}") from error
    if not isinstance(document, dict):
        raise NoClusterError(f"no cluster: {path} is no kubeconfig")
    return document


def _find_entry(
    documents: list[tuple[Path, dict[str, Any]]], section: str, kind: str, name: str, files: str
) -> tuple[Path, dict[str, Any]]:
    """Return the folder of the first file with an entry of that name in a section, and the entry."""
    for folder, document in documents:
        for entry in document.get(section) or ():
            if isinstance(entry, dict) and entry.get("name") == name and isinstance(entry.get(kind), dict):
                return folder, entry[kind]
    raise NoClusterError(f"no cluster: {files} has no {kind} named {name!r}")


def _read_pem(fields: Mapping[str, Any], name: str, folder: Path) -> bytes:
    """Return `name` as a path, or `name`-data from base64; the data wins, as in kubectl."""
    try:
        if fields.get(f"{name}-data"):
            return base64.b64decode(str(fields[f"{name}-data"]), validate=False)
        return (folder / str(fields[name])).read_bytes() if fields.get(name) else b""
    except (OSError, binascii.Error) as error:
        raise NoClusterError(f"no cluster: {name} of the kubeconfig cannot be read: {_one_line(error)}") from error


def _read_credentials(
    user: Mapping[str, Any], folder: Path, cluster: Mapping[str, Any], server: str, authority: bytes
) -> _Credentials:
    """Read or request the credentials of a user of a kubeconfig."""
    certificate, key = _read_pem(user, "client-certificate", folder), _read_pem(user, "client-key", folder)
    headers: tuple[tuple[str, str], ...] = ()
    valid_seconds: float | None = None
    if user.get("tokenFile"):
        valid_seconds = _FILE_SECONDS
        try:
            headers = _bearer_header((folder / str(user["tokenFile"])).read_text(encoding="utf-8").strip())
        except OSError as error:
            raise NoClusterError(f"no cluster: the token file cannot be read: {_one_line(error)}") from error
    elif user.get("token"):
        headers = _bearer_header(str(user["token"]))
    elif user.get("username"):
        pair = base64.b64encode(f"{user['username']}:{user.get('password', '')}".encode()).decode()
        headers = (("Authorization", f"Basic {pair}"),)
    elif isinstance(user.get("exec"), dict):
        status = _run_exec_plugin(user["exec"], folder, cluster, server, authority)
        certificate = str(status.get("clientCertificateData") or "").encode() or certificate
        key = str(status.get("clientKeyData") or "").encode() or key
        headers = _bearer_header(str(status["token"])) if status.get("token") else ()
        valid_seconds = _seconds_until(str(status.get("expirationTimestamp") or ""))
    elif user.get("auth-provider"):
        raise NoClusterError("the kubeconfig uses an auth-provider, which is not supported: use an exec plugin instead")
    if user.get("as"):
        headers = (*headers, ("Impersonate-User", str(user["as"])))
        headers += tuple(("Impersonate-Group", str(group)) for group in user.get("as-groups") or ())
    return _Credentials(certificate, key, headers, valid_seconds)


def _seconds_until(expiry: str) -> float | None:
    """Return how long a plugin's credential may be used; None if it gives no time."""
    expires_at = parse_rfc3339(expiry)
    return None if expires_at is None else max(_FILE_SECONDS, expires_at - time.time() - _FILE_SECONDS)


def _run_exec_plugin(
    plugin: Mapping[str, Any], folder: Path, cluster: Mapping[str, Any], server: str, authority: bytes
) -> Mapping[str, Any]:
    """Return the credential of an exec plugin, such as `aws eks get-token`."""
    spec: dict[str, Any] = {"interactive": False}
    if plugin.get("provideClusterInfo"):
        data = base64.b64encode(authority).decode()
        spec["cluster"] = {"server": server, "certificate-authority-data": data}
        extensions = {entry.get("name"): entry.get("extension") for entry in reversed(cluster.get("extensions") or ())}
        if _EXEC_EXTENSION in extensions:
            spec["cluster"]["config"] = extensions[_EXEC_EXTENSION]
    version = str(plugin.get("apiVersion") or "client.authentication.k8s.io/v1")
    request = json.dumps({"apiVersion": version, "kind": "ExecCredential", "spec": spec})
    variables = {str(variable["name"]): str(variable["value"]) for variable in plugin.get("env") or ()}
    command = str(plugin.get("command") or "")
    # A path with a slash is relative to the kubeconfig; a bare name is looked up on PATH.
    program = str(folder / command) if "/" in command else command
    try:
        completed = subprocess.run(
            [program, *map(str, plugin.get("args") or ())],
            env={**os.environ, **variables, "KUBERNETES_EXEC_INFO": request},
            stdout=subprocess.PIPE,
            timeout=_PLUGIN_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        hint = f" ({plugin['installHint']})" if plugin.get("installHint") else ""
        raise NoClusterError(f"the kubeconfig's login program {command} failed: {_one_line(error)}{hint}") from error
    try:
        status = json.loads(completed.stdout)["status"]
    except (ValueError, KeyError, TypeError) as error:
        raise NoClusterError(f"the kubeconfig's login program {command} gave no credential; log in again") from error
    return status if isinstance(status, dict) else {}


def _bearer_header(token: str) -> tuple[tuple[str, str], ...]:
    return (("Authorization", f"Bearer {token}"),)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
