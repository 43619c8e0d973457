"""Hypothesis strategies: any JSON, and real objects with random mutations."""

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from trainium_contract.stored_json import read_json

HOSTILE_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 253, 254, 1024, 1025, 10_000, 65_535, 65_536,
    2**31 - 1, 2**31, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, -(10**30),
    1_800_000_000.0, 1_800_003_600.5, 1_799_999_990, 0.0, -0.0, 0.5, 1e-320, 1e300, 1e999, -1e999, float("nan"),
    "", " ", "0", "-1", "1e400", "0x10", "9" * 400, "true", "null", "a", "A", "\ud800", "\x00", "\u2028",
    "\u017f", "\u0661", "\u00e9" * 3, "\t", "\n", '"', "%", "=", "\\", "\x7f", "\uffff", "\U0001f525",
    "2027-01-15T08:00:00Z", "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "0000-12-31T00:00:00Z",
    "20270115T080000Z", "2027-W03-5", "2027-01-15T08:00:00.123456789Z", "Crash", "Running", "True", "False", "Unknown",
    "../../etc", "a/b", "%s%n{0}", "<script>", "--", "-", "a,b", "a=b", "10.0.0.1", "::1", "::ffff:10.0.0.1%eth0",
    "secret: AKIAABCDEFGHIJKLMNOP", "http://user:pass@host",
)  # fmt: skip
"""Values that often break programs."""
HOSTILE_TEXTS = tuple(value for value in HOSTILE_VALUES if isinstance(value, str))
LEAF = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
    | st.sampled_from(HOSTILE_VALUES) | st.sampled_from(HOSTILE_VALUES)
)  # fmt: skip
ANYTHING = st.recursive(
    LEAF,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
SLOW_ALLOWED = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
LARGEST = 1 << 17
"""Characters of a part that was repeated; several such parts exceed what the API server stores of an object."""
DEEPEST = 190
"""Levels of nesting that one mutation adds."""
MOST_DIGITS = 4_000
"""Python refuses to parse longer integers."""
LARGE_ONE_IN = 40
"""One in this many repetitions is meant to exceed limits; these take long."""
MOST_VALUES_OF_A_KEY = 64
"""Values that are kept of a key."""
_INT64 = 1 << 63
_CHANGES = ("remove", "replace", "replace from cases", "add", "wrap", "unwrap", "swap", "near", "near")


@st.composite
def mutated_values(
    draw: st.DrawFn, value: Any, most: int = 4, values_by_key: Mapping[str, Sequence[Any]] | None = None
) -> Any:
    """Return the value with a few mutated parts.

    `values_by_key`: further values by the key of a part; with them, parts are also repeated.
    """
    result = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, most))):
        holder, key = result, None
        while isinstance(holder, (dict, list)) and holder:
            key = draw(st.sampled_from(list(holder) if isinstance(holder, dict) else range(len(holder))))
            if not isinstance(holder[key], (dict, list)) or not holder[key] or draw(st.integers(0, 7)) == 0:
                break
            holder = holder[key]
        if key is not None:
            draw(_change(holder, key, values_by_key or {}))
    return result


def collect_values(cases: Iterable[Any], further: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Return the values of every key in the cases, and `further` ones."""
    values_by_key = {key: list(values) for key, values in further.items()}
    parts = list(cases)
    while parts:
        part = parts.pop(0)
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        for key, inner in part.items() if isinstance(part, dict) else ():
            known = values_by_key.setdefault(key, [])
            if len(known) < MOST_VALUES_OF_A_KEY and inner not in known:
                known.append(inner)
    return {key: values for key, values in values_by_key.items() if values}


@st.composite
def _change(draw: st.DrawFn, holder: Any, key: Any, values_by_key: Mapping[str, Sequence[Any]]) -> None:
    value = holder[key]
    names = st.sampled_from(sorted(values_by_key)) if values_by_key else st.text(max_size=8)
    match draw(st.sampled_from((*_CHANGES, "repeat") if values_by_key else _CHANGES)):
        case "remove":
            del holder[key]
        case "replace":
            holder[key] = draw(ANYTHING)
        case "replace from cases":
            uses_key = isinstance(key, str) and draw(st.integers(0, 7)) > 0
            holder[key] = draw(_value_of(key if uses_key else draw(names), values_by_key))
        case "add" if isinstance(holder, list):
            holder.insert(key, draw(st.just(value) | ANYTHING))
        case "add":
            name = draw(names)
            holder[name] = draw(_value_of(name, values_by_key))
        case "repeat":
            holder[key] = draw(_repeated_values(value))
        case "wrap":
            holder[key] = draw(st.sampled_from(([value], {draw(names): value})))
        case "unwrap" if isinstance(value, (dict, list)) and value:
            holder[key] = draw(st.sampled_from(list(value.values()) if isinstance(value, dict) else value))
        case "swap":
            other = draw(st.sampled_from(list(holder) if isinstance(holder, dict) else range(len(holder))))
            holder[key], holder[other] = holder[other], value
        case _:
            holder[key] = draw(_near(value))


def _value_of(key: Any, values_by_key: Mapping[str, Sequence[Any]]) -> st.SearchStrategy[Any]:
    return st.sampled_from(values_by_key[key]).map(copy.deepcopy) if key in values_by_key else ANYTHING


@st.composite
def _repeated_values(draw: st.DrawFn, value: Any) -> Any:
    times = draw(st.integers(2, 20) | st.integers(2, 300))
    if draw(st.integers(1, LARGE_ONE_IN)) == LARGE_ONE_IN:
        times = 1 << draw(st.integers(8, 17))
    times = max(1, min(times, LARGEST // len(json.dumps(value))))
    match draw(st.sampled_from(("deep", "keys", "list", "long", "long"))):
        case "deep":
            for _ in range(min(times, DEEPEST)):
                value = [value]
            return value
        case "keys":
            return {f"k{number}": value for number in range(times)}
        case "long" if isinstance(value, str):
            return (value or "x") * times
        case "long" if isinstance(value, int):
            return int("9" * min(times, MOST_DIGITS))
        case _:
            return [value] * times


@st.composite
def _near(draw: st.DrawFn, value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int():
            steps = [value + step for step in (-1, 1, -2, 2, 10, -10, 1000)]
            return draw(st.sampled_from([*steps, -value, str(value), value // 2]))
        case float():
            return draw(st.sampled_from((-value, value * 1e9, value / 1e9, str(value))))
        case str():
            position = draw(st.integers(0, len(value)))
            before, after = value[:position], value[position:]
            insertion = before + draw(st.sampled_from(HOSTILE_TEXTS)) + after
            texts = (before, before + after[1:], (value + value)[:LARGEST], value.swapcase(), insertion)
            return draw(st.sampled_from(texts))
        case list():
            return draw(st.sampled_from((value[: len(value) // 2], value[1:], value[::-1])))
        case dict() if value:
            key = draw(st.sampled_from(list(value)))
            return {**{name: inner for name, inner in value.items() if name != key}, draw(_near(key)): value[key]}
        case _:
            return draw(ANYTHING)


def as_json(value: Any) -> Any:
    """Return the value after conversion to JSON and back."""
    return json.loads(json.dumps(value))


def as_stored(value: Any) -> Any:
    """Return the value as the operator reads it from the API server, whose numbers have 64 bits or a fraction."""
    numbers = json.loads(
        json.dumps(value),
        parse_int=lambda digits: min(max(int(digits), -_INT64), _INT64 - 1),
        parse_constant=lambda _: None,
    )
    return read_json(json.dumps(numbers).encode())
