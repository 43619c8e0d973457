"""The floor of the coordinator: the same HTTP server with the same TLS, which answers agents and does nothing else.

A process of its own, as the operator is. It takes its options as JSON (`host`, `port`, `certificate`, `key`: paths),
says `ready` on standard output when it listens, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys

from aiohttp import web

from trainium_contract.wire.messages import (
    HEARTBEAT_PATH,
    MEMBERSHIP_PATH,
    REGISTER_PATH,
    HeartbeatResponse,
    RegisterResponse,
)
from trainium_operator.memory import settle, use_little_memory_per_connection

_WELCOME = RegisterResponse(heartbeat_seconds=1.0).model_dump_json(by_alias=True).encode()
_HEARD = HeartbeatResponse(generation=0).model_dump_json(by_alias=True).encode()


async def _answer(request: web.Request, body: bytes) -> web.Response:
    await request.read()
    return web.Response(body=body, content_type="application/json")


async def _register(request: web.Request) -> web.Response:
    return await _answer(request, _WELCOME)


async def _heartbeat(request: web.Request) -> web.Response:
    return await _answer(request, _HEARD)


async def _membership(request: web.Request) -> web.Response:
    await asyncio.sleep(float(request.query["timeoutSeconds"]))
    return web.Response(status=204)


async def _serve(options: dict[str, str]) -> None:
    use_little_memory_per_connection()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(options["certificate"], options["key"])
    app = web.Application()
    app.router.add_post(REGISTER_PATH, _register)
    app.router.add_post(HEARTBEAT_PATH, _heartbeat)
    app.router.add_get(MEMBERSHIP_PATH, _membership)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
    await runner.setup()
    await web.TCPSite(runner, options["host"], int(options["port"]), ssl_context=context, backlog=1024).start()
    settle()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(_serve(json.loads(sys.argv[1])))
