"""Kubeconfigs, credentials and proxies: the client and the operator send what kubectl sends."""

import asyncio
import base64
import json
import os
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
import trustme
import yaml
from kubernetes.config import incluster_config

from tests.testing.suite.loopback_http import LoopbackServer
from tests.testing.suite.timeouts import scaled
from trainium_contract.api_server import kubeconfig as files
from trainium_contract.api_server.aio import HttpClient
from trainium_contract.api_server.connection import Connection
from trainium_contract.api_server.errors import ConnectionFailedError, NoClusterError
from trainium_devcluster.binaries import Program, ensure_binaries, is_cached
from trainium_operator import handlers

CREDENTIALS = ("authorization", "impersonate-user", "impersonate-uid", "impersonate-group", "impersonate-extra-a%2fb")
API_VERSION = "client.authentication.k8s.io/v1"
LOGIN = f"""#!/bin/sh
test "$1" = fail && {{ echo "log in first" >&2; exit 3; }}
echo '{{"apiVersion": "{API_VERSION}", "kind": "ExecCredential", "status": {{'$2'}}}}'
"""
Headers = dict[str, list[str]]


class Server(NamedTuple):
    """An HTTPS server that records the credentials of requests, and a kubeconfig for it."""

    url: str
    config: dict[str, Any]
    received: list[Headers]


@pytest.fixture(scope="module")
def kubectl() -> str:
    if not is_cached(frozenset({Program.KUBECTL})):
        pytest.skip("kubectl is not there; `make binaries` brings it")
    return str(ensure_binaries(programs=frozenset({Program.KUBECTL})).find_path(Program.KUBECTL))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    authority = trustme.CA()
    received: list[Headers] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = {name: self.headers.get_all(name) for name in CREDENTIALS}
            received.append({name: values for name, values in found.items() if values})
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: Any) -> None:
            pass

    http = LoopbackServer(Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    http.socket = context.wrap_socket(http.socket, server_side=True)
    url = http.url.replace("http:", "https:")
    authority_data = base64.b64encode(authority.cert_pem.bytes()).decode()
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "clusters": [{"name": "here", "cluster": {"server": url, "certificate-authority-data": authority_data}}],
        "users": [{"name": "me", "user": {"token": "t"}}],
    }
    with http.running():
        yield Server(url, config, received)


def user_of(**fields: Any) -> dict[str, Any]:
    return {"users": [{"name": "me", "user": fields}]}


def login_of(mode: str, status: str) -> dict[str, Any]:
    plugin = {"apiVersion": API_VERSION, "command": "./login", "args": [mode, status]}
    return user_of(exec={**plugin, "env": None, "interactiveMode": "Never"})


def context_of(name: str, **context: str) -> dict[str, Any]:
    return {"current-context": name, "contexts": [{"name": name, "context": context}]}


IMPERSONATION = {
    "token": "t",
    "as": "ann",
    "as-uid": "7",
    "as-groups": ["a", "b"],
    "as-user-extra": {"a/b": ["c d"]},
}
ONLY_USER = {"contexts": None, "clusters": None, "current-context": None}
KUBECONFIGS: dict[str, list[Any]] = {
    "a token": [{}],
    "a token file": [user_of(tokenFile="token", token="other")],
    "a name and a password": [user_of(username="me", password="secret")],
    "an empty file first": ["", {}],
    "an empty file last": [{}, ""],
    "an empty file alone": [""],
    "a context named like a date": [context_of("2024-01-02", cluster="here", user="me")],
    "a context without quotes": [
        "current-context: 2024-01-02\n",
        "contexts: [{name: 2024-01-02, context: {cluster: here, user: me}}]\n",
        {"current-context": None},
    ],
    "the first user wins": [{**ONLY_USER, **user_of(token="first")}, {}],
    "the first current context wins": [{}, {"current-context": "nowhere"}],
    "an empty current context does not count": [{"current-context": ""}, {}],
    "null sections": [{**ONLY_USER, "users": None}, {}],
    "an unknown context": [{"current-context": "nowhere"}],
    "an unknown user": [{"users": []}],
    "an unknown authority": [{"clusters": [{"name": "here", "cluster": {"certificate-authority": "gone.crt"}}]}],
    "impersonation": [user_of(**IMPERSONATION)],
    "a login program": [login_of("succeed", '"token":"t"')],
    "a login program without a credential": [login_of("succeed", "")],
    "a failed login program": [login_of("fail", "")],
    "a missing login program": [user_of(exec={"apiVersion": API_VERSION, "command": "no-such-program"})],
}


@pytest.mark.parametrize("case", KUBECONFIGS)
def test_a_kubeconfig_leads_to_the_same_credentials(case: str, server: Server, kubectl: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-a-file\n")
    login = tmp_path / "login"
    login.write_text(LOGIN)
    login.chmod(0o755)
    paths = []
    for number, content in enumerate(KUBECONFIGS[case]):
        paths.append(tmp_path / f"config-{number}")
        paths[-1].write_text(content if isinstance(content, str) else yaml.safe_dump(server.config | content))
    environment = {"KUBECONFIG": os.pathsep.join(map(str, paths)), "PATH": os.environ["PATH"], "HOME": str(tmp_path)}

    def receive_from_kubectl() -> Headers | None:
        server.received.clear()
        command = [kubectl, "get", "--raw", "/version", "--request-timeout=10s"]
        ended = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=scaled(60))
        return server.received[0] if ended.returncode == 0 and server.received else None

    def receive_from_client() -> Headers | None:
        server.received.clear()
        with suppress(NoClusterError):
            Connection(files.find_access(None, None, environment)).request("GET", "/version")
        return server.received[0] if server.received else None

    async def request_with_event_loop() -> None:
        client = HttpClient(files.find_access(None, None, environment), user_agent="test")
        try:
            await client.request("GET", "/version", query={}, body=None, content_type="application/json", timeout=10)
        finally:
            await client.close()

    expected = receive_from_kubectl()
    assert receive_from_client() == expected
    server.received.clear()
    with suppress(NoClusterError):
        asyncio.run(request_with_event_loop())
    assert (server.received[0] if server.received else None) == expected


class Proxy(NamedTuple):
    """A proxy that refuses every tunnel, and the targets that it was asked for."""

    url: str
    targets: list[tuple[str, str]]


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    targets: list[tuple[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            targets.append((self.path, self.headers.get("Proxy-Authorization", "")))
            self.send_error(502)
            self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    server = LoopbackServer(Handler)
    with server.running():
        yield Proxy(server.url, targets)


UNREACHABLE = "240.0.0.1"
"""Connections to it fail at once."""
PROXIES = [
    ("https://api.corp.test", {}),
    ("https://api.corp.test", {"NO_PROXY": "corp.test"}),
    ("https://api.corp.test", {"NO_PROXY": ".corp.test"}),
    ("https://api.corp.test", {"NO_PROXY": "*.corp.test"}),
    ("https://api.corp.test", {"NO_PROXY": "*.other.test, API.corp.test"}),
    ("https://api.corp.test", {"NO_PROXY": "api.corp.test:443"}),
    ("https://api.corp.test:6443", {"NO_PROXY": "api.corp.test:443"}),
    ("https://api.corp.test:6443", {"NO_PROXY": ".corp.test:6443"}),
    ("https://api.corp.test", {"NO_PROXY": "orp.test,api.corp,10.0.0.0/8"}),
    ("https://corp.test", {"NO_PROXY": ".corp.test"}),
    ("https://corp.test", {"NO_PROXY": "*.corp.test"}),
    ("https://corp.test", {"NO_PROXY": "*"}),
    ("https://corp.test", {"no_proxy": "corp.test"}),
    ("https://corp.test", {"NO_PROXY": "other.test", "no_proxy": "corp.test"}),
    (f"https://{UNREACHABLE}:6443", {"NO_PROXY": "240.0.0.0/8"}),
    (f"https://{UNREACHABLE}:6443", {"NO_PROXY": "10.96.0.0/12,172.16.0.0/12"}),
    (f"https://{UNREACHABLE}:6443", {"NO_PROXY": UNREACHABLE}),
    (f"https://{UNREACHABLE}:6443", {"NO_PROXY": f"{UNREACHABLE}:6443"}),
    (f"https://{UNREACHABLE}:6443", {"NO_PROXY": f"{UNREACHABLE}:443"}),
    ("https://[fe80::1]:6443", {"NO_PROXY": "fe80::/64"}),
    ("https://[fe80::1]:6443", {"NO_PROXY": "[fe80::1]:6443"}),
    ("https://[fe80::1]:6443", {"NO_PROXY": "fd00::/8"}),
    ("https://localhost:1", {}),
    ("https://127.0.0.2:1", {}),
    ("https://corp.test", {"HTTPS_PROXY": "", "HTTP_PROXY": "{proxy}"}),
    ("https://corp.test", {"HTTPS_PROXY": "", "https_proxy": "{proxy}"}),
    ("https://corp.test", {"HTTPS_PROXY": "", "ALL_PROXY": "{proxy}"}),
    ("https://corp.test", {"HTTPS_PROXY": "{address}"}),
    ("https://corp.test", {"HTTPS_PROXY": "http://me:s%3Acret@{address}"}),
    ("https://corp.test", {"HTTPS_PROXY": "http://none.invalid", "NO_PROXY": "*", "proxy-url": "{proxy}"}),
    ("https://127.0.0.2:1", {"proxy-url": "http://me:secret@{address}"}),
]


@pytest.mark.parametrize(("url", "variables"), PROXIES)
def test_the_same_requests_go_through_a_proxy(
    url: str,
    variables: dict[str, str],
    proxy: Proxy,
    kubectl: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = proxy.url.removeprefix("http://")
    variables = {"HTTPS_PROXY": proxy.url, **variables}
    variables = {name: value.format(proxy=proxy.url, address=address) for name, value in variables.items()}
    cluster = {"server": url, **({"proxy-url": variables.pop("proxy-url")} if "proxy-url" in variables else {})}
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "clusters": [{"name": "here", "cluster": cluster}],
        "users": [{"name": "me", "user": {"token": "t"}}],
    }
    (tmp_path / "config").write_text(json.dumps(config))
    environment = {"KUBECONFIG": str(tmp_path / "config"), "HOME": str(tmp_path), **variables}
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    proxy.targets.clear()
    command = [kubectl, "get", "--raw", "/version", "--request-timeout=5s"]
    subprocess.run(command, env=environment, capture_output=True, check=False, timeout=scaled(60))
    expected = proxy.targets[:1]
    accesses = [files.find_access(None, None, environment)]
    if "proxy-url" not in cluster:
        accesses.append(pod_access(tmp_path, url, environment, monkeypatch))
    for access in accesses:
        proxy.targets.clear()
        with pytest.raises(ConnectionFailedError) as refused:
            asyncio.run(request_once(access))
        assert "cret" not in str(refused.value)
        assert proxy.targets[:1] == expected
        proxy.targets.clear()
        with pytest.raises(aiohttp.ClientError):
            asyncio.run(request_with_kopf(access))
        assert proxy.targets[:1] == expected
        proxy.targets.clear()
        with pytest.raises(ConnectionFailedError) as refused:
            Connection(access, timeout=5).request("GET", "/version")
        assert "cret" not in str(refused.value)
        assert proxy.targets[:1] == expected


async def request_once(access: files.Access) -> None:
    client = HttpClient(access, user_agent="test")
    try:
        await client.request("GET", "/version", query={}, body=None, content_type="application/json", timeout=5)
    finally:
        await client.close()


async def request_with_kopf(access: files.Access) -> None:
    client = HttpClient(access, user_agent="test")
    session = handlers._build_session(client, await client.build_headers()).aiohttp_session
    try:
        await session.get(f"{access.server}/version", timeout=aiohttp.ClientTimeout(5))
    finally:
        await session.close()
        await client.close()


def pod_access(folder: Path, url: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> files.Access:
    """Return the access of a pod whose API server has this address."""
    for name, content in (("token", "t"), ("namespace", "team"), ("ca.crt", trustme.CA().cert_pem.bytes().decode())):
        (folder / name).write_text(content)
    monkeypatch.setattr(files, "_NAMESPACE_FILE", folder / "namespace")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(folder / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(folder / "ca.crt"))
    host, _, port = url.removeprefix("https://").rpartition(":") if url.count(":") > 1 else (url[8:], "", "443")
    service = {"KUBERNETES_SERVICE_HOST": host.strip("[]"), "KUBERNETES_SERVICE_PORT": port}
    return files.read_pod_access({**environment, **service})
