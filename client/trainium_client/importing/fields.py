"""Read the fields of a foreign object, and remember which were read.

Guarantee: each field that no format has read is listed by `list_unread`, so nothing is dropped silently.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from trainium_client.importing.source_job import Note
from trainium_contract.api_server.errors import ClientError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_INDEX = re.compile(r"\[\d+\]")


class Fields:
    """An object of a document with its path; a key may be a path below it, `runPolicy.suspend`."""

    __slots__ = ("_children", "_read", "_value", "path")

    def __init__(self, value: dict[str, Any], path: str = "") -> None:
        self.path = path
        self._value = value
        self._read: set[str] = set()
        self._children: dict[str, Fields] = {}

    def __contains__(self, key: str) -> bool:
        return self._value.get(key) is not None

    def read(self, key: str) -> Any:
        """Return a value of any type; None without one. Raises ClientError if something above it is no object."""
        parent, _, name = key.rpartition(".")
        if parent:
            return self.read_child(parent).read(name)
        self._read.add(name)
        return self._value.get(name)

    def skip(self, *keys: str) -> None:
        """Count fields as read that mean nothing for a TrainingJob."""
        for key in keys:
            self.read(key)

    def read_text(self, key: str, default: str = "") -> str:
        """Return a string. Raises ClientError for another type."""
        value: str = self._read_typed(key, str, "a text", default)
        return value

    def read_boolean(self, key: str) -> bool:
        """Return a boolean, False without one. Raises ClientError for another type."""
        value: bool = self._read_typed(key, bool, "true or false", False)
        return value

    def read_integer(self, key: str) -> int | None:
        """Return a whole number from 0, also one in quotes; None without one. Raises ClientError for anything else."""
        value = self.read(key)
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
            value = int(value)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
            return value
        raise self._build_error(key, "a whole number from 0")

    def read_mapping(self, key: str) -> dict[str, Any]:
        """Return an object as it is. Raises ClientError for another type."""
        value: dict[str, Any] = self._read_typed(key, dict, "an object", {})
        return value

    def read_texts(self, key: str) -> list[str]:
        """Return a list of strings; numbers and booleans become text. Raises ClientError for anything else."""
        items = self._read_typed(key, list, "a list", [])
        if any(isinstance(item, dict | list) or item is None for item in items):
            raise self._build_error(key, "a list of texts")
        return [str(item) for item in items]

    def read_text_map(self, key: str) -> dict[str, str]:
        """Return an object of strings. Raises ClientError for anything else."""
        mapping = self.read_mapping(key)
        if not all(isinstance(value, str) for value in mapping.values()):
            raise self._build_error(key, "an object of texts")
        return mapping

    def read_child(self, key: str) -> Fields:
        """Return an object whose fields are tracked too, always the same one. Raises ClientError for another type."""
        first, _, rest = key.partition(".")
        if first not in self._children:
            self.attach(first, self.read_mapping(first))
        return self._children[first].read_child(rest) if rest else self._children[first]

    def attach(self, key: str, value: dict[str, Any]) -> Fields:
        """Track an object as if it were the one of this key."""
        self._read.add(key)
        self._children[key] = Fields(value, f"{self.path}.{key}".lstrip("."))
        return self._children[key]

    def read_children(self, key: str) -> list[Fields]:
        """Return the objects of a list, tracked. Raises ClientError for anything else."""
        items = self._read_typed(key, list, "a list", [])
        if not all(isinstance(item, dict) for item in items):
            raise self._build_error(key, "a list of objects")
        return [self.attach(f"{key}[{number}]", item) for number, item in enumerate(items)]

    def read_rest(self, *without: str) -> dict[str, Any]:
        """Return all fields that were not read yet, without some that stay unread."""
        unread = {key: value for key, value in self._value.items() if key not in self._read and key not in without}
        self._read.update(unread)
        return unread

    def list_unread(self) -> Iterator[str]:
        """Yield the paths of all fields that were not read, here and in tracked children."""
        for key, value in self._value.items():
            if key not in self._read and value not in (None, {}, [], ""):
                yield f"{self.path}.{key}".lstrip(".")
        for child in self._children.values():
            yield from child.list_unread()

    def explain_unread(self, sentences: Mapping[str, str]) -> Iterator[Note]:
        """Yield a note for each field that was not read; `sentences` has reasons by path, without indices."""
        for path in self.list_unread():
            place = _INDEX.sub("", path)
            reasons = (text for explained, text in sentences.items() if f"{place}.".startswith(f"{explained}."))
            yield Note(f"{path}: {next(reasons, 'this field is not known to the import')}")

    def _read_typed(self, key: str, kind: type, name: str, default: Any) -> Any:
        value = self.read(key)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise self._build_error(key, name)
        return value

    def _build_error(self, key: str, name: str) -> ClientError:
        return ClientError(f"{f'{self.path}.{key}'.lstrip('.')} is not {name}: correct it")


def find_differences(first: Any, second: Any, path: str = "") -> set[str]:
    """Return the paths at which two objects differ."""
    pairs: list[tuple[str, Any, Any]] | None = None
    if isinstance(first, dict) and isinstance(second, dict):
        pairs = [(f"{path}.{key}".lstrip("."), first.get(key), second.get(key)) for key in {*first, *second}]
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = [(f"{path}[{index}]", *pair) for index, pair in enumerate(zip(first, second, strict=True))]
    if pairs is None:
        return set() if first == second else {path}
    return {found for inner, one, other in pairs for found in find_differences(one, other, inner)}
