"""Read objects that a person has edited or a newer version wrote, without the parts that cannot be read.

Invariants:
- One unreadable entry never hides the others: a readable condition is never lost with its neighbours.
- The next status write repairs the whole.
- Of a spec or a message, only parts that a newer version may have added are left out (fields and enumeration values).
  Everything else that is invalid is an error.
"""

from __future__ import annotations

import copy
import logging
import re
from typing import Any

from pydantic import ValidationError

from trainium_contract.job import TrainingJobSpec, TrainingJobStatus
from trainium_contract.status.conditions import Condition, ConditionStatus, ConditionType
from trainium_contract.status.internal import INTERNAL_KEY, unpack_internal
from trainium_contract.status.public import MembershipStatus
from trainium_contract.stored_json import find_optional_part, remove_places
from trainium_contract.wire.messages import MAX_GENERATION

logger = logging.getLogger(__name__)
_ROUNDS = 8
"""Each round removes all invalid parts. Errors of a whole part appear only after the errors inside it are removed."""

MAX_INTEGER = 2**53
"""Largest number in a status. The API server stores 64 bits and would refuse a larger one forever."""
_MANY_DIGITS = re.compile(r"[\s\d_.+-]{16,}")
"""A text that may parse as a larger number."""
_ENDS = (ConditionType.COMPLETE, ConditionType.FAILED)
_NEWER = frozenset({"extra_forbidden", "enum"})
"""Errors that a field or a value of a newer version causes."""


def read_spec(raw: Any) -> tuple[TrainingJobSpec, tuple[str, ...]]:
    """Return the spec, and the places that were left out as unknown to this version. Raises ValidationError."""
    unknown: set[str] = set()
    spec = raw if isinstance(raw, dict) else {}
    while True:
        try:
            return TrainingJobSpec.model_validate(spec), tuple(sorted(unknown))
        except ValidationError as error:
            spec, removed = _drop_unknown_fields(spec, error)
            unknown |= removed


def _drop_unknown_fields(raw: Any, error: ValidationError) -> tuple[Any, set[str]]:
    """Return a copy without parts of a newer version, and their places. Raises the error for anything else."""
    details = error.errors(include_url=False, include_input=False)
    if any(detail["type"] not in _NEWER for detail in details):
        raise error
    # An unknown field is removed alone; an unknown value is removed with its list entry.
    places = {
        tuple(detail["loc"]) if detail["type"] == "extra_forbidden" else find_optional_part(detail["loc"])
        for detail in details
    }
    remaining = copy.deepcopy(raw)
    remove_places(remaining, places)
    if remaining == raw:  # the location does not exist in the input, as for a member of a union
        raise error
    return remaining, {".".join(map(str, place)) for place in places}


def read_status(raw: Any, name: str) -> TrainingJobStatus:
    """Return the status without its unreadable parts; `name` is the job's, for the log."""
    if not isinstance(raw, dict):
        return TrainingJobStatus()
    fields = _unpack_internal_if_readable(raw, name)
    must_clamp = _is_beyond_limit(fields)
    fields = _clamp_integers(fields) if must_clamp else fields
    for _ in range(_ROUNDS):
        try:
            status = TrainingJobStatus.model_validate(fields)
            if must_clamp:  # replaces texts that were parsed as numbers
                status = TrainingJobStatus.model_validate(_clamp_integers(status.to_wire()))
            return _repair_status(status)
        except ValidationError as error:
            places = {find_optional_part(detail["loc"]) for detail in error.errors()}
            logger.warning(
                "the status of %s has been edited: %s cannot be read and is left out",
                name,
                ", ".join(sorted(".".join(map(str, place)) for place in places)[:3]),
            )
            fields = copy.deepcopy(fields)
            remove_places(fields, places)
    return TrainingJobStatus()


def _unpack_internal_if_readable(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the status with its internal fields, or without them if their text cannot be read."""
    try:
        return unpack_internal(raw)
    except ValueError:
        logger.warning("the status of %s has been edited: %s cannot be read and is left out", name, INTERNAL_KEY)
        return {key: value for key, value in raw.items() if key != INTERNAL_KEY}


def _is_beyond_limit(value: Any) -> bool:
    """Return whether the value contains a number beyond the limit, or the digits of one."""
    if isinstance(value, int):
        return not -MAX_INTEGER <= value <= MAX_INTEGER
    if isinstance(value, str):
        return _MANY_DIGITS.fullmatch(value) is not None
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_is_beyond_limit, parts))


def _clamp_integers(value: Any) -> Any:
    """Return the value with such numbers set to the limit."""
    if isinstance(value, int):
        return max(-MAX_INTEGER, min(MAX_INTEGER, value))
    if isinstance(value, dict):
        return {key: _clamp_integers(inner) for key, inner in value.items()}
    return list(map(_clamp_integers, value)) if isinstance(value, list) else value


def _repair_status(status: TrainingJobStatus) -> TrainingJobStatus:
    """Return the status with unique conditions, and without an impossible end or generation.

    This leaves room for the next writes and the next generations.
    """
    reported: dict[ConditionType, Condition] = {}
    for condition in status.conditions:
        if condition.type not in _ENDS or condition.status is ConditionStatus.TRUE:
            reported.setdefault(condition.type, condition)
    if len(reported) != len(status.conditions):
        status = status.replaced(conditions=tuple(reported.values()))
    if not 0 <= status.membership.generation <= MAX_GENERATION:
        status = status.replaced(membership=MembershipStatus())  # the record has it
    return status
