"""Stored objects that usual JSON parsers reject do not affect other objects.

The API server of Kubernetes 1.36 takes a claim of a device whose parameters are nested 1,100 levels deep, or hold half
of a surrogate pair, and a job whose template is nested 9,000 levels deep, and gives them back as they are.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from kubernetes.client import Configuration

from tests.testing.api.http_api_server import discovery_response, run_http_server
from tests.testing.suite.virtual_time import in_virtual_time
from trainium_contract.api_server.aio import HttpClient
from trainium_contract.api_server.errors import ApiError, UnavailableError
from trainium_contract.api_server.kubeconfig import Access
from trainium_contract.api_server.responses import MAX_REFUSAL_CHARACTERS
from trainium_operator import handlers
from trainium_operator.cluster.api.client import Api
from trainium_operator.cluster.api.resources import CLAIMS
from trainium_operator.cluster.api.transport import HttpResponse, ResponseStream
from trainium_operator.cluster.cache.device_views import ClaimView, parse_claim
from trainium_operator.cluster.cache.reflector import Reflector
from trainium_operator.cluster.cache.store import IndexedCache

DEEP = '{"a":' * 9_000 + "1" + "}" * 9_000
HALF = '{"a":"\\ud800"}'


def claim(name: str, version: int, parameters: str) -> str:
    metadata = f'{{"name":"{name}","namespace":"team","uid":"{name}","resourceVersion":"{version}"}}'
    return f'{{"metadata":{metadata},"spec":{{"devices":{{"config":[{{"opaque":{{"parameters":{parameters}}}}}]}}}}}}'


class ClaimServer:
    """An API server with these claims; then `events` come, line by line, in each new watch."""

    def __init__(self, stored: list[str], events: list[str]) -> None:
        self.page = f'{{"metadata":{{"resourceVersion":"7"}},"items":[{",".join(stored)}]}}'
        self.lists = 0
        self._events = events

    async def request(self, _method: str, _path: str, **_how: Any) -> HttpResponse:
        self.lists += 1
        return HttpResponse(200, {}, self.page.encode())

    @contextlib.asynccontextmanager
    async def stream(self, _path: str, **_how: Any) -> AsyncIterator[ResponseStream]:
        yield ResponseStream(200, self._lines())

    async def _lines(self) -> AsyncIterator[bytes]:
        for event in self._events:
            yield event.encode()
        await asyncio.sleep(60)


@contextlib.asynccontextmanager
async def cached_claims(server: ClaimServer) -> AsyncIterator[IndexedCache[ClaimView]]:
    reflector = Reflector(Api(server, jitter=lambda: 0.5), CLAIMS, parse_claim, jitter=lambda: 0.5)
    keeping = asyncio.create_task(reflector.run())
    await asyncio.sleep(30)
    assert not keeping.done(), "it never ends"
    yield reflector.store
    keeping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await keeping


@pytest.mark.parametrize("parameters", [DEEP, HALF])
@in_virtual_time
async def test_an_unparsable_claim_does_not_hide_others(parameters: str) -> None:
    added = f'{{"type":"ADDED","object":{claim("third", 8, parameters)}}}'
    after = f'{{"type":"ADDED","object":{claim("fourth", 9, "{}")}}}'
    async with cached_claims(
        ClaimServer([claim("first", 1, parameters), claim("second", 2, "{}")], [added, after])
    ) as store:
        assert sorted(name for _, name in store.snapshot()) == ["first", "fourth", "second", "third"]


@pytest.mark.parametrize(
    "line",
    ["<html>", "[]", "{}", '{"type":"ADDED"}', '{"type":7,"object":{}}', '{"type":"ADDED","object":{"metadata":{}}}'],
)
@in_virtual_time
async def test_a_watch_with_invalid_lines_is_restarted(line: str, caplog: pytest.LogCaptureFixture) -> None:
    server = ClaimServer([claim("first", 1, "{}")], [line])
    async with cached_claims(server) as store:
        assert len(store) == 1
    assert caplog.records


@pytest.mark.parametrize("page", ["<html>", "[]", "{}", '{"metadata":{},"items":[{}]}', '{"metadata":[],"items":7}'])
@in_virtual_time
async def test_a_malformed_list_is_an_outage(page: str) -> None:
    server = ClaimServer([], [])
    server.page = page
    reflector: Reflector[ClaimView] = Reflector(Api(server), CLAIMS, parse_claim)
    with pytest.raises(UnavailableError):
        await reflector.refresh()


@in_virtual_time
async def test_a_refusal_message_is_truncated() -> None:
    class Refusing(ClaimServer):
        async def request(self, _method: str, _path: str, **_how: Any) -> HttpResponse:
            return HttpResponse(403, {}, json.dumps({"reason": ["x"], "message": "no " * 1_000_000}).encode())

    with pytest.raises(ApiError) as caught:
        await Api(Refusing([], [])).get(CLAIMS, "team", "first")
    assert len(str(caught.value)) == MAX_REFUSAL_CHARACTERS


def build_job_json(name: str, version: int, template: str) -> str:
    metadata = f'{{"name":"{name}","namespace":"team","uid":"{name}","resourceVersion":"{version}"}}'
    return f'{{"kind":"TrainingJob","metadata":{metadata},"spec":{{"workers":{{"template":{template}}}}}}}'


async def test_a_deeply_nested_job_does_not_stop_kopf() -> None:
    seen: dict[str, Any] = {}
    all_seen, stop = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        found = discovery_response(request.path)
        if found is not None:
            return web.json_response(found)
        if request.query.get("watch") != "true":
            items = f"{build_job_json('first', 1, DEEP)},{build_job_json('second', 2, '{}')}"
            page = f'{{"metadata":{{"resourceVersion":"7"}},"items":[{items}]}}'
            return web.Response(text=page, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for raw in (build_job_json("third", 8, DEEP), build_job_json("fourth", 9, "{}")):
            await response.write(f'{{"type":"ADDED","object":{raw}}}\n'.encode())
        await stop.wait()
        return response

    def observe(raw: dict[str, Any], _deleted: bool) -> None:
        seen[raw["metadata"]["name"]] = raw
        if seen.keys() == {"first", "second", "third", "fourth"}:
            all_seen.set()

    async with run_http_server(answer) as url:
        configuration = Configuration(url, api_key={"BearerToken": "Bearer a-token"})
        client = HttpClient(Access(configuration, "system"), user_agent="test")
        registry = handlers.make_registry(observe=observe, client=client)
        running = asyncio.create_task(handlers.run_kopf(registry, stop=stop, ready=asyncio.Event()))
        waiting = asyncio.create_task(all_seen.wait())
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        assert all_seen.is_set(), "kopf ended by itself"
        json.dumps(seen["first"])
        stop.set()
        await running
        await client.close()
