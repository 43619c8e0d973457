"""Connections to an API server over real HTTP: credentials and their renewal, watch streams, kubeconfig errors."""

import asyncio
import json
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from tests.testing.api.fake_http import run_http_server
from tests.testing.api.recorded_jobs import kubeconfig
from trainium_contract.api_server import kubeconfig as files
from trainium_contract.api_server.aio import ConnectionFailedError
from trainium_contract.api_server.errors import NoClusterError
from trainium_contract.api_server.kubeconfig import find_access
from trainium_operator.cluster.api.client import APPLY_PATCH
from trainium_operator.cluster.api.transport import connect

REQUEST_OPTIONS: dict[str, Any] = {"query": {}, "body": None, "content_type": "application/json", "timeout": 5.0}
PLUGIN = """#!/bin/sh
echo asked >>{log}
echo '{{"status": {{"token": "t'$(wc -l <{log})'", "expirationTimestamp": "{expiry}"}}}}'
"""


async def echo(request: web.Request) -> web.Response:
    return web.json_response({"token": request.headers.get("Authorization", ""), "body": await request.text()})


def write_kubeconfig(folder: Path, server: str, **user: Any) -> str:
    path = folder / "config"
    path.write_text(yaml.safe_dump(kubeconfig(server, **user)))
    return str(path)


async def test_a_token_file_is_reloaded_after_its_age_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    token.write_text("first")
    async with run_http_server(echo) as server:
        client = await connect(write_kubeconfig(tmp_path, server, tokenFile=str(token)))
        token.write_text("second")
        young = await client.request("GET", "/x", **REQUEST_OPTIONS)
        monkeypatch.setattr(client, "_read_at", client._read_at - files._FILE_SECONDS)
        old = await client.request("GET", "/x", **REQUEST_OPTIONS)
        token.unlink()
        monkeypatch.setattr(client, "_read_at", client._read_at - files._FILE_SECONDS)
        missing = await client.request("GET", "/x", **REQUEST_OPTIONS)
        separate = client.with_separate_pool(1)
        restored = await separate.request("GET", "/x", **REQUEST_OPTIONS)
        await separate.close()
        await client.close()
    assert [json.loads(response.body)["token"] for response in (young, old, missing, restored)] == [
        "Bearer first", "Bearer second", "Bearer second", "Bearer second",
    ]  # fmt: skip


async def test_a_pod_uses_its_service_account_and_reloads_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_SERVICE_ACCOUNT_FOLDER", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    for name, content in (("token", "t"), ("ca.crt", ""), ("namespace", "team")):
        (tmp_path / name).write_text(content)
    client = await connect(None)
    access = (client.access.server, client.namespace, dict(client.access.headers), client.access.valid_seconds)
    assert access == ("https://10.0.0.1:443", "team", {"Authorization": "Bearer t"}, 60.0)
    (tmp_path / "token").write_text("renewed")
    monkeypatch.setattr(client, "_read_at", client._read_at - 60.0)
    assert dict((await client.refresh_access()).headers) == {"Authorization": "Bearer renewed"}
    await client.close()


@pytest.mark.parametrize(
    ("expiry", "min_seconds", "max_seconds"), [("2100-01-01T00:00:00Z", 1e9, 1e10), ("2020-01-01T00:00:00Z", 60, 60)]
)
def test_a_credential_plugin_is_called_again_before_expiry(
    tmp_path: Path, expiry: str, min_seconds: float, max_seconds: float
) -> None:
    program = tmp_path / "login"
    program.write_text(PLUGIN.format(log=tmp_path / "log", expiry=expiry))
    program.chmod(0o755)
    access = find_access(write_kubeconfig(tmp_path, "https://example.test", exec={"command": "./login"}), None, {})
    assert access.headers == (("Authorization", "Bearer t1"),)
    assert access.valid_seconds is not None
    assert min_seconds <= access.valid_seconds <= max_seconds


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
    assert received == {"type": APPLY_PATCH, "body": '{"word": "\N{GRINNING FACE}"}'}


async def test_a_write_does_not_follow_redirects(tmp_path: Path) -> None:
    async def redirect(request: web.Request) -> web.Response:
        reached.append(request.path)
        raise web.HTTPTemporaryRedirect("/elsewhere")

    reached: list[str] = []
    async with run_http_server(redirect) as server:
        client = await connect(write_kubeconfig(tmp_path, server))
        answer = await client.request("POST", "/x", **REQUEST_OPTIONS)
        await client.close()
    assert (answer.status, reached) == (307, ["/x"])


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
