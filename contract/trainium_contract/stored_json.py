"""Read JSON of the API server, whatever a client has stored in it.

The API server stores some parts of objects unchanged (a job's pod template, the parameters of a claimed device): they
may be nested thousands of levels deep, and hold halves of surrogate pairs or bytes that are not text. One such object
must not make a list of all of them unreadable.

Invariants: the usual parser reads what it can, at its speed. Otherwise parts deeper than `MAX_DEPTH` levels are left
out, invalid text is replaced, and everything beside it is unchanged.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

MAX_DEPTH = 100
"""Levels that are kept of an answer that cannot be read as a whole; ten times as many as this project's objects
have."""
OMITTED = "nested too deeply to be read"
"""Placeholder of a part that was left out."""
_TOKENS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)
_MAX_DIGITS = 400
"""Digits; Python refuses to read some thousands."""


def read_json(body: bytes, parser: Callable[[bytes], Any] = json.loads) -> Any:
    """Parse a value, by `parser` if it can. Raises ValueError for a text that is not JSON."""
    try:
        return parser(body)
    except (ValueError, RecursionError):
        text = remove_deep_parts(body).decode("utf-8", "replace")
        return json.loads(text, parse_int=_parse_integer)


def remove_deep_parts(body: bytes) -> bytes:
    """Remove parts nested deeper than `MAX_DEPTH` levels from a JSON text."""
    pieces: list[bytes] = []
    depth, copied_until = 0, 0
    for token in _TOKENS.finditer(body):
        match token.group()[:1]:
            case b"[" | b"{":
                depth += 1
                if depth == MAX_DEPTH + 1:
                    pieces += [body[copied_until : token.start()], json.dumps(OMITTED).encode()]
            case b"]" | b"}":
                if depth == MAX_DEPTH + 1:
                    copied_until = token.end()
                depth -= 1
            case _:
                pass
    # A text that ends in a removed part has nothing more.
    return b"".join([*pieces, body[copied_until:] if depth <= MAX_DEPTH else b""])


def find_optional_part(place: Sequence[str | int]) -> tuple[str | int, ...]:
    """Return the smallest optional part around a place: the first list entry on the way, else the field."""
    entry = next((index for index, part in enumerate(place) if isinstance(part, int)), len(place) - 1)
    return tuple(place[: entry + 1])


def remove_places(value: Any, places: Iterable[Sequence[str | int]]) -> None:
    """Remove the parts at these places from a JSON value; a place that does not exist is skipped."""
    # From the end, so that the places of earlier list entries stay valid.
    for place in sorted(places, key=lambda parts: [f"{part:0>9}" for part in parts], reverse=True):
        *path, last = place
        holder = value
        for part in path:
            if isinstance(holder, list):
                holder = holder[part] if isinstance(part, int) and part < len(holder) else None
            else:
                holder = holder.get(part) if isinstance(holder, dict) else None
        if isinstance(holder, list) and isinstance(last, int) and last < len(holder):
            del holder[last]
        elif isinstance(holder, dict):
            holder.pop(last, None)


def _parse_integer(digits: str) -> int | float:
    return int(digits) if len(digits) < _MAX_DIGITS else float(digits)
