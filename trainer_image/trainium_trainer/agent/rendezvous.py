"""Rendezvous of a generation: all its members, at the ranks that the membership fixes, one attempt after another.

Invariants: nobody who is not in the membership can join it; ranks are never negotiated; an attempt begins when every
member has joined it; while it waits it follows the shared state, so a newer attempt or a verdict is never missed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented, not in __all__
from torch.distributed.elastic.rendezvous import (
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from trainium_trainer.agent import pairing
from trainium_trainer.agent.generation_store import GenerationStore, StoreLostError, serve_rank_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.messages import Membership
    from trainium_trainer.agent.pair_round import PairRound
    from trainium_trainer.agent.policy import GenerationState

_POLL_SECONDS = 0.01
_RECONNECT_SECONDS = 0.2
_MISSING_SECONDS = 0.5
_LISTED = 64
_GO = "1"
_PAIRS_FIRST = "pairs"


class RendezvousInterruptedError(RendezvousGracefulExitError):
    """The agent was told to leave, or the generation stopped, while it waited for the others."""


class GenerationRendezvous(RendezvousHandler):
    """The plug-in for torch.distributed.elastic."""

    def __init__(
        self,
        membership: Membership,
        node_rank: int,
        run_id: str,
        *,
        initial: GenerationState,
        interrupted: Callable[[], bool],
        waiting_for: Callable[[tuple[int, ...]], None],
        pair_round: PairRound | None = None,
    ) -> None:
        self._membership = membership
        self._node_rank = node_rank
        self._run_id = f"{run_id}.g{membership.generation}"
        self._initial = initial
        self._interrupted = interrupted
        self._pair_round = pair_round
        self._waiting_for = waiting_for
        # One server answers all members: a few thousand questions a second at any size.
        self._poll_seconds = max(_POLL_SECONDS, len(membership.members) * 0.0004)
        self._rank_store: TCPStore | None = None
        self.store = GenerationStore(membership, hurried=interrupted)
        self.state = initial
        """The shared state as of the last rendezvous."""

    def get_backend(self) -> str:
        """Name of this plug-in."""
        return "trainium"

    @property
    def use_agent_store(self) -> bool:
        """The ranks connect to a store that node 0's agent hosts."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the newest attempt and wait for all members.

        Raises RendezvousInterruptedError when told to leave or when the generation stopped.
        """
        while True:
            self._stop_when_interrupted()
            try:
                self._connect()
                info = self._join(self.store.state())
            except StoreLostError:
                # Node 0's pod is gone or not there yet; only a newer generation or its return ends this.
                self._waiting_for((0,))
                time.sleep(_RECONNECT_SECONDS)
                continue
            if info is not None:
                self._waiting_for(())
                return info

    def is_closed(self) -> bool:
        """Whether the generation stopped with a verdict."""
        return self.state.stopped is not None

    def set_closed(self) -> None:
        """A generation is closed by its shared state only."""

    def num_nodes_waiting(self) -> int:
        """None ever: membership changes come as new generations."""
        return 0

    def get_run_id(self) -> str:
        """Name of the job and number of the generation."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the ranks' store if it is here."""
        self._rank_store = None
        return True

    def _connect(self) -> None:
        if not self.store.connected:
            self.store.connect()
        if self._node_rank == 0:
            self.store.begin(self._initial)
        while not self.store.begun():
            self._stop_when_interrupted()
            self._waiting_for((0,))
            time.sleep(_POLL_SECONDS)

    def _join(self, state: GenerationState) -> RendezvousInfo | None:
        """Join one attempt; None when a newer attempt began meanwhile."""
        self.state = state
        if state.stopped is not None:
            raise RendezvousInterruptedError("the generation stopped")
        store, attempt = self.store, state.attempt
        port_key, go_key = store.key(attempt, "port"), store.key(attempt, "go")
        if self._node_rank == 0:
            self._rank_store = serve_rank_store(self._membership.members[0].pod_ip)
            store.set(port_key, str(self._rank_store.port))
        store.set(store.key(attempt, "joined", self._node_rank))
        missing = set(range(len(self._membership.members))) - {self._node_rank}
        next_listing = time.monotonic() + _MISSING_SECONDS
        while not store.has(go_key):
            self._stop_when_interrupted()
            listing = time.monotonic() > next_listing
            if self._node_rank == 0:
                missing = self._still_missing(attempt, missing, singly=listing)
                if not missing:
                    # Only now have all members said what they know of the last attempt.
                    store.set(go_key, _PAIRS_FIRST if self._tests_pairs(store.state()) else _GO)
                    break
            if listing:
                next_listing += _MISSING_SECONDS
                self._list_missing(attempt, missing)
            newest = store.state()
            if newest.attempt != attempt or newest.stopped is not None:
                return None
            time.sleep(self._poll_seconds)
        if store.get(go_key) == _PAIRS_FIRST and self._pair_round is not None:
            verdict = self._pair_round.run(store, attempt)
            if verdict.bad:
                self._await_withdrawal(attempt, verdict.bad)
                return None
        return RendezvousInfo(
            PrefixStore(store.key(attempt, "elastic"), store.client),
            self._node_rank,
            len(self._membership.members),
            RendezvousStoreInfo(self._membership.members[0].pod_ip, int(store.get(port_key))),
        )

    def _tests_pairs(self, state: GenerationState) -> bool:
        return self._pair_round is not None and pairing.is_due(state, len(self._membership.members))

    def _await_withdrawal(self, attempt: int, bad: frozenset[int]) -> None:
        """A bad node ends this attempt; whoever replaces it comes with a newer generation."""
        self._waiting_for(tuple(sorted(bad)[:_LISTED]))
        state = self.store.state()
        while state.attempt == attempt and state.stopped is None:
            self._stop_when_interrupted()
            time.sleep(self._poll_seconds)
            state = self.store.state()

    def _still_missing(self, attempt: int, missing: set[int], *, singly: bool) -> set[int]:
        """Those of `missing` that have not joined; without `singly` all of them or none, for one question."""
        keys = {rank: self.store.key(attempt, "joined", rank) for rank in missing}
        if not missing or self.store.has(*keys.values()):
            return set()
        return {rank for rank in missing if not self.store.has(keys[rank])} if singly else missing

    def _list_missing(self, attempt: int, missing: set[int]) -> None:
        """Say who is missing; node 0 knows and tells the others."""
        key = self.store.key(attempt, "missing")
        if self._node_rank == 0:
            listed = tuple(sorted(missing)[:_LISTED])
            self.store.set(key, ",".join(map(str, listed)))
            self._waiting_for(listed)
        elif self.store.has(key):
            text = self.store.get(key)
            self._waiting_for(tuple(int(rank) for rank in text.split(",") if rank))

    def _stop_when_interrupted(self) -> None:
        if self._interrupted():
            raise RendezvousInterruptedError("told to leave")
