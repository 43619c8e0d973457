"""Serve the node's HTTPS API, which the API server calls for `kubectl logs` and `kubectl exec`.

Guarantees:
- TLS requires a client certificate of the cluster's authority.
- An unsupported request gets a sentence.
"""

import time
from collections.abc import Callable

from aiohttp import web

from trainium_devcluster.node.api.objects import parse_time
from trainium_devcluster.node.pods import logs
from trainium_devcluster.node.pods.container import Container
from trainium_devcluster.node.pods.pod import PodRunner
from trainium_devcluster.node.server import exec_stream

FindPod = Callable[[str, str], PodRunner | None]


class NodeServer:
    """Defines the routes of the node's API."""

    def __init__(self, find_pod: FindPod) -> None:
        self._find = find_pod
        self.app = web.Application()
        self.app.router.add_get("/healthz", self._serve_healthz)
        self.app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._serve_logs)
        for path in ("/exec/{namespace}/{pod}/{container}", "/exec/{namespace}/{pod}/{uid}/{container}"):
            self.app.router.add_route("*", path, self._serve_exec)
        for name in ("attach", "portForward", "run"):
            self.app.router.add_route("*", f"/{name}/{{tail:.*}}", self._refuse)

    async def _serve_healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _refuse(self, request: web.Request) -> web.Response:
        what = request.path.split("/")[1]
        raise web.HTTPNotImplemented(
            text=f"the process node does not offer {what}; pods listen on loopback addresses of this machine, "
            "so connect to the pod's IP directly, and use `kubectl exec` or `kubectl logs`"
        )

    def _find_container(self, request: web.Request) -> Container:
        info = request.match_info
        runner = self._find(info["namespace"], info["pod"])
        container = None if runner is None else runner.find_container(info["container"])
        if container is None:
            raise web.HTTPNotFound(text=f'container "{info["container"]}" of pod "{info["pod"]}" is not on this node')
        return container

    async def _serve_logs(self, request: web.Request) -> web.StreamResponse:
        container = self._find_container(request)
        previous = request.query.get("previous", "").lower() == "true"
        path = container.log_path(previous=previous)
        if path is None:
            if previous:
                text = (
                    f'previous terminated container "{container.name}" in pod "{request.match_info["pod"]}" not found'
                )
                raise web.HTTPBadRequest(text=text)
            text = f'container "{container.name}" in pod "{request.match_info["pod"]}" is waiting to start'
            raise web.HTTPBadRequest(text=text)
        try:
            query = _parse_query(request)
        except ValueError as error:
            raise web.HTTPBadRequest(text=f"bad log options: {error}") from error
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        async for piece in logs.read(path, query, lambda: not container.running or container.log_path() != path):
            await response.write(piece)
        await response.write_eof()
        return response

    async def _serve_exec(self, request: web.Request) -> web.StreamResponse:
        container = self._find_container(request)
        if request.headers.get("Upgrade", "").lower() != "websocket":
            raise web.HTTPBadRequest(text="exec speaks WebSocket only; use a kubectl and API server of 1.36 or newer")
        argv = request.query.getall("command", [])
        command = container.build_exec_command(argv)
        if not argv or command is None:
            raise web.HTTPBadRequest(text=f"container {container.name} is not running, or no command was given")
        if request.query.get("tty") in {"1", "true"}:
            raise web.HTTPBadRequest(text="the process node has no terminals: leave out --tty")
        assert container.process is not None
        stdin = request.query.get("input", request.query.get("stdin")) in {"1", "true"}
        return await exec_stream.serve(request, container.process.launcher, command, stdin)


def _parse_query(request: web.Request) -> logs.LogOptions:
    query = request.query
    since = None
    if "sinceSeconds" in query:
        since = time.time() - int(query["sinceSeconds"])
    elif "sinceTime" in query:
        since = parse_time(query["sinceTime"])
    return logs.LogOptions(
        follow=query.get("follow", "").lower() == "true",
        timestamps=query.get("timestamps", "").lower() == "true",
        tail=int(query["tailLines"]) if "tailLines" in query else None,
        since=since,
        limit=int(query["limitBytes"]) if "limitBytes" in query else None,
        stream=query.get("stream", "All"),
    )
