"""The fake API server over real HTTP, with the discovery that kopf asks for, and a kubeconfig for it."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from tests.testing.api.fake_api_server import FakeApiServer
from tests.testing.suite.timeouts import scaled
from trainium_operator.cluster.api.resources import ALL

VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


@asynccontextmanager
async def run_http_server(answer: Callable[[web.Request], Any]) -> AsyncIterator[str]:
    """Answer all requests on loopback; yield the URL of the server."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=scaled(0.1))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class HttpApiServer:
    """A server on loopback between `start` and `stop`."""

    def __init__(self, cluster: FakeApiServer) -> None:
        self.cluster = cluster
        self.url = ""
        self._running = AsyncExitStack()

    async def start(self) -> None:
        self.url = await self._running.enter_async_context(run_http_server(self._answer))

    async def stop(self) -> None:
        await self._running.aclose()

    def kubeconfig(self, folder: Path) -> Path:
        path = folder / "kubeconfig"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake", "namespace": "system"}}],
            "users": [{"name": "fake", "user": {"token": "a-token"}}],
        }
        path.write_text(yaml.safe_dump(content))
        return path

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        discovery = discovery_response(request.path)
        if discovery is not None:
            return web.json_response(discovery)
        if request.query.get("watch") == "true":
            return await self._stream(request)
        text = await request.text()
        answer = await self.cluster.request(
            request.method,
            request.path,
            query=request.query,
            body=json.loads(text) if text else None,
            content_type=request.content_type,
            timeout=scaled(30),
        )
        return web.Response(status=answer.status, body=answer.body, content_type="application/json")

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        query = {"timeoutSeconds": "300", **request.query}
        async with self.cluster.stream(request.path, query=query, silence=300) as stream:
            await response.prepare(request)
            async for line in stream.lines:
                await response.write(line)
        return response


def discovery_response(path: str) -> dict[str, Any] | None:
    """Return the response about groups and kinds, or None for any other path."""
    groups = sorted({resource.group for resource in ALL if resource.group} | {"apiextensions.k8s.io"})
    versions = {resource.group: resource.version for resource in ALL} | {"apiextensions.k8s.io": "v1"}
    if path == "/api":
        return {"versions": ["v1"]}
    if path == "/apis":
        return {"groups": [_api_group(name, versions[name]) for name in groups]}
    for group in groups:
        if path == f"/apis/{group}":
            return _api_group(group, versions[group])
    for group in ("", *groups):
        if path == (f"/apis/{group}/{versions[group]}" if group else "/api/v1"):
            resources = [
                _api_resource(resource.plural, resource.kind, namespaced=resource.namespaced)
                for resource in ALL
                if resource.group == group
            ]
            extra = {"": "namespaces", "apiextensions.k8s.io": "customresourcedefinitions"}.get(group)
            if extra:
                resources.append(_api_resource(extra, extra, namespaced=False))
            return {"resources": resources}
    return None


def _api_resource(plural: str, kind: str, *, namespaced: bool) -> dict[str, Any]:
    return {"name": plural, "singularName": "", "kind": kind, "namespaced": namespaced, "verbs": VERBS}


def _api_group(name: str, version: str) -> dict[str, Any]:
    entry = {"groupVersion": f"{name}/{version}", "version": version}
    return {"name": name, "versions": [entry], "preferredVersion": entry}
