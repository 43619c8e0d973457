"""Cases are changed where they are what they are: a key stays a key, and values come from where such a key had one.

Invariant: a change depends on the case, the dice and the donors alone, so that a seed gives the same cases again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.testing.fuzz.hostile import LEAVES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from random import Random

MOST_CHANGES = 5
MOST_DONATIONS = 64
"""Values that are remembered of one key."""
STAYS_HERE = 0.12
"""Of the way down into a case, chance at each level that this is the place; at the whole of it a tenth of that."""
LARGE_ONE_IN = 40
"""Repetitions that are meant to be too many; they take long, so they are rare."""
_EDGES = (-1, 1, -2, 2, 10, -10, 1000)


class Mutator:
    """`changed` makes another case of one, by `dice`."""

    def __init__(
        self,
        donors: Iterable[Any],
        by_key: Mapping[str, Sequence[Any]] | None = None,
        *,
        bytes_changed: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """`donors`: cases whose parts are put into others; `by_key`: further values by key, as a schema knows them.

        `bytes_changed` changes a text, where whoever guides the search knows better than dice.
        """
        self._by_key: dict[str, list[Any]] = {key: list(values) for key, values in (by_key or {}).items()}
        for donor in donors:
            self._learn(donor)
        self._by_key = {key: values for key, values in self._by_key.items() if values}
        self._keys = sorted(self._by_key)
        self._bytes_changed = bytes_changed

    def changed(self, case: Any, dice: Random) -> Any:
        """The case after a few changes. It is changed in place; what was handed in is not to be used any more."""
        holder = [case]
        for _ in range(1 + min(dice.getrandbits(8) % MOST_CHANGES, dice.getrandbits(8) % MOST_CHANGES)):
            self._change_one(holder, dice)
        return holder[0]

    def crossed(self, case: Any, other: Any, dice: Random) -> Any:
        """A case with parts of both; neither is to be used any more."""
        match case, other:
            case dict(), dict():
                shared = [key for key in case if key in other]
                for key in shared:
                    case[key] = self.crossed(case[key], other[key], dice)
                missing = [key for key in other if key not in case]
                if missing:
                    key = dice.choice(missing)
                    case[key] = other[key]
                return case
            case list(), list():
                return case[: dice.randrange(len(case) + 1)] + other[dice.randrange(len(other) + 1) :]
            case _:
                return dice.choice((case, other))

    def _learn(self, value: Any) -> None:
        for key, inner in value.items() if isinstance(value, dict) else ():
            known = self._by_key.setdefault(key, [])
            if len(known) < MOST_DONATIONS and inner not in known:
                known.append(inner)
            self._learn(inner)
        for inner in value if isinstance(value, list) else ():
            self._learn(inner)

    def _change_one(self, root: list[Any], dice: Random) -> None:
        holder: Any = root
        key: Any = 0
        while True:
            inner = holder[key]
            stays = STAYS_HERE / 10 if holder is root else STAYS_HERE
            if not isinstance(inner, (dict, list)) or not inner or dice.random() < stays:
                break
            holder, key = inner, dice.choice(list(inner)) if isinstance(inner, dict) else dice.randrange(len(inner))
        match dice.randrange(12):
            case 0 | 1 if holder is not root:
                del holder[key]
            case 2:
                holder[key] = self._leaf(dice)
            case 3 | 4:
                holder[key] = self._donated(key, dice)
            case 5:
                self._add(holder, holder[key], dice)
            case 6:
                holder[key] = self._repeated(holder[key], dice)
            case 7:
                holder[key] = self._wrapped(holder[key], dice)
            case 8 if len(holder) > 1:
                other = dice.choice(list(holder)) if isinstance(holder, dict) else dice.randrange(len(holder))
                holder[key], holder[other] = holder[other], holder[key]
            case _:
                holder[key] = self._near(holder[key], dice)

    def _leaf(self, dice: Random) -> Any:
        return _copied(dice.choice(LEAVES))

    def _donated(self, key: Any, dice: Random) -> Any:
        known: Sequence[Any] | None = self._by_key.get(key) if isinstance(key, str) else None
        if not known or dice.randrange(8) == 0:
            known = self._by_key[dice.choice(self._keys)] if self._keys else LEAVES
        return _copied(dice.choice(known))

    def _add(self, holder: Any, value: Any, dice: Random) -> None:
        if isinstance(holder, list):
            holder.insert(dice.randrange(len(holder) + 1), _copied(value) if dice.randrange(2) else self._leaf(dice))
        elif self._keys:
            key = dice.choice(self._keys)
            holder[key] = self._donated(key, dice)

    def _repeated(self, value: Any, dice: Random) -> Any:
        times = dice.randrange(2, 20) if dice.randrange(4) else dice.randrange(2, 300)
        if dice.randrange(LARGE_ONE_IN) == 0:
            times = 1 << dice.randrange(8, 19)
        match dice.randrange(5):
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

    def _wrapped(self, value: Any, dice: Random) -> Any:
        if isinstance(value, (dict, list)) and value and dice.randrange(2):
            return dice.choice(list(value.values()) if isinstance(value, dict) else value)
        return [value] if dice.randrange(2) else {dice.choice(self._keys) if self._keys else "": value}

    def _near(self, value: Any, dice: Random) -> Any:
        """Nearly the same, as an error or an attacker would have it."""
        match value:
            case bool():
                return not value
            case int():
                return (
                    value + dice.choice(_EDGES) if dice.randrange(4) else dice.choice((-value, str(value), value / 2))
                )
            case float():
                return dice.choice((-value, value * 1e9, value / 1e9, str(value)))
            case str():
                return self._text_near(value, dice)
            case list() if value:
                return value[: dice.randrange(len(value))] if dice.randrange(2) else value[::-1]
            case dict() if value:
                key = dice.choice(list(value))
                return {
                    **{each: inner for each, inner in value.items() if each != key},
                    self._text_near(key, dice): value[key],
                }
            case _:
                return self._leaf(dice)

    def _text_near(self, text: str, dice: Random) -> str:
        if self._bytes_changed is not None and dice.randrange(2):
            changed = self._bytes_changed(text.encode("utf-8", "surrogatepass"))
            return changed.decode("utf-8", "replace")
        at = dice.randrange(len(text) + 1)
        match dice.randrange(6):
            case 0:
                return text[:at]
            case 1:
                return (
                    text[:at]
                    + chr(dice.choice((0, 9, 10, 34, 37, 45, 47, 61, 92, 127, 0x660, 0xFFFF, 0x1F525)))
                    + text[at:]
                )
            case 2:
                return text[:at] + text[at + 1 :]
            case 3:
                return text + text
            case 4:
                return text.swapcase()
            case _:
                return text[:at] + str(dice.choice(LEAVES[:30])) + text[at:]


def _copied(value: Any) -> Any:
    match value:
        case dict():
            return {key: _copied(inner) for key, inner in value.items()}
        case list():
            return [_copied(inner) for inner in value]
        case _:
            return value
