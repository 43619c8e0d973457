"""The rendezvous of many agents: what node 0 asks the store while it waits for the others."""

from __future__ import annotations

import threading

from trainium_agent.exits.restart_policy import GenerationState
from trainium_agent.generation.server import StoreServer
from trainium_agent.generation.state_watcher import StateWatcher
from trainium_agent.generation.store import GenerationStore
from trainium_agent.rendezvous import GenerationRendezvous
from trainium_agent.workload.program import ReservedPort
from trainium_contract.faults.causes import Cause
from trainium_contract.wire.messages import Member, Membership, Transition

NODES = 100


def membership_at(port: int) -> Membership:
    members = tuple(
        Member(
            pod_uid=f"uid-{rank}",
            pod_name=f"job-worker-{rank}",
            pod_ip="127.0.0.1",
            node_name=f"node-{rank}",
            node_rank=rank,
            rendezvous_port=port,
        )
        for rank in range(NODES)
    )
    return Membership(
        generation=1, transition=Transition.IMMEDIATE, cause=Cause.RESIZE, members=members, processes_per_node=1
    )


class CountingStore(GenerationStore):
    """Counts its questions whether something is there."""

    asked = 0

    def has(self, *keys: str) -> bool:
        self.asked += 1
        return super().has(*keys)


def test_the_first_node_asks_for_all_others_at_once_and_names_who_is_missing() -> None:
    server = StoreServer("127.0.0.1")
    membership = membership_at(server.port)
    listed = threading.Event()
    missing: list[tuple[int, ...]] = []

    def waiting_for(ranks: tuple[int, ...]) -> None:
        missing.append(ranks)
        if ranks == tuple(range(1, 65)):
            listed.set()

    handler = GenerationRendezvous(
        membership,
        0,
        initial=GenerationState(),
        interrupted=lambda: False,
        waiting_for=waiting_for,
        watcher=StateWatcher(membership, lambda _: None, lambda: None),
        reserve_port=ReservedPort,
    )
    store = handler.store = CountingStore(membership)
    joined = threading.Thread(target=handler.next_rendezvous, daemon=True)
    others = GenerationStore(membership)
    others.connect()
    joined.start()
    assert listed.wait(30), missing
    asked = store.asked
    # Two questions a look until it is time to name them, then one for each of 64: never each of them at each look.
    assert asked < 2 * NODES, asked
    for rank in range(1, NODES):
        others.set(others.key(0, "joined", rank))
    joined.join(30)
    assert not joined.is_alive()
    assert missing[-1] == ()
    assert others.has(others.key(0, "go"))
    caller = handler._caller
    assert caller is not None
    handler.shutdown()
    caller._thread.join(10)
    others.close()
    server.close()
