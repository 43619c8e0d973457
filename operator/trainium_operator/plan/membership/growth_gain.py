"""Policy: growth that nobody asked for is worth its restart.

A step lasts by its passes, so the steps that are left say what the higher speed of a larger size saves. The price is
what the newest change of the membership took, from the decision to the first new step. While either is not known,
growth is taken to be worth it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_operator.plan.view.price import price_of_a_change

if TYPE_CHECKING:
    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.view.facts import Facts


def is_worth_growing(facts: Facts, status: PublicStatus, present: int, size: int, *, beside: float) -> bool:
    """Whether growing from `present` to `size` nodes saves more time than it costs, `beside` seconds besides."""
    speed = facts.size.speed(present, size)
    step = next((each.step_seconds for each in status.goodput.sizes if each.size == present), None)
    price, total = price_of_a_change(status), status.progress.total_steps
    if step is None or price is None or not total or not speed:
        return True
    left = max(0, total - status.progress.step)
    return left * step * (1 - speed) > price + beside
