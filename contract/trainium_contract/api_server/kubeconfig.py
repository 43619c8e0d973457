"""Find the cluster and the credentials with the `kubernetes` library, corrected where it differs from kubectl.

Guarantees:
- Files are merged as kubectl does: the first that defines a name or the current context wins, an empty file has none,
  names and values are text, and paths inside a file are relative to it.
- A failed login program is an error; the library would continue without credentials.
- `as` is honoured, so a command never has more rights than kubectl.
- Credentials that expire are read again in time. They never reach a message.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import yaml
from kubernetes.client import Configuration
from kubernetes.config import ConfigException, incluster_config
from kubernetes.config.exec_provider import ExecProvider
from kubernetes.config.kube_config import EXPIRY_SKEW_PREVENTION_DELAY, ConfigNode, FileOrData, KubeConfigLoader

from trainium_contract.api_server.errors import NoClusterError
from trainium_contract.api_server.proxies import NO_PROXY, Proxy, find_proxy
from trainium_contract.rfc3339 import parse_rfc3339

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_SECTIONS = {"clusters": "cluster", "contexts": "context", "users": "user"}
_PATHS = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_FILE_AGE = dt.timedelta(minutes=1)
_RENEWAL_SECONDS = 30.0
"""Shortest time between two attempts to renew credentials."""
logger = logging.getLogger(__name__)


class _TextLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc] # libyaml is faster
    """Reads names like dates and numbers as text, as kubectl does."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] in ("null", "bool", "merge")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class Renewal:
    """Hook of the library that renews expiring credentials; it keeps the old ones if that fails."""

    def __init__(self, renew: Callable[[Configuration], None]) -> None:
        self._renew = renew
        self._next_at = time.monotonic() + _RENEWAL_SECONDS

    @classmethod
    def limit(cls, configuration: Configuration) -> Self | None:
        """Limit how often the library renews the credentials of a configuration."""
        if configuration.refresh_api_key_hook is None:
            return None
        limited = configuration.refresh_api_key_hook = cls(configuration.refresh_api_key_hook)
        return limited

    def is_due(self) -> bool:
        """Return whether a call may renew the credentials."""
        return time.monotonic() >= self._next_at

    def __call__(self, configuration: Configuration) -> None:
        """Renew the credentials if they have expired."""
        if not self.is_due():
            return
        self._next_at = time.monotonic() + _RENEWAL_SECONDS
        try:
            self._renew(configuration)
        except (NoClusterError, ConfigException, OSError) as error:
            logger.warning("the credentials cannot be read again: %s", _join_lines(error))


@dataclass(frozen=True, slots=True)
class Access:
    """Address and credentials of an API server."""

    configuration: Configuration
    namespace: str = "default"
    context: str = ""
    proxy: Proxy = NO_PROXY
    """Without a URL, the connection is direct."""
    impersonation: tuple[tuple[str, str], ...] = ()
    """Headers, which may repeat."""
    renewal: Renewal | None = None
    """None for credentials that do not expire."""

    @property
    def server(self) -> str:
        """URL of the API server."""
        return str(self.configuration.host)


class _Loader(KubeConfigLoader):  # type: ignore[misc] # the library's types are not followed
    """Handles token files and login programs as kubectl does."""

    def _load_user_token(self) -> bool | None:
        if not super()._load_user_token():
            return None
        self.token: str = str(self.token).strip()
        if "tokenFile" in self._user:
            self.expiry = dt.datetime.now(dt.UTC) + EXPIRY_SKEW_PREVENTION_DELAY + _FILE_AGE
        return True

    def _load_from_exec_plugin(self) -> bool | None:
        if "exec" not in self._user:
            return None
        plugin = self._user["exec"]
        command = str(plugin["command"])
        try:
            status = ExecProvider(plugin, None, self._cluster).run()
        except (ConfigException, OSError, TypeError) as error:
            hint = f" ({plugin['installHint']})" if "installHint" in plugin else ""
            raise NoClusterError(f"the login program {command} failed: {_join_lines(error)}{hint}") from error
        if status.get("token"):
            self.token = f"Bearer {status['token']}"
        if status.get("clientCertificateData") and status.get("clientKeyData"):
            self.cert_file, self.key_file = (
                FileOrData(status, None, data_key_name=name, base64_file_content=False).as_file()
                for name in ("clientCertificateData", "clientKeyData")
            )
        elif not status.get("token"):
            raise NoClusterError(f"the login program {command} returned no credential; log in again")
        expires_at = parse_rfc3339(str(status.get("expirationTimestamp") or ""))
        if expires_at is not None:
            self.expiry = dt.datetime.fromtimestamp(expires_at, dt.UTC)
        return True


def find_access(kubeconfig: str | None, context: str | None, environment: Mapping[str, str]) -> Access:
    """Return the access by the option, else KUBECONFIG, ~/.kube/config, or the pod. Raises NoClusterError."""
    configured = kubeconfig or environment.get("KUBECONFIG")
    home = Path(environment.get("HOME") or Path.home()) / ".kube" / "config"
    paths = [Path(part) for part in configured.split(os.pathsep) if part] if configured else [home]
    existing = [path for path in paths if path.is_file()]
    if existing:
        return _read_access_from_files(existing, context, environment)
    if not configured and environment.get(incluster_config.SERVICE_HOST_ENV_NAME):
        return read_pod_access(environment)
    searched = ", ".join(str(path) for path in paths)
    raise NoClusterError(
        f"no cluster: there is no kubeconfig at {searched}; "
        "give --kubeconfig FILE, set KUBECONFIG, or run in a pod with a ServiceAccount"
    )


def read_pod_access(environment: Mapping[str, str]) -> Access:
    """Return the access of the pod's ServiceAccount, whose token the kubelet renews. Raises NoClusterError."""
    configuration = Configuration(proxy="", no_proxy="")
    try:
        incluster_config.InClusterConfigLoader(
            incluster_config.SERVICE_TOKEN_FILENAME, incluster_config.SERVICE_CERT_FILENAME, environ=environment
        ).load_and_set(configuration)
        namespace = _NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    except (ConfigException, OSError) as error:
        raise NoClusterError(f"no cluster: the pod's ServiceAccount cannot be read ({_join_lines(error)})") from error
    return Access(
        configuration,
        namespace,
        "pod",
        Proxy.parse(find_proxy(configuration.host, environment)),
        renewal=Renewal.limit(configuration),
    )


def _read_access_from_files(paths: list[Path], context: str | None, environment: Mapping[str, str]) -> Access:
    files = ", ".join(str(path) for path in paths)
    merged = _merge_files(paths)
    context = context or merged["current-context"]
    if not context:
        raise NoClusterError(f"no cluster: {files} has no current-context; give --context NAME")
    entry = _find_entry(merged, "contexts", context, files)
    cluster = _find_entry(merged, "clusters", entry.get("cluster", ""), files)
    if not str(cluster.get("server", "")).startswith(("https://", "http://")):
        raise NoClusterError(f"no cluster: the context {context} of {files} names no server")
    user = _find_entry(merged, "users", entry["user"], files) if "user" in entry else {}
    if "auth-provider" in user:
        raise NoClusterError("the kubeconfig uses an auth-provider, which is not supported: use an exec plugin instead")
    configuration = Configuration(proxy="", no_proxy="")
    try:
        loader = _Loader(ConfigNode("kubeconfig", merged), context, config_base_path=None)
        loader.load_and_set(configuration)
    except (ConfigException, OSError, ValueError, TypeError) as error:
        raise NoClusterError(f"no cluster: the context {context} of {files}: {_join_lines(error)}") from error
    return Access(
        configuration,
        namespace=entry.get("namespace", "default"),
        context=context,
        proxy=Proxy.parse(cluster.get("proxy-url") or find_proxy(configuration.host, environment)),
        impersonation=_build_impersonation_headers(user),
        renewal=Renewal.limit(configuration),
    )


def _merge_files(paths: list[Path]) -> dict[str, Any]:
    """Merge kubeconfigs as kubectl does; the library takes the last current context and refuses an empty file."""
    merged: dict[str, Any] = {"current-context": "", **{section: [] for section in _SECTIONS}}
    for path in paths:
        document = _load_document(path)
        merged["current-context"] = merged["current-context"] or document.get("current-context") or ""
        for section, kind in _SECTIONS.items():
            names = {entry.value["name"] for entry in merged[section]}
            for entry in document.get(section) or ():
                if isinstance(entry, dict) and isinstance(entry.get(kind), dict) and entry.get("name") not in names:
                    fields = _resolve_paths(entry[kind], path.parent.absolute())
                    merged[section].append(ConfigNode(section, {"name": entry.get("name"), kind: fields}, str(path)))
    return merged


def _load_document(path: Path) -> dict[str, Any]:
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=_TextLoader)  # noqa: S506 - a safe loader
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise NoClusterError(f"no cluster: the kubeconfig {path} cannot be read: {_join_lines(error)}") from error
    if not isinstance(document, dict | None):
        raise NoClusterError(f"no cluster: {path} is no kubeconfig")
    return document or {}


def _resolve_paths(fields: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Make the paths of an entry absolute, and drop empty fields."""
    resolved = {name: value for name, value in fields.items() if value not in (None, "")}
    for name in _PATHS:
        if name in resolved:
            resolved[name] = str(folder / str(resolved[name]))
    if "tokenFile" in resolved:
        resolved.pop("token", None)
    plugin = resolved.get("exec")
    if isinstance(plugin, dict):
        plugin = {"apiVersion": "client.authentication.k8s.io/v1"} | {k: v for k, v in plugin.items() if v is not None}
        if "/" in str(plugin.get("command", "")):
            plugin["command"] = str(folder / plugin["command"])
        resolved["exec"] = plugin
    return resolved


def _find_entry(merged: Mapping[str, Any], section: str, name: str, files: str) -> dict[str, Any]:
    for entry in merged[section]:
        if entry.value["name"] == name:
            fields: dict[str, Any] = entry.value[_SECTIONS[section]]
            return fields
    raise NoClusterError(f"no cluster: {files} has no {_SECTIONS[section]} named {name!r}")


def _build_impersonation_headers(user: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the headers of `as`, which the library ignores."""
    headers = [("Impersonate-User", user.get("as")), ("Impersonate-Uid", user.get("as-uid"))]
    headers += [("Impersonate-Group", group) for group in user.get("as-groups") or ()]
    for key, values in (user.get("as-user-extra") or {}).items():
        headers += [(f"Impersonate-Extra-{quote(key, safe='')}", value) for value in values or ()]
    return tuple((name, str(value)) for name, value in headers if value)


def _join_lines(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
