"""The store's server on a real port: what each operation answers, who waits, and bytes that no agent sends."""

from __future__ import annotations

import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

import pytest

from trainium_agent.generation.server import LONGEST_FRAME, StoreClient, StoreServer, frame

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_agent.generation.server import Answer


@pytest.fixture
def server() -> Iterator[StoreServer]:
    served = StoreServer("127.0.0.1")
    yield served
    served.close()


def ask(server: StoreServer, *request: str | float) -> Answer:
    client = StoreClient(socket.create_connection(("127.0.0.1", server.port), timeout=5))
    try:
        return client.ask(request, lambda: 5.0)
    finally:
        client.close()


def test_each_operation_answers_what_the_store_holds(server: StoreServer) -> None:
    assert ask(server, "has", "a") is False
    assert ask(server, "set", "a", "1") is None
    assert ask(server, "has", "a") is True
    assert ask(server, "has", "a", "b") is False
    assert ask(server, "get", "a", 1.0) == "1"
    assert ask(server, "add", "n", 0) == 0
    assert ask(server, "has", "n") is False
    assert ask(server, "add", "n", 2) == 2
    assert ask(server, "add", "n", 0) == 2
    assert ask(server, "delete", "a") is True
    assert ask(server, "delete", "a") is False


def test_a_swap_succeeds_only_on_the_value_that_was_seen(server: StoreServer) -> None:
    assert ask(server, "swap", "state", "", "one") == "one"
    assert ask(server, "swap", "state", "", "two") == "one"
    assert ask(server, "swap", "state", "one", "two") == "two"
    assert ask(server, "swap", "gone", "one", "two") == "one"
    assert ask(server, "has", "gone") is False


def test_who_waits_for_a_key_gets_it_when_it_is_set(server: StoreServer) -> None:
    found: list[Answer] = []
    waiting = [threading.Thread(target=lambda: found.append(ask(server, "get", "late", 4.0))) for _ in range(8)]
    for thread in waiting:
        thread.start()
    time.sleep(0.1)
    began = time.monotonic()
    ask(server, "set", "late", "here")
    for thread in waiting:
        thread.join(5)
    assert found == ["here"] * 8
    assert time.monotonic() - began < 2


def test_a_key_that_does_not_come_is_answered_with_none_and_nobody_is_remembered(server: StoreServer) -> None:
    assert ask(server, "get", "never", 0.05) is None
    assert server._waiting == {}


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">I", LONGEST_FRAME + 1),
        struct.pack(">I", 4) + b"nope",
        frame(["shutdown", "key"]),
        frame(["set", "key", 1]),
        frame(["add", "key", "x"]),
        frame("text"),
        frame({"a": 1}),
        struct.pack(">I", 100) + b"cut",
        b"",
    ],
)
def test_what_no_agent_sends_closes_its_own_connection_only(server: StoreServer, sent: bytes) -> None:
    other = StoreClient(socket.create_connection(("127.0.0.1", server.port), timeout=5))
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as stranger:
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(1) == b""
    assert other.ask(("set", "key", "value"), lambda: 5.0) is None
    assert other.ask(("get", "key", 1.0), lambda: 5.0) == "value"
    other.close()


def test_a_server_that_answers_nothing_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        client = StoreClient(socket.create_connection(("127.0.0.1", deaf.getsockname()[1]), timeout=5))
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            client.ask(("has", "key"), lambda: began + 0.3 - time.monotonic())
        assert time.monotonic() - began < 2
        client.close()


def test_an_address_that_is_not_here_is_refused() -> None:
    with pytest.raises(OSError, match="assign"):
        StoreServer("192.0.2.1")
