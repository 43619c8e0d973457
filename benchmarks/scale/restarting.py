"""A restart in place among the agents of many nodes, a new membership, and heartbeats.

Real: every agent is a process with the rendezvous and the watcher that it has in a pod; they meet in a real store; the
coordinator's state and its messages. Simulated: the ranks (none is started), TLS and HTTP of the coordinator
(`benchmarks/fleets/coordinator.py` has both, for 1,000).
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import threading
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.scale.book import MIBIBYTE, Book
from benchmarks.scale.wire import Counter
from trainium_contract.faults.causes import Cause
from trainium_contract.wire.messages import (
    HeartbeatRequest,
    HeartbeatResponse,
    Member,
    Membership,
    Progress,
    RegisterRequest,
    Transition,
    WorkerPhase,
)
from trainium_devcluster.ports import reserved_port
from trainium_operator.coordinator.spoken import Phrasebook
from trainium_operator.coordinator.state import CoordinatorState
from trainium_operator.plan.model.job_id import JobId
from trainium_trainer.agent.exits.restart_policy import GenerationState
from trainium_trainer.agent.generation.generation_store import serve_store
from trainium_trainer.agent.generation.turns import StateWatcher
from trainium_trainer.agent.rendezvous import GenerationRendezvous

if TYPE_CHECKING:
    from collections.abc import Callable

SECTION = "Restart in place (agents' store)"
MEMBERS = "Membership and heartbeats (coordinator)"
ON_A_NODE = 32
MOST_NODES = 128
"""Agents are real processes; the machine takes so many."""
PATIENCE = 240.0
_ROUNDS = 3


def membership_of(nodes: int, port: int = 29_400, host: str = "127.0.0.1") -> Membership:
    """A generation of so many nodes."""
    members = tuple(
        Member(
            pod_uid=str(uuid.uuid5(uuid.NAMESPACE_OID, str(number))),
            pod_name=f"hlat-7b-worker-{number}",
            pod_ip=host if number == 0 else f"10.{number // 65536}.{number // 256 % 256}.{number % 256}",
            node_name=f"ip-10-0-{number // 256}-{number % 256}.ec2.internal",
            node_rank=number,
            rendezvous_port=port if number == 0 else 29_400,
        )
        for number in range(nodes)
    )
    return Membership(
        generation=3,
        transition=Transition.IMMEDIATE,
        cause=Cause.PEER_LOST,
        members=members,
        processes_per_node=ON_A_NODE,
    )


def _live(membership: Membership, node_rank: int, say: Callable[[Any], object]) -> None:
    """One agent's life: join, then follow each new attempt; the last node's agent begins them when told to."""
    changed = threading.Event()
    newest = [GenerationState()]

    def on_change(state: GenerationState) -> None:
        newest[0] = state
        changed.set()

    watcher = StateWatcher(membership, on_change, lambda: None)
    rendezvous = GenerationRendezvous(
        membership,
        node_rank,
        initial=GenerationState(),
        interrupted=lambda: False,
        waiting_for=lambda _missing: None,
        watcher=watcher,
    )
    watcher.start()
    rendezvous.next_rendezvous()
    say(("joined", 0, node_rank, time.monotonic()))
    attempt = 0
    while True:
        if select.select([sys.stdin], [], [], 0.0)[0] and node_rank == len(membership.members) - 1:
            sys.stdin.readline()
            say(("failed", attempt + 1, node_rank, time.monotonic()))
            rendezvous.store.change(lambda state: replace(state, attempt=state.attempt + 1))
        if changed.wait(0.005):
            changed.clear()
        if newest[0].attempt > attempt:
            attempt = newest[0].attempt
            say(("heard", attempt, node_rank, time.monotonic()))
            rendezvous.next_rendezvous()
            say(("joined", attempt, node_rank, time.monotonic()))


class ForkedAgents:
    """Agents as forked processes around one store."""

    def __init__(self, nodes: int, counter: Counter | None) -> None:
        """`counter`: stands between the agents and the store, and is asked for its numbers."""
        self._nodes = nodes
        self._reports, report = os.pipe()
        self._pids: list[int] = []
        inside = reserved_port()
        served = counter.listen(inside) if counter is not None else inside
        membership = membership_of(nodes, served)
        order_in, self._order = os.pipe()
        gate, opened = os.pipe()
        for number in range(nodes):
            pid = os.fork()
            if pid == 0:
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)
                os.dup2(order_in, 0)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a stack for each connection retried
                # The store asks DNS for the name of each who connects; where that is slow it is no part of this.
                os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
                # Its own store, as in a pod: only that of node 0 is used.
                store = serve_store("127.0.0.1", inside) if number == 0 else None
                os.close(opened)
                os.read(gate, 1)  # that processes are forked one after another is no part of a rendezvous
                try:
                    _live(membership, number, lambda what: os.write(report, json.dumps(what).encode() + b"\n"))
                finally:
                    del store
                    os._exit(1)
            self._pids.append(pid)
        for end in (report, order_in, gate, opened):
            os.close(end)
        self._lines = os.fdopen(self._reports)

    def fail(self) -> None:
        """A rank of the last node dies."""
        os.write(self._order, b"\n")

    def until(self, attempt: int) -> list[tuple[str, int, int, float]]:
        """What was said until all have joined an attempt. RuntimeError when they do not."""
        said: list[tuple[str, int, int, float]] = []
        joined = 0
        deadline = time.monotonic() + PATIENCE
        while joined < self._nodes:
            if time.monotonic() > deadline:
                raise RuntimeError(f"only {joined} of {self._nodes} agents joined")
            line = self._lines.readline()
            if not line:
                raise RuntimeError("the agents are gone")
            said.append(tuple(json.loads(line)))
            joined += said[-1][:2] == ("joined", attempt)
        return said

    def end(self) -> None:
        """Kill the agents."""
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        for pid in self._pids:
            os.waitpid(pid, 0)
        self._lines.close()
        os.close(self._order)


def measure_agents(book: Book, ranks: int) -> None:
    """Restarts of real agents: timed, then counted."""
    nodes = max(1, ranks // ON_A_NODE)
    if nodes > MOST_NODES:
        return
    fleet = ForkedAgents(nodes, None)
    try:
        fleet.until(0)
        for attempt in range(1, _ROUNDS + 1):
            fleet.fail()
            said = fleet.until(attempt)
            failed = next(at for what, _, _, at in said if what == "failed")
            for what, name in (("heard", "until the last agent hears of it"), ("joined", "until all may start ranks")):
                last = max(at for kind, _, _, at in said if kind == what)
                book.add(SECTION, f"a process dies: {name}", "the job", "s", ranks, last - failed, budget=2.0)
    finally:
        fleet.end()
    counter = Counter()
    fleet = ForkedAgents(nodes, counter)
    try:
        fleet.until(0)
        start = counter.read()
        book.add(SECTION, "first rendezvous: messages", "the store", "count", ranks, start.turns)
        book.add(SECTION, "first rendezvous: bytes", "the store", "MiB", ranks, (start.up + start.down) / MIBIBYTE)
        began = time.monotonic()
        fleet.fail()
        fleet.until(1)
        after = counter.read()
        turns, both = after.turns - start.turns, after.up + after.down - start.up - start.down
        book.add(SECTION, "a restart: messages", "the store", "count", ranks, turns)
        book.add(SECTION, "a restart: bytes", "the store", "MiB", ranks, both / MIBIBYTE)
        book.add(SECTION, "a restart: messages", "an agent", "count", ranks, turns / nodes)
        began, before = time.monotonic(), counter.read().turns
        time.sleep(2.0)
        rate = (counter.read().turns - before) / (time.monotonic() - began)
        book.add(SECTION, "at rest: messages a second", "the store", "count", ranks, rate)
        connections = counter.read().connections
        book.add(SECTION, "connections", "the store", "count", ranks, connections)
    finally:
        fleet.end()
        counter.end()


def measure_coordinator(book: Book, ranks: int) -> None:
    """A new membership for all agents, and one round of heartbeats."""
    nodes = max(1, ranks // ON_A_NODE)
    membership, book_of_phrases = membership_of(nodes), Phrasebook()
    job = JobId("default", "hlat-7b", "uid")
    began = time.process_time()
    spoken = book_of_phrases.say(job, membership, membership.protocol)
    sent = len(spoken.packed or spoken.plain)
    made = time.process_time() - began
    book.add(MEMBERS, "membership: made once", "the coordinator", "s", ranks, made)
    book.add(MEMBERS, "membership: answer", "an agent", "MiB", ranks, sent / MIBIBYTE, budget=1.0)
    book.add(MEMBERS, "membership: answers", "the coordinator", "MiB", ranks, sent * nodes / MIBIBYTE)
    began = time.process_time()
    Membership.model_validate_json(spoken.plain)
    book.add(MEMBERS, "membership: read", "an agent", "s", ranks, time.process_time() - began)
    state = CoordinatorState(time.time)
    state.publish(job, membership)
    beats = []
    for member in membership.members:
        where = {"namespace": "default", "job": "hlat-7b", "pod_name": member.pod_name, "pod_uid": member.pod_uid}
        state.register(
            job,
            RegisterRequest(
                **where, pod_ip=member.pod_ip, node_name=member.node_name, rendezvous_port=29_400, agent_version="1"
            ),
        )
        progress = Progress(step=1200, loss=2.5, tokens_per_second=1.5e6, samples=1_228_800, memory_step=1200)
        beats.append(
            HeartbeatRequest(**where, generation=3, phase=WorkerPhase.TRAINING, progress=progress)
            .model_dump_json(by_alias=True, exclude_none=True)
            .encode()
        )
    answer = HeartbeatResponse(generation=3).model_dump_json(by_alias=True).encode()
    rounds = max(1, 2000 // nodes)
    began = time.process_time()
    for _ in range(rounds):
        for beat in beats:
            state.heartbeat(job, HeartbeatRequest.model_validate_json(beat))
    seconds = (time.process_time() - began) / rounds
    book.add(MEMBERS, "heartbeats of all agents, once: read and taken", "the coordinator", "s", ranks, seconds)
    both = sum(len(beat) + len(answer) for beat in beats) / MIBIBYTE
    book.add(MEMBERS, "heartbeats of all agents, once: bodies", "the coordinator", "MiB", ranks, both)
