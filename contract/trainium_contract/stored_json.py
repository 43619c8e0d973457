"""JSON as the API server sends it, with whatever somebody has stored in it.

Some parts of objects are kept as they were sent (a job's pod template, the parameters of a claimed device): they may be
nested thousands of levels deep, and hold halves of surrogate pairs or bytes that are no text. One such object must not
keep a list of all of them from being read.
Invariants: what a usual parser reads is read by it, at its speed; else what is deeper than `DEEPEST` levels is left
out, what is no text is replaced, and everything beside it is as it was.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

DEEPEST = 100
"""Levels that are kept of an answer that cannot be read as a whole; ten times as many as objects of ours have."""
LEFT_OUT = "nested too deeply to be read"
"""Placeholder of a part that was left out."""
_SIGNS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)
_LONGEST_NUMBER = 400
"""Digits; Python refuses to read some thousands."""


def read_json(body: bytes, usual: Callable[[bytes], Any] = json.loads) -> Any:
    """Parse a value, by the `usual` parser if it can. Raises ValueError for a text that is not JSON."""
    try:
        return usual(body)
    except (ValueError, RecursionError):
        text = shallow(body).decode("utf-8", "replace")
        return json.loads(text, parse_int=_number)


def shallow(body: bytes) -> bytes:
    """Remove what is nested deeper than `DEEPEST` levels from a JSON text."""
    kept: list[bytes] = []
    depth, done = 0, 0
    for sign in _SIGNS.finditer(body):
        match sign.group()[:1]:
            case b"[" | b"{":
                depth += 1
                if depth == DEEPEST + 1:
                    kept += [body[done : sign.start()], json.dumps(LEFT_OUT).encode()]
            case b"]" | b"}":
                if depth == DEEPEST + 1:
                    done = sign.end()
                depth -= 1
            case _:
                pass
    # Of a text that ends in a part that is left out nothing more is there.
    return b"".join([*kept, body[done:] if depth <= DEEPEST else b""])


def optional_part(place: Sequence[str | int]) -> tuple[str | int, ...]:
    """Return the smallest part around a place that can be left out: the first list entry on the way, else the field."""
    entry = next((index for index, part in enumerate(place) if isinstance(part, int)), len(place) - 1)
    return tuple(place[: entry + 1])


def remove_places(value: Any, places: Iterable[Sequence[str | int]]) -> None:
    """Remove the parts at these places from a JSON value; a place that leads nowhere is passed over."""
    # From behind, so that the places of earlier list entries stay true.
    for place in sorted(places, key=lambda each: [f"{part:0>9}" for part in each], reverse=True):
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


def _number(digits: str) -> int | float:
    return int(digits) if len(digits) < _LONGEST_NUMBER else float(digits)
