"""Leave out fields of a status that the installed definition does not declare, because it is older or has dropped them.

The API server refuses the whole server-side apply that names such a field, and without its status a job is planned no
further. So the fields that it names are left out and the rest is written. From time to time the whole is tried again,
because a newer definition may be installed.

Invariant: no field is left out unless a refusal named it.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.api_server.errors import UndeclaredFieldError
    from trainium_contract.api_server.responses import Json

_log = logging.getLogger(__name__)

FOR_SECONDS = 60.0
_NAMED = re.compile(r"\.status((?:\.\w+|\[[^\]\n]*\])+): field not declared in schema")
_ENTRY = re.compile(r"\[[^\]\n]*\]")
_MAX_FIELDS = 256
"""Maximum number of places that are remembered; a definition that lacks more is not one of this project."""

_Place = tuple[str, ...]


def find_places(refusal: str) -> frozenset[_Place]:
    """Return the fields that the API server's sentence names, with the entries of a list as one."""
    return frozenset(tuple(_ENTRY.sub("", path).split(".")[1:]) for path in _NAMED.findall(refusal))


class UndeclaredFields:
    """The fields that are left out of every status at present."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._places: frozenset[_Place] = frozenset()
        self._until = 0.0
        self._reported: frozenset[_Place] = frozenset()

    def drop_from(self, status: Json) -> Json:
        """Return a copy of the status without them."""
        if self._clock() >= self._until:
            self._places = frozenset()
        for place in self._places:
            status = _drop_place(status, place)
        return status

    def learn(self, error: UndeclaredFieldError) -> bool:
        """Add the fields that the refusal names; return False if none is new, so that a retry is useless."""
        places = self._places | find_places(str(error))
        if places == self._places or len(places) > _MAX_FIELDS:
            return False
        self._places, self._until = places, self._clock() + FOR_SECONDS
        if not places <= self._reported:
            named = ", ".join(sorted(".".join(("status", *place)) for place in places))
            _log.warning("the TrainingJob definition lacks %s: not written; apply the CRD of this version", named)
            self._reported |= places
        return True


def _drop_place(value: Any, place: _Place) -> Any:
    if isinstance(value, list):
        return [_drop_place(entry, place) for entry in value]
    name, *rest = place
    if not isinstance(value, dict) or name not in value:
        return value
    kept = {key: inner for key, inner in value.items() if key != name}
    return {**kept, name: _drop_place(value[name], tuple(rest))} if rest else kept
