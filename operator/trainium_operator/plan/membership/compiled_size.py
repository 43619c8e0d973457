"""Policy: a size whose graphs are not there costs its compilation, so another one is taken until that pays.

Only of jobs that compile ahead (`spec.precompile`): of others nobody knows which sizes have graphs. How long the job
will stay at a size is not known, so it is as with skis to rent or to buy: the fastest size that has its graphs is
taken, and left for a faster one without when the time lost by waiting comes to what compiling costs. So no more than
twice the least is lost, however long the nodes stay away. Meanwhile idle workers compile in the background, and a size
that has its graphs is like any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_operator.plan.view.price import price_of_a_change

if TYPE_CHECKING:
    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.view.facts import Facts

_ASSUMED_SECONDS = 1200.0
"""To compile one size, while none was compiled in the background: a 7B model on trn1 takes tens of minutes."""


def compile_seconds(facts: Facts, status: PublicStatus, size: int) -> float:
    """What the first step at this size takes longer for want of graphs."""
    ready = _ready(facts, status)
    if not ready or size in ready:
        return 0.0
    return status.compiled.seconds or _ASSUMED_SECONDS


def size_at_hand(facts: Facts, status: PublicStatus, nodes: int) -> int:
    """The best size for so many nodes, or the best that has its graphs where compiling costs more; 0 for none."""
    best = facts.size.legal_at_most(nodes)
    if compile_seconds(facts, status, best) <= (price_of_a_change(status) or 0.0):
        return best
    ready = [size for size in _ready(facts, status) if facts.size.floor <= size < best and facts.size.passes(size)]
    return max(ready, key=lambda size: (facts.size.speed(size), -size), default=best)


def pays_at(facts: Facts, status: PublicStatus, size: int, since: float) -> float:
    """When growing from the size in force, which it has had `since`, to one without graphs pays (Unix seconds)."""
    price = compile_seconds(facts, status, size)
    speed = facts.size.speed(len(facts.members), size)
    return since + price / (1 - speed) if price and 0 < speed < 1 else since


def _ready(facts: Facts, status: PublicStatus) -> frozenset[int]:
    """Sizes that have their graphs; none where nobody knows."""
    return frozenset((*facts.size.compiled_first, *status.compiled.sizes))
