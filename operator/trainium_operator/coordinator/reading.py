"""Messages of agents that are newer than this operator.

A field that is not known is ignored by the models themselves. Here: a value of an enumeration that is not known (a
cause, a check, an alert) takes the smallest part of the message with it that may be left out, and never the sign of
life. Everything else that is wrong with a message is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json, to_json

if TYPE_CHECKING:
    from trainium_contract.base import MessageModel

_M = TypeVar("_M", bound="MessageModel")
_Place = tuple[str | int, ...]
_ROUNDS = 4


def read_message(model: type[_M], body: bytes) -> _M:
    """The message, fit to be kept. Raises ValidationError."""
    try:
        return model.model_validate_json(body).lean()
    except ValidationError as error:
        first = last = error
    raw, left_out = None, set[_Place]()
    for _ in range(_ROUNDS):
        places = _newer(last, left_out)
        if not places:
            break
        raw = from_json(body) if raw is None else raw
        for place in sorted(places, key=_backwards, reverse=True):
            _remove(raw, place)
        left_out |= places
        try:
            return model.model_validate_json(to_json(raw)).lean()
        except ValidationError as error:
            last = error
    raise first


def _newer(error: ValidationError, left_out: set[_Place]) -> set[_Place]:
    """What to leave out; nothing when something else is wrong."""
    places = set()
    for each in error.errors(include_url=False, include_input=False):
        place = each["loc"]
        if each["type"] == "missing" and place in left_out and len(place) > 1:
            places.add(place[:-1])  # it has to be there: so the part that it belongs to goes
        elif each["type"] == "enum":
            entry = next((at for at, part in enumerate(place) if isinstance(part, int)), len(place) - 1)
            places.add(place[: entry + 1])
        else:
            return set()
    return places


def _backwards(place: _Place) -> tuple[str, ...]:
    return tuple(f"{part:09d}" if isinstance(part, int) else part for part in place)


def _remove(holder: Any, place: _Place) -> None:
    for part in place[:-1]:
        holder = holder[part]
    del holder[place[-1]]
