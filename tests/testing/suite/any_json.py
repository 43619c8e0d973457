"""Strategies: any JSON, and real objects that were changed in a few random places."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Iterator

LEAF = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
    | st.sampled_from(["9" * 400, "2027-01-15T08:00:00Z", "0001-01-01T00:00:00+23:59", "\ud800", "Crash", "Running"])
    | st.sampled_from([10**30, -(10**30), float("inf"), float("nan")])
)  # fmt: skip
ANYTHING = st.recursive(
    LEAF,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
PATIENT = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every part of a JSON value but the whole."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        yield (*path, key)
        yield from places(part, (*path, key))


@st.composite
def changed(draw: st.DrawFn, value: Any, most: int = 4) -> Any:
    """The value with a few parts replaced, taken out or added."""
    result = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, most))):
        known = list(places(result))
        if not known:
            break
        *path, last = draw(st.sampled_from(known))
        holder = result
        for part in path:
            holder = holder[part]
        match draw(st.sampled_from(("replace", "remove", "add"))):
            case "replace":
                holder[last] = draw(ANYTHING)
            case "remove":
                del holder[last]
            case _ if isinstance(holder, dict):
                holder[draw(st.text(max_size=8))] = draw(ANYTHING)
            case _:
                holder.append(draw(ANYTHING))
    return result


def as_sent(value: Any) -> Any:
    """As JSON carries it: not every Python value can come over the wire."""
    return json.loads(json.dumps(value))
