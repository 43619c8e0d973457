"""The agents' store on a real server: what somebody else writes there is refused before it is read."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainium_agent.exits.restart_policy import GenerationState
from trainium_agent.generation.server import StoreClient, StoreServer
from trainium_agent.generation.store import (
    LONGEST_VALUE,
    ForgedValueError,
    GenerationStore,
    StoreLostError,
    ValueSigner,
)
from trainium_contract.exit_codes import ExitCode
from trainium_contract.faults.causes import Cause
from trainium_contract.wire.messages import Member, Membership, Transition

if TYPE_CHECKING:
    from collections.abc import Iterator


def membership_at(port: int = 1, *, generation: int = 1, uid: str = "uid") -> Membership:
    members = tuple(
        Member(
            pod_uid=f"{uid}-{rank}",
            pod_name=f"job-w-{rank}",
            pod_ip="127.0.0.1",
            node_name=f"node-{rank}",
            node_rank=rank,
            rendezvous_port=port,
        )
        for rank in range(2)
    )
    return Membership(
        generation=generation,
        transition=Transition.IMMEDIATE,
        cause=Cause.RESIZE,
        members=members,
        processes_per_node=1,
    )


@pytest.fixture
def server() -> Iterator[StoreServer]:
    served = StoreServer("127.0.0.1")
    yield served
    served.close()


class Stranger:
    """Somebody who reaches the port and knows how the store is used."""

    def __init__(self, server: StoreServer) -> None:
        self._client = StoreClient(socket.create_connection(("127.0.0.1", server.port), timeout=5))

    def get(self, key: str) -> str:
        return str(self._client.ask(("get", key, 1.0), lambda: 5.0))

    def set(self, key: str, value: str) -> None:
        self._client.ask(("set", key, value), lambda: 5.0)


def connected(membership: Membership) -> GenerationStore:
    store = GenerationStore(membership)
    store.connect()
    return store


def test_agents_of_a_generation_understand_each_other(server: StoreServer) -> None:
    one, two = (connected(membership_at(server.port)) for _ in range(2))
    one.begin(GenerationState())
    one.set(one.key(0, "port"), "29500")
    assert two.get(two.key(0, "port")) == "29500"
    after = two.change(lambda state: GenerationState(attempt=state.attempt + 1))
    assert after.attempt == one.state().attempt == 1
    assert one.change(lambda state: state).attempt == 1
    assert one.count(one.key("left"), 2) == 2


def test_a_stop_that_a_stranger_writes_is_refused_and_told_once(
    server: StoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    membership = membership_at(server.port)
    ours = connected(membership)
    ours.begin(GenerationState())
    sealed = Stranger(server).get(ours.key("state"))
    stopped = GenerationState(attempt=5, stopped=int(ExitCode.USER_ERROR)).encode()
    for forged in (stopped, "x" * 32 + stopped, "", "\xff" * 40, sealed[:-1], "["):
        Stranger(server).set(ours.key("state"), forged)
        for ask in (ours.state, lambda: ours.change(lambda state: state)):
            if not ours.connected:
                ours.connect()
            with pytest.raises(StoreLostError, match="was not written by an agent of this generation"):
                ask()
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1
    Stranger(server).set(ours.key("state"), sealed)
    assert ours.state() == GenerationState()


def test_a_sealed_value_counts_for_its_own_name_and_generation_only(server: StoreServer) -> None:
    ours = connected(membership_at(server.port))
    ours.set(ours.key(0, "port"), "29500")
    sealed = Stranger(server).get(ours.key(0, "port"))
    Stranger(server).set(ours.key(1, "port"), sealed)
    with pytest.raises(StoreLostError):
        ours.get(ours.key(1, "port"))
    next_one = ValueSigner(membership_at(generation=2))
    with pytest.raises(ForgedValueError):
        next_one.verify(ours.key(0, "port"), sealed)
    with pytest.raises(ForgedValueError):
        ValueSigner(membership_at(uid="other")).verify(ours.key(0, "port"), sealed)


def test_a_value_beyond_all_bounds_is_not_read() -> None:
    with pytest.raises(ForgedValueError, match="longer than anything"):
        ValueSigner(membership_at()).verify("state", "x" * (LONGEST_VALUE + 1))


@given(name=st.text(max_size=40), value=st.text(max_size=200), at=st.integers(0, 250), to=st.characters(codec="utf-8"))
def test_any_change_of_a_sealed_value_is_noticed(name: str, value: str, at: int, to: str) -> None:
    seal = ValueSigner(membership_at())
    sealed = seal.sign(name, value)
    assert seal.verify(name, sealed) == value
    at %= len(sealed)
    changed = sealed[:at] + to + sealed[at + 1 :]
    if changed != sealed:
        with pytest.raises(ForgedValueError):
            seal.verify(name, changed)
