"""Gather all members of a generation, at the ranks that the membership fixes, for each attempt.

Only node 0 polls for members that have joined. The others wait for changes of the shared state (`state_watcher.py`), so
a restart costs each of them the same number of messages at any size and duration.

Guarantees:
- Only members can join; ranks are never negotiated.
- An attempt starts when every member has joined it.
- A waiting agent follows the shared state, so it never misses a newer attempt or a verdict.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from trainium_agent.checks import pairing
from trainium_agent.shared_state.state_watcher import MAX_PUBLISH_INTERVAL_SECONDS, StatePublisher
from trainium_agent.shared_state.store import GenerationStore, StoreLostError
from trainium_agent.workload.master_port import MasterPort
from trainium_contract.spec.health import PreflightCheck

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainium_agent.checks.pair_round import PairRound
    from trainium_agent.exits.restart_policy import GenerationState
    from trainium_agent.shared_state.state_watcher import StateWatcher
    from trainium_agent.workload.rank_port import RankPort
    from trainium_contract.wire.messages import Membership

_POLL_SECONDS = 0.01
_RECONNECT_SECONDS = 0.2
_MAX_BEGIN_PAUSE_SECONDS = 0.5
_TURN_TIMEOUT_SECONDS = 1.5 * MAX_PUBLISH_INTERVAL_SECONDS
_MISSING_SECONDS = 0.5
_LISTED_NODES = 64
_NO_CHECK = "1"


class GenerationStoppedError(Exception):
    """The generation stopped with a verdict."""


class GenerationRendezvous:
    """Takes part in the rendezvous for one agent; used in the worker thread only."""

    def __init__(
        self,
        membership: Membership,
        node_rank: int,
        *,
        initial: GenerationState,
        waiting_for: Callable[[tuple[int, ...]], None],
        watcher: StateWatcher,
        reserve_port: Callable[[str], RankPort],
        pair_rounds: Mapping[str, PairRound],
    ) -> None:
        """Use a `watcher` that its creator starts, and interrupts when the agent must leave.

        `pair_rounds` are the pairwise tests by the name of their check; they precede some attempts.
        """
        self._reserve_port = reserve_port
        self._membership = membership
        self._node_rank = node_rank
        self._initial = initial
        self._pair_rounds = pair_rounds
        self._waiting_for = waiting_for
        self._watcher = watcher
        # Node 0 asks for all others in one request: the same bytes a second at any size.
        self._poll_seconds = max(_POLL_SECONDS, len(membership.members) * 0.0001)
        self._publisher: StatePublisher | None = None
        self._rank_port: RankPort | None = None
        self.store = GenerationStore(membership, hurried=lambda: watcher.is_interrupted)
        self.attempt = initial.attempt
        """Newest attempt that was joined."""

    def join_next(self) -> tuple[GenerationState, MasterPort]:
        """Join the newest attempt, wait for all members, and return its state and the port of the ranks' store.

        Raises WaitInterruptedError, GenerationStoppedError, and NodeFailedPairTestError for this node.
        """
        while True:
            self._watcher.raise_if_interrupted()
            try:
                self._connect()
                joined = self._join(self.store.read_state())
            except StoreLostError:
                # Node 0's pod failed or does not run yet; its return or a newer generation ends the wait.
                self._waiting_for((0,))
                time.sleep(_RECONNECT_SECONDS)
                continue
            if joined is not None:
                self._waiting_for(())
                return joined

    def shutdown(self) -> None:
        """Close the connection to the generation's store; on node 0 also the ranks' store and the publications."""
        self.store.close()
        self._close_port()
        if self._publisher is not None:
            self._publisher.stop()
            self._publisher = None

    def _close_port(self) -> None:
        if self._rank_port is not None:
            self._rank_port.close()
            self._rank_port = None

    def _connect(self) -> None:
        self.store.connect()
        if self._node_rank == 0:
            self.store.create_state(self._initial)
            if self._publisher is None:
                self._publisher = StatePublisher(self._membership)
                self._publisher.start()
        pause = _POLL_SECONDS
        while not self.store.has_state():
            observations = self._watcher.observations
            self._watcher.raise_if_interrupted()
            self._waiting_for((0,))
            self._watcher.wait_for_observation(observations, pause)
            pause = min(2 * pause, _MAX_BEGIN_PAUSE_SECONDS)

    def _join(self, state: GenerationState) -> tuple[GenerationState, MasterPort] | None:
        """Join one attempt; None when a newer attempt began meanwhile."""
        if state.stopped is not None:
            raise GenerationStoppedError("the generation stopped")
        self.attempt = state.attempt
        store, attempt = self.store, state.attempt
        port_key, release_key = store.format_key(attempt, "port"), store.format_key(attempt, "go")
        if self._node_rank == 0:
            self._close_port()
            self._rank_port = self._reserve_port(self._membership.members[0].pod_ip)
            store.set(port_key, self._rank_port.master.encode())
        store.set(store.format_key(attempt, "joined", self._node_rank))
        if not (self._gather(attempt) if self._node_rank == 0 else self._await_release(attempt)):
            return None
        pair_round = self._pair_rounds.get(store.get(release_key))
        if pair_round is not None:
            verdict = pair_round.run(store, attempt)
            if verdict.bad_nodes:
                self._await_withdrawal(attempt, verdict.bad_nodes)
                return None
        return state, MasterPort.decode(store.get(port_key))

    def _gather(self, attempt: int) -> bool:
        """On node 0, release all agents once all have joined; return False for a newer attempt or a stop."""
        store, release_key = self.store, self.store.format_key(attempt, "go")
        missing = [*range(1, len(self._membership.members))]
        next_listing = time.monotonic() + _MISSING_SECONDS
        while not store.has(release_key):
            observations = self._watcher.observations
            self._watcher.raise_if_interrupted()
            missing = self._drop_joined(attempt, missing)
            if not missing:
                # Only now have all members published their state of the last attempt.
                store.set(release_key, self._find_pending_check(store.read_state()))
                continue  # a write has no answer: it is visible to all once it can be read
            if time.monotonic() > next_listing:
                next_listing += _MISSING_SECONDS
                missing = self._list_missing(attempt, missing)
            if self._is_over(attempt, self._read_newest(observations, self._poll_seconds)):
                return False
        if self._publisher is not None:
            self._publisher.notify()
        return True

    def _await_release(self, attempt: int) -> bool:
        """On all other nodes, wait for the release; return False for a newer attempt or a stop."""
        next_listing = time.monotonic() + _MISSING_SECONDS
        observations = self._watcher.observations
        while not self.store.has(self.store.format_key(attempt, "go")):
            self._watcher.raise_if_interrupted()
            if time.monotonic() > next_listing:
                next_listing += _MISSING_SECONDS
                key = self.store.format_key(attempt, "missing")
                if self.store.has(key):  # node 0 publishes it
                    self._waiting_for(tuple(int(rank) for rank in self.store.get(key).split(",") if rank))
            if self._is_over(attempt, self._read_newest(observations, _TURN_TIMEOUT_SECONDS)):
                return False
            observations = self._watcher.observations
        return True

    def _read_newest(self, observations: int, seconds: float) -> GenerationState:
        """Return the shared state of the watcher's next observation, or the stored one if none comes in time."""
        return self._watcher.wait_for_observation(observations, seconds) or self.store.read_state()

    @staticmethod
    def _is_over(attempt: int, state: GenerationState) -> bool:
        # The observed state may be older than the state by which this attempt was joined.
        return state.attempt > attempt or state.stopped is not None

    def _find_pending_check(self, state: GenerationState) -> str:
        """Return the check that precedes the attempt, or `_NO_CHECK`."""
        nodes = len(self._membership.members)
        if PreflightCheck.BANDWIDTH in self._pair_rounds and state.attempt == 0 and nodes > 1:
            return PreflightCheck.BANDWIDTH
        pending = PreflightCheck.PAIRWISE in self._pair_rounds and pairing.should_test_pairs(state, nodes)
        return PreflightCheck.PAIRWISE if pending else _NO_CHECK

    def _await_withdrawal(self, attempt: int, bad: frozenset[int]) -> None:
        """Wait for the newer generation that replaces a bad node."""
        self._waiting_for(tuple(sorted(bad)[:_LISTED_NODES]))
        state = self.store.read_state()
        while not self._is_over(attempt, state):
            observations = self._watcher.observations
            self._watcher.raise_if_interrupted()
            state = self._read_newest(observations, _TURN_TIMEOUT_SECONDS)

    def _drop_joined(self, attempt: int, missing: list[int]) -> list[int]:
        """Drop the leading node ranks that have joined from `missing`; takes one request if none has."""
        step = 1
        while missing and self.store.has(*(self.store.format_key(attempt, "joined", rank) for rank in missing[:step])):
            missing = missing[step:]
            step *= 2
        return missing

    def _list_missing(self, attempt: int, missing: list[int]) -> list[int]:
        """On node 0, check each rank, and publish the first of the missing ones to the others."""
        still_missing: list[int] = []
        for index, rank in enumerate(missing):
            if len(still_missing) == _LISTED_NODES:
                still_missing += missing[index:]
                break
            if not self.store.has(self.store.format_key(attempt, "joined", rank)):
                still_missing.append(rank)
        listed = tuple(still_missing[:_LISTED_NODES])
        self.store.set(self.store.format_key(attempt, "missing"), ",".join(map(str, listed)))
        self._waiting_for(listed)
        return still_missing
