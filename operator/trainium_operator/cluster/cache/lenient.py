"""Reading what somebody has edited by hand, or a newer version wrote: what cannot be read is left out.

Invariant: one unreadable entry never hides the others; a condition that can be read is never lost with its neighbours.
The next status write puts the whole in order again. Of a spec and of a message only what a newer version may have added
is left out (fields, and values of an enumeration); everything else that is wrong with them is an error as before.
"""

from __future__ import annotations

import copy
import logging
import re
from typing import Any

from pydantic import ValidationError

from trainium_contract.job import TrainingJobSpec, TrainingJobStatus
from trainium_contract.status.conditions import Condition, ConditionStatus, ConditionType
from trainium_contract.status.public import MembershipStatus
from trainium_contract.stored_json import optional_part, remove_places
from trainium_contract.wire.messages import LATEST_GENERATION

logger = logging.getLogger(__name__)
_ROUNDS = 8
"""Each round removes all that is wrong; what is wrong with the whole of a part shows only when its pieces are gone."""

LARGEST = 2**53
"""Largest number in a status: the API server keeps 64 bits, and refuses a status with more for ever."""
_MANY_DIGITS = re.compile(r"[\s\d_.+-]{16,}")
"""A text that may be read as a number beyond that."""
_ENDS = (ConditionType.COMPLETE, ConditionType.FAILED)
_NEWER = frozenset({"extra_forbidden", "enum"})
"""Errors that a field or a value of a newer version makes."""


def readable_spec(raw: Any) -> tuple[TrainingJobSpec, tuple[str, ...]]:
    """Return the spec, and where something was left out that this version does not know. Raises ValidationError."""
    unknown: set[str] = set()
    left = raw if isinstance(raw, dict) else {}
    while True:
        try:
            return TrainingJobSpec.model_validate(left), tuple(sorted(unknown))
        except ValidationError as error:
            left, removed = _without_newer(left, error)
            unknown |= removed


def _without_newer(raw: Any, error: ValidationError) -> tuple[Any, set[str]]:
    """Return a copy without parts of a newer version, and their places. Raises the error for anything else."""
    found = error.errors(include_url=False, include_input=False)
    if any(each["type"] not in _NEWER for each in found):
        raise error
    # A field that is not known goes alone; a value that is not known takes its list entry with it.
    places = {tuple(each["loc"]) if each["type"] == "extra_forbidden" else optional_part(each["loc"]) for each in found}
    left = copy.deepcopy(raw)
    remove_places(left, places)
    if left == raw:  # the place leads nowhere, as that of a member of a union
        raise error
    return left, {".".join(map(str, place)) for place in places}


def readable_status(raw: Any, name: str) -> TrainingJobStatus:
    """Return the status, without what cannot be read; `name` is the job's, for the log."""
    if not isinstance(raw, dict):
        return TrainingJobStatus()
    beyond = _is_beyond_count(raw)
    left = _countable(raw) if beyond else raw
    for _ in range(_ROUNDS):
        try:
            found = TrainingJobStatus.model_validate(left)
            if beyond:  # now texts that were read as numbers are numbers, and other texts are none
                found = TrainingJobStatus.model_validate(_countable(found.to_wire()))
            return _corrected(found)
        except ValidationError as error:
            places = {optional_part(each["loc"]) for each in error.errors()}
            logger.warning(
                "the status of %s has been edited: %s cannot be read and is left out",
                name,
                ", ".join(sorted(".".join(map(str, place)) for place in places)[:3]),
            )
            left = copy.deepcopy(left) if left is raw else left
            remove_places(left, places)
    return TrainingJobStatus()


def _is_beyond_count(value: Any) -> bool:
    """Return whether a number in it is beyond any count, so that one more might overflow; or its digits."""
    if isinstance(value, int):
        return not -LARGEST <= value <= LARGEST
    if isinstance(value, str):
        return _MANY_DIGITS.fullmatch(value) is not None
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_is_beyond_count, parts))


def _countable(value: Any) -> Any:
    """Return the same with such numbers at the bound."""
    if isinstance(value, int):
        return max(-LARGEST, min(LARGEST, value))
    if isinstance(value, dict):
        return {key: _countable(inner) for key, inner in value.items()}
    return list(map(_countable, value)) if isinstance(value, list) else value


def _corrected(status: TrainingJobStatus) -> TrainingJobStatus:
    """Return the status with each condition once, without an end or a generation that it cannot have.

    There is room then for what is written, and for the generations that follow.
    """
    reported: dict[ConditionType, Condition] = {}
    for condition in status.conditions:
        if condition.type not in _ENDS or condition.status is ConditionStatus.TRUE:
            reported.setdefault(condition.type, condition)
    if len(reported) != len(status.conditions):
        status = status.replaced(conditions=tuple(reported.values()))
    if not 0 <= status.membership.generation <= LATEST_GENERATION:
        status = status.replaced(membership=MembershipStatus())  # the record has it
    return status
