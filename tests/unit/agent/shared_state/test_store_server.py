"""The store's server on a real port: its operations, waiting clients, invalid requests, and signed values."""

import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.agent.fake_generation_store import build_membership
from trainium_agent.exits.restart_policy import GenerationState
from trainium_agent.rendezvous import GenerationRendezvous
from trainium_agent.shared_state.server import MAX_FRAME_BYTES, Answer, StoreClient, StoreServer, encode_frame
from trainium_agent.shared_state.state_watcher import StateWatcher
from trainium_agent.shared_state.store import (
    MAX_VALUE_CHARACTERS,
    ForgedValueError,
    GenerationStore,
    StoreLostError,
    ValueSigner,
)
from trainium_agent.workload.rank_port import reserve_port
from trainium_contract.exit_codes import ExitCode
from trainium_contract.wire.messages import Membership


@pytest.fixture
def server() -> Iterator[StoreServer]:
    served = StoreServer("127.0.0.1")
    yield served
    served.close()


def send_request(server: StoreServer, *request: str | float) -> Answer:
    client = StoreClient(socket.create_connection(("127.0.0.1", server.port), timeout=5))
    try:
        return client.send(request, lambda: 5.0)
    finally:
        client.close()


def test_each_operation_returns_the_content_of_the_store(server: StoreServer) -> None:
    assert send_request(server, "has", "a") is False
    assert send_request(server, "set", "a", "1") is None
    assert send_request(server, "has", "a") is True
    assert send_request(server, "has", "a", "b") is False
    assert send_request(server, "get", "a", 1.0) == "1"
    assert send_request(server, "add", "n", 0) == 0
    assert send_request(server, "has", "n") is False
    assert send_request(server, "add", "n", 2) == 2
    assert send_request(server, "add", "n", 0) == 2
    assert send_request(server, "delete", "a") is True
    assert send_request(server, "delete", "a") is False


def test_a_swap_succeeds_only_on_the_expected_value(server: StoreServer) -> None:
    assert send_request(server, "swap", "state", "", "one") == "one"
    assert send_request(server, "swap", "state", "", "two") == "one"
    assert send_request(server, "swap", "state", "one", "two") == "two"
    assert send_request(server, "swap", "gone", "one", "two") == "one"
    assert send_request(server, "has", "gone") is False


def test_waiting_clients_receive_a_key_once_it_is_set(server: StoreServer) -> None:
    replies: list[Answer] = []
    waiting = [
        threading.Thread(target=lambda: replies.append(send_request(server, "get", "late", 4.0))) for _ in range(8)
    ]
    for thread in waiting:
        thread.start()
    time.sleep(0.1)
    send_request(server, "set", "late", "here")
    for thread in waiting:
        thread.join(20)
    assert replies == ["here"] * 8


def test_a_request_for_a_missing_key_times_out_with_none(server: StoreServer) -> None:
    assert send_request(server, "get", "never", 0.05) is None
    assert server._waiting == {}


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">I", MAX_FRAME_BYTES + 1),
        struct.pack(">I", 4) + b"nope",
        encode_frame(["shutdown", "key"]),
        encode_frame(["set", "key", 1]),
        encode_frame(["add", "key", "x"]),
        encode_frame("text"),
        encode_frame({"a": 1}),
        struct.pack(">I", 100) + b"cut",
        b"",
    ],
)
def test_an_invalid_request_closes_only_its_own_connection(server: StoreServer, sent: bytes) -> None:
    other = StoreClient(socket.create_connection(("127.0.0.1", server.port), timeout=5))
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as stranger:
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(1) == b""
    assert other.send(("set", "key", "value"), lambda: 5.0) is None
    assert other.send(("get", "key", 1.0), lambda: 5.0) == "value"
    other.close()


def test_a_request_to_a_silent_server_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = StoreClient(socket.create_connection(("127.0.0.1", silent.getsockname()[1]), timeout=5))
        started_at = time.monotonic()
        with pytest.raises(TimeoutError):
            client.send(("has", "key"), lambda: started_at + 0.3 - time.monotonic())
        client.close()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match="assign"):
        StoreServer("192.0.2.1")


class UnsignedClient:
    """A client of the store's protocol that cannot sign values."""

    def __init__(self, server: StoreServer) -> None:
        self._client = StoreClient(socket.create_connection(("127.0.0.1", server.port), timeout=5))

    def get(self, key: str) -> str:
        return str(self._client.send(("get", key, 1.0), lambda: 5.0))

    def set(self, key: str, value: str) -> None:
        self._client.send(("set", key, value), lambda: 5.0)


def connect_store(membership: Membership) -> GenerationStore:
    store = GenerationStore(membership)
    store.connect()
    return store


def test_agents_of_a_generation_share_values_state_and_counters(server: StoreServer) -> None:
    first, second = (connect_store(build_membership(server.port)) for _ in range(2))
    first.create_state(GenerationState())
    first.set(first.format_key(0, "port"), "29500")
    assert second.get(second.format_key(0, "port")) == "29500"
    after = second.update_state(lambda state: GenerationState(attempt=state.attempt + 1))
    assert after.attempt == first.read_state().attempt == 1
    assert first.update_state(lambda state: state).attempt == 1
    assert first.count(first.format_key("left"), 2) == 2


def test_an_unsigned_state_is_rejected_and_logged_once(server: StoreServer, caplog: pytest.LogCaptureFixture) -> None:
    membership = build_membership(server.port)
    store = connect_store(membership)
    store.create_state(GenerationState())
    signed = UnsignedClient(server).get(store.format_key("state"))
    stopped = GenerationState(attempt=5, stopped=int(ExitCode.USER_ERROR)).encode()
    for forged in (stopped, "x" * 32 + stopped, "", "\xff" * 40, signed[:-1], "["):
        UnsignedClient(server).set(store.format_key("state"), forged)
        for read in (store.read_state, lambda: store.update_state(lambda state: state)):
            store.connect()
            with pytest.raises(StoreLostError, match="was not written by an agent of this generation"):
                read()
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1
    UnsignedClient(server).set(store.format_key("state"), signed)
    assert store.read_state() == GenerationState()


def test_a_signature_is_valid_for_one_key_and_generation(server: StoreServer) -> None:
    store = connect_store(build_membership(server.port))
    store.set(store.format_key(0, "port"), "29500")
    signed = UnsignedClient(server).get(store.format_key(0, "port"))
    UnsignedClient(server).set(store.format_key(1, "port"), signed)
    with pytest.raises(StoreLostError):
        store.get(store.format_key(1, "port"))
    next_signer = ValueSigner(build_membership(generation=2))
    with pytest.raises(ForgedValueError):
        next_signer.verify(store.format_key(0, "port"), signed)
    with pytest.raises(ForgedValueError):
        ValueSigner(build_membership(uid="other")).verify(store.format_key(0, "port"), signed)


def test_a_value_above_the_longest_length_is_rejected() -> None:
    with pytest.raises(ForgedValueError, match="longer than anything"):
        ValueSigner(build_membership()).verify("state", "x" * (MAX_VALUE_CHARACTERS + 1))


@given(
    name=st.text(max_size=40),
    value=st.text(max_size=200),
    position=st.integers(0, 250),
    replacement=st.characters(codec="utf-8"),
)
def test_any_change_of_a_signed_value_is_detected(name: str, value: str, position: int, replacement: str) -> None:
    signer = ValueSigner(build_membership())
    signed = signer.sign(name, value)
    assert signer.verify(name, signed) == value
    position %= len(signed)
    changed = signed[:position] + replacement + signed[position + 1 :]
    if changed != signed:
        with pytest.raises(ForgedValueError):
            signer.verify(name, changed)


NODES = 100


class HasCountingStore(GenerationStore):
    """A store that counts its `has` requests."""

    requests = 0

    def has(self, *keys: str) -> bool:
        self.requests += 1
        return super().has(*keys)


def test_the_first_node_checks_all_others_in_one_request_and_names_the_missing() -> None:
    server = StoreServer("127.0.0.1")
    membership = build_membership(server.port, nodes=NODES)
    is_named = threading.Event()
    missing: list[tuple[int, ...]] = []

    def record_missing(ranks: tuple[int, ...]) -> None:
        missing.append(ranks)
        if ranks == tuple(range(1, 65)):
            is_named.set()

    handler = GenerationRendezvous(
        membership,
        0,
        initial=GenerationState(),
        waiting_for=record_missing,
        watcher=StateWatcher(membership, lambda _: None, lambda: None),
        reserve_port=reserve_port,
        pair_rounds={},
    )
    store = handler.store = HasCountingStore(membership)
    thread = threading.Thread(target=handler.join_next, daemon=True)
    others = GenerationStore(membership)
    others.connect()
    thread.start()
    assert is_named.wait(30), missing
    requests = store.requests
    # Two requests per check, until missing ranks are named: then one request for each of 64, once.
    assert requests < 2 * NODES, requests
    for rank in range(1, NODES):
        others.set(others.format_key(0, "joined", rank))
    thread.join(30)
    assert not thread.is_alive()
    assert missing[-1] == ()
    assert others.has(others.format_key(0, "go"))
    publisher = handler._publisher
    assert publisher is not None
    handler.shutdown()
    publisher._thread.join(10)
    others.close()
    server.close()
