"""Connections to an API server over real HTTP: credentials and their renewal, watch streams, kubeconfig errors."""

import asyncio
import json
import time
from contextlib import aclosing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml
from aiohttp import web
from kubernetes.config import incluster_config

from tests.testing.api.http_api_server import run_http_server
from tests.testing.api.recorded_jobs import kubeconfig
from trainium_contract.api_server import kubeconfig as files
from trainium_contract.api_server.aio import HttpClient
from trainium_contract.api_server.errors import ConnectionFailedError, NoClusterError
from trainium_operator.cluster.api.client import APPLY_PATCH
from trainium_operator.cluster.api.transport import connect

REQUEST_OPTIONS: dict[str, Any] = {"query": {}, "body": None, "content_type": "application/json", "timeout": 5.0}
PLUGIN = """#!/bin/sh
echo asked >>{log}
echo '{{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"'
echo ', "status": {{"token": "t'$(wc -l <{log})'", "expirationTimestamp": "{expiry}"}}}}'
"""


async def echo(request: web.Request) -> web.Response:
    return web.json_response({"token": request.headers.get("Authorization", ""), "body": await request.text()})


def write_kubeconfig(folder: Path, server: str, **user: Any) -> str:
    path = folder / "config"
    path.write_text(yaml.safe_dump(kubeconfig(server, **user)))
    return str(path)


async def read_token(client: HttpClient) -> str:
    answer = json.loads((await client.request("GET", "/x", **REQUEST_OPTIONS)).body)
    return str(answer["token"])


class ForgetfulLoader(incluster_config.InClusterConfigLoader):
    """Reads the token at every renewal instead of each minute."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._token_refresh_period = timedelta()


@pytest.fixture
def renewing_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_RENEWAL_SECONDS", 0.0)
    monkeypatch.setattr(files, "_FILE_AGE", timedelta())


@pytest.mark.usefixtures("renewing_always")
async def test_a_token_file_is_reloaded_after_its_age_limit(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    async with run_http_server(echo) as server:
        client = await connect(write_kubeconfig(tmp_path, server, token="other", tokenFile="token"))
        separate = client.open_separate_pool(1)
        received = [await read_token(client)]
        token.write_text("second")
        received += [await read_token(client), await read_token(separate)]
        client.access.renewal._next_at = time.monotonic() + 60.0
        token.write_text("third")
        received += [await read_token(client)]
        client.access.renewal._next_at = 0.0
        token.unlink()
        received += [await read_token(client)]
        await separate.close()
        await client.close()
    assert received == ["Bearer first", "Bearer second", "Bearer second", "Bearer second", "Bearer second"]


@pytest.mark.usefixtures("renewing_always")
async def test_a_pod_uses_its_service_account_and_reloads_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_NAMESPACE_FILE", tmp_path / "namespace")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setattr(incluster_config, "InClusterConfigLoader", ForgetfulLoader)
    for name, value in (("HOST", "10.0.0.1"), ("PORT", "443")):
        monkeypatch.setenv(f"KUBERNETES_SERVICE_{name}", value)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    authority = trustme.CA()
    for name, content in (("token", "t"), ("ca.crt", authority.cert_pem.bytes().decode()), ("namespace", "team")):
        (tmp_path / name).write_text(content)
    client = await connect(None)
    assert (client.access.server, client.access.namespace) == ("https://10.0.0.1:443", "team")
    assert (await client.build_headers())["Authorization"] == "bearer t"
    (tmp_path / "token").write_text("renewed")
    assert (await client.build_headers())["Authorization"] == "bearer renewed"
    await client.close()


@pytest.mark.usefixtures("renewing_always")
@pytest.mark.parametrize(("expiry", "second"), [("2100-01-01T00:00:00Z", "t1"), ("2020-01-01T00:00:00Z", "t2")])
async def test_a_login_program_is_called_again_before_expiry(tmp_path: Path, expiry: str, second: str) -> None:
    program = tmp_path / "login"
    program.write_text(PLUGIN.format(log=tmp_path / "log", expiry=expiry))
    program.chmod(0o755)
    async with run_http_server(echo) as server:
        client = await connect(write_kubeconfig(tmp_path, server, exec={"command": "./login"}))
        assert await read_token(client) == f"Bearer {second}"
        await client.close()


async def test_a_watch_event_of_any_size_is_one_line(tmp_path: Path) -> None:
    large = json.dumps({"object": "x" * 1_500_000}).encode()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in (b'{"a', b'": 1}\n{"b": 2}\n', large[:700_000], large[700_000:] + b"\n", b"tail"):
            await response.write(piece)
        return response

    async with run_http_server(answer) as server:
        client = await connect(write_kubeconfig(tmp_path, server, token="t"))
        async with client.stream("/watch", query={"watch": "true"}, silence=5.0) as stream:
            lines = [line async for line in stream.lines]
        await client.close()
    assert (stream.status, lines) == (200, [b'{"a": 1}', b'{"b": 2}', large, b"tail"])


async def test_a_silent_stream_and_a_stopped_server_are_failed_connections(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first\n")
        await asyncio.sleep(5)
        return response

    async with run_http_server(answer) as server:
        client = await connect(write_kubeconfig(tmp_path, server, token="t"))
        async with client.stream("/watch", query={}, silence=0.2) as stream, aclosing(stream.lines) as lines:
            assert await anext(lines) == b"first"
            with pytest.raises(ConnectionFailedError, match="GET /watch"):
                await anext(lines)
    with pytest.raises(ConnectionFailedError, match="GET /x"):
        await client.request("GET", "/x", **REQUEST_OPTIONS)
    await client.close()


async def test_an_apply_patch_is_sent_as_yaml(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"type": request.headers["Content-Type"], "body": await request.text()})

    async with run_http_server(answer) as server:
        client = await connect(write_kubeconfig(tmp_path, server, token="t"))
        applied = {**REQUEST_OPTIONS, "body": {"word": "\N{GRINNING FACE}"}, "content_type": APPLY_PATCH}
        received = json.loads((await client.request("PATCH", "/x", **applied)).body)
        await client.close()
    assert received == {"type": f"{APPLY_PATCH}; charset=utf-8", "body": '{"word": "\N{GRINNING FACE}"}'}


async def test_a_write_does_not_follow_redirects(tmp_path: Path) -> None:
    async def redirect(request: web.Request) -> web.Response:
        reached.append(request.path)
        raise web.HTTPTemporaryRedirect("/elsewhere")

    reached: list[str] = []
    async with run_http_server(redirect) as server:
        client = await connect(write_kubeconfig(tmp_path, server))
        with pytest.raises(ConnectionFailedError, match="a write was redirected"):
            await client.request("POST", "/x", **REQUEST_OPTIONS)
        await client.close()
    assert reached == ["/x"]


async def test_a_missing_kubeconfig_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(NoClusterError, match="give --kubeconfig FILE, set KUBECONFIG"):
        await connect(str(tmp_path / "none"))


async def test_unverified_tls_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    content = kubeconfig("https://127.0.0.1:1", token="t")
    content["clusters"][0]["cluster"]["insecure-skip-tls-verify"] = True
    path.write_text(json.dumps(content))
    with pytest.raises(NoClusterError, match="turns TLS verification off"):
        await connect(str(path))
