from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Never

import pytest

from trainium_trainer.agent.coordinator.requests import Address, Coordinator, CoordinatorUnavailableError
from trainium_trainer.agent.settings import Endpoint


async def test_all_addresses_of_the_coordinators_name_are_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(host: str, port: int, *, type: int) -> list[tuple[object, ...]]:  # noqa: A002
        return [(2, 1, 6, "", (ip, port)) for ip in ("10.0.0.1", "10.0.0.2", "10.0.0.1")]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    coordinator = Coordinator(SimpleNamespace(coordinator=(Endpoint("coordinator.svc", 8443),)))
    assert await coordinator.addresses() == [
        Address("coordinator.svc", "10.0.0.1", 8443),
        Address("coordinator.svc", "10.0.0.2", 8443),
    ]


async def test_a_name_that_does_not_resolve_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(host: str, port: int, *, type: int) -> Never:  # noqa: A002
        raise OSError("no such name")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    with pytest.raises(CoordinatorUnavailableError, match=r"coordinator\.svc does not resolve"):
        await Coordinator(SimpleNamespace(coordinator=(Endpoint("coordinator.svc", 8443),))).addresses()


def test_an_ipv6_address_is_bracketed() -> None:
    assert Address("name", "fd00::1", 8443).url("/v1/register") == "https://[fd00::1]:8443/v1/register"
