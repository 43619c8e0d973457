"""PURE. The contents of every snapshot store, as the first rank learns them at a start.

Each rank reports once what it represents (`agreement.claims_to_report`). Differences follow: a snapshot that turned out
damaged, a moment that could not be exchanged, a store without space.

Guarantees:
- The cost of every method is linear in the ranks, their claims and the transfers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trainium_trainer.checkpoint.memory.claims import Claim, Moment, ShardKey
    from trainium_trainer.checkpoint.resume.agreement import FromMemory, RankView


class SnapshotInventory:
    """The stores of one start."""

    def __init__(self, views: Sequence[RankView], reported: Sequence[Iterable[Claim]]) -> None:
        """Take the views of all ranks, by rank, without claims, and the claims that each rank reports."""
        self._places = tuple(views)
        self._claims: dict[str, set[Claim]] = {view.store: set() for view in views}
        for view, claims in zip(views, reported, strict=True):
            self._claims[view.store].update(claims)
        self._split: set[str] = set()

    def views(self) -> list[RankView]:
        """Return what `decide` is asked with, by rank; one rank of each store has the store's claims."""
        reported: set[str] = set()
        found: list[RankView] = []
        for view in self._places:
            if view.store in self._split:
                # They cannot share what arrives, though they all read what is there.
                own = replace(view, store=f"{view.store}#{view.rank}", claims=frozenset(self._claims[view.store]))
            else:
                own = view if view.store in reported else replace(view, claims=frozenset(self._claims[view.store]))
                reported.add(view.store)
            found.append(own)
        return found

    def split(self, without_space: Iterable[int]) -> None:
        """Split the stores of these ranks, which cannot be written, where several ranks share one.

        Each rank gets its part.
        """
        sharing: dict[str, int] = {}
        for view in self._places:
            sharing[view.store] = sharing.get(view.store, 0) + 1
        self._split |= {store for rank in without_space if sharing[store := self._places[rank].store] > 1}

    def remove_claims(self, rank: int, claims: Iterable[Claim]) -> None:
        """Snapshots that `rank` could not read in its store."""
        self._claims[self._places[rank].store].difference_update(claims)

    def exclude(self, moment: Moment) -> None:
        """Exclude a moment that could not be exchanged."""
        for store, claims in self._claims.items():
            self._claims[store] = {claim for claim in claims if claim.moment != moment}

    def checks(self, decision: FromMemory) -> list[tuple[Claim, ...]]:
        """By rank: the snapshots of its store that it needs or sends."""
        held = self._held(decision.moment)
        wanted = [{view.needs} for view in self._places]
        for batch in decision.rounds:
            for each in batch:
                wanted[each.source].add(each.key)
        return [
            tuple(claim for key in sorted(keys) if (claim := held[view.store].get(key)) is not None)
            for view, keys in zip(self._places, wanted, strict=True)
        ]

    def origins(self, decision: FromMemory) -> list[Claim]:
        """By rank: the snapshot that its shard stems from after the exchange, the one that was sent first."""
        held = self._held(decision.moment)
        stores = [view.store for view in self.views()]
        arrived: dict[tuple[str, ShardKey], Claim] = {}

        def origin(rank: int, key: ShardKey) -> Claim:
            own = held[self._places[rank].store].get(key)
            return own if own is not None else arrived[stores[rank], key]

        for batch in decision.rounds:
            for each in batch:
                arrived[stores[each.target], each.key] = origin(each.source, each.key)
        return [origin(view.rank, view.needs) for view in self._places]

    def _held(self, moment: Moment) -> dict[str, dict[ShardKey, Claim]]:
        """Return what each store has of a moment; of two snapshots of a shard the lesser."""
        found: dict[str, dict[ShardKey, Claim]] = {}
        for store, claims in self._claims.items():
            here = found[store] = {}
            for claim in claims:
                if claim.moment == moment:
                    other = here.get(claim.key)
                    here[claim.key] = claim if other is None else min(claim, other)
        return found
