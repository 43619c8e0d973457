"""Change cases by their structure: a key stays a key, and values come from fields of the same name.

A change depends on the case, the random generator and the donors alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.testing.fuzz.hostile import LEAVES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from random import Random

MOST_CHANGES = 5
MOST_DONATIONS = 64
"""Values that are kept of a key."""
STAYS_HERE = 0.12
"""Of the way down into a case, chance at each level that this is the place; at the whole of it a tenth of that."""
LARGE_ONE_IN = 40
"""Repetitions that are meant to be too many; they take long, so they are rare."""
_EDGES = (-1, 1, -2, 2, 10, -10, 1000)


class Mutator:
    """Change cases at random."""

    def __init__(
        self,
        donors: Iterable[Any],
        by_key: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        """`donors`: cases whose parts are put into others; `by_key`: further values by key, from a schema."""
        self._by_key: dict[str, list[Any]] = {key: list(values) for key, values in (by_key or {}).items()}
        for donor in donors:
            self._learn(donor)
        self._by_key = {key: values for key, values in self._by_key.items() if values}
        self._keys = sorted(self._by_key)

    def changed(self, case: Any, rng: Random) -> Any:
        """Return the case after a few changes, which are made in place."""
        holder = [case]
        for _ in range(1 + min(rng.getrandbits(8) % MOST_CHANGES, rng.getrandbits(8) % MOST_CHANGES)):
            self._change_one(holder, rng)
        return holder[0]

    def _learn(self, value: Any) -> None:
        for key, inner in value.items() if isinstance(value, dict) else ():
            known = self._by_key.setdefault(key, [])
            if len(known) < MOST_DONATIONS and inner not in known:
                known.append(inner)
            self._learn(inner)
        for inner in value if isinstance(value, list) else ():
            self._learn(inner)

    def _change_one(self, root: list[Any], rng: Random) -> None:
        holder: Any = root
        key: Any = 0
        while True:
            inner = holder[key]
            stays = STAYS_HERE / 10 if holder is root else STAYS_HERE
            if not isinstance(inner, (dict, list)) or not inner or rng.random() < stays:
                break
            holder, key = inner, rng.choice(list(inner)) if isinstance(inner, dict) else rng.randrange(len(inner))
        match rng.randrange(12):
            case 0 | 1 if holder is not root:
                del holder[key]
            case 2:
                holder[key] = self._leaf(rng)
            case 3 | 4:
                holder[key] = self._donated(key, rng)
            case 5:
                self._add(holder, holder[key], rng)
            case 6:
                holder[key] = self._repeated(holder[key], rng)
            case 7:
                holder[key] = self._wrapped(holder[key], rng)
            case 8 if len(holder) > 1:
                other = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
                holder[key], holder[other] = holder[other], holder[key]
            case _:
                holder[key] = self._near(holder[key], rng)

    def _leaf(self, rng: Random) -> Any:
        return _copied(rng.choice(LEAVES))

    def _donated(self, key: Any, rng: Random) -> Any:
        known: Sequence[Any] | None = self._by_key.get(key) if isinstance(key, str) else None
        if not known or rng.randrange(8) == 0:
            known = self._by_key[rng.choice(self._keys)] if self._keys else LEAVES
        return _copied(rng.choice(known))

    def _add(self, holder: Any, value: Any, rng: Random) -> None:
        if isinstance(holder, list):
            holder.insert(rng.randrange(len(holder) + 1), _copied(value) if rng.randrange(2) else self._leaf(rng))
        elif self._keys:
            key = rng.choice(self._keys)
            holder[key] = self._donated(key, rng)

    def _repeated(self, value: Any, rng: Random) -> Any:
        times = rng.randrange(2, 20) if rng.randrange(4) else rng.randrange(2, 300)
        if rng.randrange(LARGE_ONE_IN) == 0:
            times = 1 << rng.randrange(8, 19)
        match rng.randrange(5):
            case 0:
                return {"$deep": [times, value]}
            case 1:
                return {"$keys": [times, value]}
            case 2 | 3 if isinstance(value, str):
                return {"$text": [times * 4, value or "x"]}
            case 2 if isinstance(value, int):
                return {"$digits": times}
            case _:
                return {"$list": [times, value]}

    def _wrapped(self, value: Any, rng: Random) -> Any:
        if isinstance(value, (dict, list)) and value and rng.randrange(2):
            return rng.choice(list(value.values()) if isinstance(value, dict) else value)
        return [value] if rng.randrange(2) else {rng.choice(self._keys) if self._keys else "": value}

    def _near(self, value: Any, rng: Random) -> Any:
        """Return nearly the same value."""
        match value:
            case bool():
                return not value
            case int():
                return value + rng.choice(_EDGES) if rng.randrange(4) else rng.choice((-value, str(value), value / 2))
            case float():
                return rng.choice((-value, value * 1e9, value / 1e9, str(value)))
            case str():
                return self._text_near(value, rng)
            case list() if value:
                return value[: rng.randrange(len(value))] if rng.randrange(2) else value[::-1]
            case dict() if value:
                key = rng.choice(list(value))
                return {
                    **{each: inner for each, inner in value.items() if each != key},
                    self._text_near(key, rng): value[key],
                }
            case _:
                return self._leaf(rng)

    def _text_near(self, text: str, rng: Random) -> str:
        at = rng.randrange(len(text) + 1)
        match rng.randrange(6):
            case 0:
                return text[:at]
            case 1:
                return (
                    text[:at]
                    + chr(rng.choice((0, 9, 10, 34, 37, 45, 47, 61, 92, 127, 0x660, 0xFFFF, 0x1F525)))
                    + text[at:]
                )
            case 2:
                return text[:at] + text[at + 1 :]
            case 3:
                return text + text
            case 4:
                return text.swapcase()
            case _:
                return text[:at] + str(rng.choice(LEAVES[:30])) + text[at:]


def _copied(value: Any) -> Any:
    match value:
        case dict():
            return {key: _copied(inner) for key, inner in value.items()}
        case list():
            return [_copied(inner) for inner in value]
        case _:
            return value
