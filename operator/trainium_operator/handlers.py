"""Watch TrainingJobs with kopf, which discovers the resource and writes nothing.

Guarantees:
- Only `on.event` is used, which needs no finalizer, annotation or status of kopf; handlers return nothing.
- kopf's own events are off, and it uses the operator's credentials.
- No stored object is too deep for kopf's client; all others are passed on byte for byte.
- A list that kopf repeats does not report deleted jobs, so the operator lists the jobs periodically too.
"""

from __future__ import annotations

import itertools
import logging
import random
from typing import TYPE_CHECKING, Any, cast

import aiohttp
import kopf
import urllib3
from multidict import CIMultiDict
from pydantic_core import from_json

from trainium_contract.stored_json import read_json, remove_deep_parts
from trainium_contract.wire.worker_env import GROUP, PLURAL, VERSION
from trainium_operator.backoff import compute_backoff

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping

    from aiohttp.connector import Connection

    from trainium_operator.cluster.api.transport import HttpClient

WATCH_SECONDS = 240
# Left to itself kopf asks for the user's name, and the user id of a container need not have one. Only kopf's peering,
# which is off, would publish it. (Any: kopf does not export the type of it.)
_IDENTITY: Any = "trainium-operator"


class _Backoffs:
    """Delays between retries, without end: kopf would stop the operator after the last one."""

    def __iter__(self) -> Iterator[float]:
        for attempt in itertools.count(1):
            yield compute_backoff(0.2, 15.0, attempt) * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load


class _NoDiffStorage(kopf.AnnotationsDiffBaseStorage):
    """Compares nothing: kopf would copy each job several times at each event, and no handler needs the difference."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        """See kopf.DiffBaseStorage."""
        del body, extra_fields
        return kopf.BodyEssence()


class StoredJsonResponse(aiohttp.ClientResponse):
    """A response that parses objects of any depth; set it as the `response_class` of the client's session."""

    async def json(self, **_how: Any) -> Any:
        """See aiohttp.ClientResponse. Raises ValueError."""
        return read_json(await self.read())

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        """See aiohttp.ClientResponse."""
        started = await super().start(connection)
        if self.url.query.get("watch"):
            self.content = cast("aiohttp.StreamReader", _Lines(self.content))
        return started


class _Lines:
    """The events of a watch, one per line."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """Yield whole lines; see aiohttp.StreamReader."""
        held = b""
        async for data in self._content.iter_chunked(size):
            lines, end, held = (held + data).rpartition(b"\n")
            if end:
                yield b"\n".join(_decode_line(line) for line in lines.split(b"\n")) + end
        if held:
            yield _decode_line(held)


def _decode_line(line: bytes) -> bytes:
    try:
        from_json(line)
    except ValueError:
        return remove_deep_parts(line).decode("utf-8", "replace").encode()
    return line


def make_registry(
    *,
    observe: Callable[[dict[str, Any], bool], None],
    client: HttpClient,
) -> kopf.OperatorRegistry:
    """Create the handlers of one operator; `observe(body, deleted)` receives every TrainingJob that kopf receives."""
    registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=registry)
    async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        apply_settings(settings)

    known: list[tuple[Mapping[str, str], kopf.AiohttpSession]] = []

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        headers = await client.build_headers()
        if not known or known[0][0] != headers:
            known[:] = [(headers, _build_session(client, headers))]
        return known[0][1]  # the same refused credentials: kopf then has no others to try

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def job_changed(event: kopf.RawEvent, **_: Any) -> None:
        observe(dict(event["object"]), event["type"] == "DELETED")

    return registry


def _build_session(client: HttpClient, headers: Mapping[str, str]) -> kopf.AiohttpSession:
    """Create kopf's connections, which read objects of any depth; kopf closes them."""
    access = client.access
    login = urllib3.make_headers(proxy_basic_auth=access.proxy.login) if access.proxy.login else {}

    async def authorize(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        # aiohttp sends headers of the session to a proxy too, which must not receive the token.
        request.headers.update(headers)
        if login:
            request.proxy_headers = CIMultiDict(login)
        return await handler(request)

    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=client.tls),
        middlewares=(authorize,),
        proxy=access.proxy.url or None,
        response_class=StoredJsonResponse,
        trust_env=False,
    )
    return kopf.AiohttpSession(server=access.server, default_namespace=access.namespace, aiohttp_session=session)


def apply_settings(settings: kopf.OperatorSettings) -> None:
    """Set kopf's settings; docs and this module's docstring have the reasons."""
    settings.posting.enabled = False
    settings.posting.loggers = False
    settings.scanning.disabled = True  # then no right to list CRDs and namespaces is needed
    settings.peering.standalone = True  # the Lease decides who acts
    # kopf passes the number on as it is, and the API server accepts only integers.
    settings.watching.server_timeout = int(WATCH_SECONDS * random.uniform(1.0, 1.25))  # noqa: S311 - spreads load
    settings.watching.client_timeout = settings.watching.server_timeout + 30
    settings.watching.connect_timeout = 10
    settings.watching.chunk_size = 500
    settings.networking.request_timeout = 30
    settings.networking.error_backoffs = _Backoffs()
    settings.networking.enforce_retry_after = True
    settings.process.ultimate_exiting_timeout = 20
    settings.persistence.diffbase_storage = _NoDiffStorage()


async def run_kopf(registry: kopf.OperatorRegistry, *, stop: asyncio.Event, ready: asyncio.Event) -> None:
    """Watch all namespaces until `stop`. Create every other long-lived task first."""
    logging.getLogger("kopf").setLevel(logging.WARNING)
    await kopf.operator(
        registry=registry,
        identity=_IDENTITY,
        standalone=True,
        clusterwide=True,
        stop_flag=stop,
        ready_flag=ready,
    )
