from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from trainium_agent.coordinator import connection
from trainium_agent.coordinator.connection import Address, Connector, CoordinatorUnavailableError
from trainium_agent.settings import Endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "coordinator.svc"


class Resolver:
    """Replace the host's resolver."""

    def __init__(self) -> None:
        self.answer: list[str] | None = ["10.0.0.1", "10.0.0.2", "10.0.0.1"]
        """None: there is no such name."""
        self.asked = 0
        self.goes_on = threading.Event()
        self.goes_on.set()

    def __call__(self, host: str, port: int, *, type: int) -> list[tuple[object, ...]]:  # noqa: A002
        assert (host, type) == (NAME, socket.SOCK_STREAM)
        self.asked += 1
        self.goes_on.wait()
        if self.answer is None:
            raise OSError("no such name")
        return [(2, 1, 6, "", (ip, port)) for ip in self.answer]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    found = Resolver()
    monkeypatch.setattr(connection.socket, "getaddrinfo", found)
    yield found
    found.goes_on.set()


@pytest.fixture
def connector() -> Connector:
    return Connector(SimpleNamespace(coordinator=(Endpoint(NAME, 8443),)))


async def test_all_addresses_of_the_coordinators_name_are_used_once(resolver: Resolver, connector: Connector) -> None:
    assert await connector.addresses() == [Address(NAME, "10.0.0.1", 8443), Address(NAME, "10.0.0.2", 8443)]
    assert resolver.asked == 1


async def test_a_name_that_does_not_resolve_is_a_sentence(resolver: Resolver, connector: Connector) -> None:
    resolver.answer = None
    with pytest.raises(CoordinatorUnavailableError, match=r"coordinator\.svc does not resolve"):
        await connector.addresses()


async def test_what_can_be_no_name_is_a_sentence_too() -> None:
    connector = Connector(SimpleNamespace(coordinator=(Endpoint("." * 300, 8443),)))
    with pytest.raises(CoordinatorUnavailableError, match="does not resolve"):
        await connector.addresses()


async def test_a_name_that_no_longer_resolves_has_the_addresses_that_it_had_last(
    resolver: Resolver, connector: Connector
) -> None:
    before = await connector.addresses()
    resolver.answer = None
    assert await connector.addresses() == before
    resolver.answer = ["10.0.0.3"]
    assert [address.ip for address in await connector.addresses()] == ["10.0.0.3"]


async def test_under_a_silent_name_server_the_known_addresses_serve_and_one_lookup_waits(
    resolver: Resolver, connector: Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LOOKUP_SECONDS", 0.01)
    before = await connector.addresses()
    resolver.goes_on.clear()
    resolver.answer = ["10.0.0.3"]
    for _ in range(3):
        assert await connector.addresses() == before
    assert resolver.asked == 2
    monkeypatch.setattr(connection, "LOOKUP_SECONDS", 30)
    resolver.goes_on.set()
    assert [address.ip for address in await connector.addresses()] == ["10.0.0.3"]
    assert resolver.asked == 2
