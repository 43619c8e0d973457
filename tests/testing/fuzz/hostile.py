"""The language of cases: JSON, in which a few words stand for what is too large or too deep to be written out.

`{"$text": [n, "ab"]}` is a text of n times `ab`, `{"$list": [n, x]}` n times x, `{"$keys": [n, x]}` an object of n
keys, `{"$deep": [n, x]}` n lists around x, `{"$digits": n}` a whole number of n digits, and `{"$packed": x}` the JSON
of x packed as a ConfigMap holds it. Invariant: what a case unfolds to is bounded (`MOST_VALUES`, `LONGEST_TEXT`),
whatever it says; what is no such word stands for itself.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from itertools import takewhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_VALUES = 100_000
"""Of one case, unfolded."""
LONGEST_TEXT = 2 << 20
"""Characters of all unfolded texts of one case: more than the API server stores of an object."""
DEEPEST = 190
"""Levels of `$deep`; what is deeper is text that a parser sees, not a value (`stored_json.py`)."""
MOST_DIGITS = 4_000
"""Python reads no longer numbers."""
_INT64 = 1 << 63

LEAVES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 253, 254, 1024, 1025, 10_000, 65_535, 65_536,
    2**31 - 1, 2**31, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, -(10**30),
    1_800_000_000.0, 1_800_003_600.5, 1_799_999_990, 0.0, -0.0, 0.5, 1e-320, 1e300, 1e999, -1e999, float("nan"),
    "", " ", "0", "-1", "1e400", "0x10", "9" * 400, "true", "null", "a", "A", "\ud800", "\x00", "\u2028",
    "\u017f", "\u0661", "\u00e9" * 3,
    "2027-01-15T08:00:00Z", "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "0000-12-31T00:00:00Z",
    "20270115T080000Z", "2027-W03-5", "2027-01-15T08:00:00.123456789Z", "Crash", "Running", "True", "False", "Unknown",
    "../../etc", "a/b", "%s%n{0}", "<script>", "--", "-", "a,b", "a=b", "10.0.0.1", "::1", "::ffff:10.0.0.1%eth0",
    "secret: AKIAABCDEFGHIJKLMNOP", "http://user:pass@host", [], {}, [[]], [{}], {"": ""},
)  # fmt: skip
"""Values that have broken programs."""


def unfolded(case: Any, *, storable: bool = False) -> Any:
    """The case with its words put in place, as JSON's Python values.

    `storable`: numbers as the API server keeps them, which knows 64 bits, and none that is not finite.
    """
    return _Unfolding(storable).of(case)


class _Unfolding:
    def __init__(self, storable: bool) -> None:
        self.values = MOST_VALUES
        self.characters = LONGEST_TEXT
        self._storable = storable

    def of(self, value: Any) -> Any:
        self.values -= 1
        if self.values < 0:
            return None
        if type(value) is str:  # most of them are
            return value
        match value:
            case dict():
                word = self._word(value) if len(value) == 1 else None
                return {key: self.of(inner) for key, inner in value.items()} if word is None else word[0]
            case list():
                return [self.of(inner) for inner in value]
            case int() if self._storable and not -_INT64 <= value < _INT64:
                return _INT64 - 1 if value > 0 else -_INT64
            case float() if self._storable and not math.isfinite(value):
                return None
            case _:
                return value

    def _word(self, value: dict[str, Any]) -> tuple[Any] | None:
        match value:
            case {"$text": [int(times), str(piece)]}:
                times = min(max(times, 0), self.characters // max(1, len(piece)))
                self.characters -= times * len(piece)
                return (piece * times,)
            case {"$list": [int(times), inner]}:
                return ([self.of(inner) for _ in self._times(times, inner)],)
            case {"$keys": [int(times), inner]}:
                return ({f"k{number}": self.of(inner) for number in self._times(times, inner)},)
            case {"$deep": [int(times), inner]}:
                found = self.of(inner)
                for _ in range(min(max(times, 0), DEEPEST)):
                    found = [found]
                return (found,)
            case {"$packed": inner}:
                whole = self.of(inner)
                text = whole if isinstance(whole, str) else json.dumps(whole)
                return (base64.b64encode(gzip.compress(text.encode(errors="replace"), 1, mtime=0)).decode(),)
            case {"$digits": int(times)}:
                return (self.of(int("9" * min(max(times, 1), MOST_DIGITS))),)
            case _:
                return None

    def _times(self, times: int, inner: Any) -> Iterator[int]:
        """As often as there is room for, however large each is."""
        most = min(times, self.values // (1 + _weight(inner)))
        return takewhile(lambda _number: self.values > 0, range(most))


def _weight(value: Any) -> int:
    match value:
        case dict():
            return 1 + sum(map(_weight, value.values()))
        case list():
            return 1 + sum(map(_weight, value))
        case _:
            return 1


def encoded(case: Any) -> bytes:
    """A case as it is kept in a file."""
    return json.dumps(case, separators=(",", ":")).encode()


def decoded(data: bytes) -> Any:
    """A case out of a file. Raises ValueError for what is none."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("a case that is nested too deeply to be read") from error
