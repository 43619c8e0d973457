"""Parse the messages of agents.

Guarantees:
- A newer agent's message is read as far as possible: the models ignore unknown fields, and an unknown value of an
  enumeration (a cause, a check, an alert) removes the smallest optional part with it, never the heartbeat. Anything
  else that is invalid is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json, to_json

from trainium_contract.stored_json import find_optional_part, remove_places
from trainium_operator.http.errors import RefusedError

if TYPE_CHECKING:
    from trainium_contract.base import MessageModel

_M = TypeVar("_M", bound="MessageModel")
_Place = tuple[str | int, ...]
_ROUNDS = 4


class BadMessageError(RefusedError):
    """The message cannot be parsed."""

    status = 400


def read_message(model: type[_M], body: bytes) -> _M:
    """Return the message, reduced to what is kept. Raises BadMessageError."""
    try:
        return model.model_validate_json(body).share_fields_set()
    except ValidationError as error:
        first = last = error
    raw, left_out = None, set[_Place]()
    for _ in range(_ROUNDS):
        places = _find_places_to_leave_out(last, left_out)
        if not places:
            break
        raw = from_json(body) if raw is None else raw
        remove_places(raw, places)
        left_out |= places
        try:
            return model.model_validate_json(to_json(raw)).share_fields_set()
        except ValidationError as error:
            last = error
    detail = first.errors(include_url=False, include_input=False)[0]
    path = ".".join(str(part) for part in detail["loc"])
    raise BadMessageError(f"the message is not valid: {path or 'body'}: {detail['msg']}"[:1024]) from first


def _find_places_to_leave_out(error: ValidationError, left_out: set[_Place]) -> set[_Place]:
    """Return the parts to leave out; none when anything else is invalid."""
    places = set()
    for detail in error.errors(include_url=False, include_input=False):
        place = detail["loc"]
        if detail["type"] == "missing" and place in left_out and len(place) > 1:
            places.add(place[:-1])  # it is required, so the part that contains it is left out
        elif detail["type"] == "enum":
            places.add(find_optional_part(place))
        else:
            return set()
    return places
