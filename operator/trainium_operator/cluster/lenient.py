"""Reading a status that somebody has edited by hand, or that a newer operator wrote: what cannot be read is left out.

Invariant: one unreadable entry never hides the others; a condition that can be read is never lost with its neighbours.
The next status write puts the whole in order again.
"""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from trainium_contract.job import TrainingJobStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)
_ROUNDS = 8
"""Each round removes all that is wrong; what is wrong with the whole of a part shows only when its pieces are gone."""


def readable_status(raw: Any, name: str) -> TrainingJobStatus:
    """The status, without what cannot be read; `name` is the job's, for the log."""
    if not isinstance(raw, dict):
        return TrainingJobStatus()
    left = raw
    for _ in range(_ROUNDS):
        try:
            return TrainingJobStatus.model_validate(left)
        except ValidationError as error:
            places = {_part(each["loc"]) for each in error.errors()}
            logger.warning(
                "the status of %s has been edited: %s cannot be read and is left out",
                name,
                ", ".join(sorted(".".join(map(str, place)) for place in places)[:3]),
            )
            left = copy.deepcopy(left) if left is raw else left
            # From behind, so that the places of earlier list entries stay true.
            for place in sorted(places, key=_backwards, reverse=True):
                _remove(left, place)
    return TrainingJobStatus()


def _backwards(place: Sequence[str | int]) -> tuple[str, ...]:
    return tuple(f"{part:09d}" if isinstance(part, int) else str(part) for part in place)


def _part(place: Sequence[str | int]) -> tuple[str | int, ...]:
    """The entry of a list that holds the place, else the field itself: what can be left out."""
    entry = next((index for index, part in enumerate(place) if isinstance(part, int)), len(place) - 1)
    return tuple(place[: entry + 1])


def _remove(status: Any, place: Sequence[str | int]) -> None:
    *path, last = place
    holder = status
    for part in path:
        found = holder.get(part) if isinstance(holder, dict) else None
        if found is None:
            return
        holder = found
    if isinstance(holder, list) and isinstance(last, int) and last < len(holder):
        del holder[last]
    elif isinstance(holder, dict):
        holder.pop(last, None)
