"""Refuse fields that are given and without effect, because another field switches them off, and conflicts.

One table has a model's fields and the switches that they need, another the values that are refused together. The check
of a configuration and the CEL rules of the definition both follow from them.

Guarantees:
- A field counts as given if it differs from its default; where the definition stores no default, if it is present.
- A message names the field and what it needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from trainium_contract.base import DERIVED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pydantic import BaseModel
    from pydantic.fields import FieldInfo


@dataclass(frozen=True, slots=True)
class Switch:
    """A field whose value decides whether other fields have an effect."""

    field: str
    """Its path on the wire, such as `data.format`."""
    on: tuple[Any, ...] = ()
    """The values with which the others have an effect; None: it is not given."""
    off: tuple[Any, ...] = ()
    """The values with which they have none; only read without `on`."""

    def is_on(self, value: object) -> bool:
        """Return whether the others have an effect."""
        return value in self.on if self.on else value not in self.off

    @property
    def values(self) -> str:
        """Return the listed values in words."""
        return " or ".join(_format_value(value) for value in self.on or self.off)


@dataclass(frozen=True, slots=True)
class Requirement:
    """A field that has an effect only if at least one of its switches is on."""

    field: str
    switches: tuple[Switch, ...]

    def describe(self, place: Callable[[str], str] = lambda _: "") -> str:
        """Return the refusal; `place` returns what precedes the path of a field."""
        names = [f"{place(switch.field)}{switch.field}" for switch in self.switches]
        switch, name = self.switches[0], names[0]
        if len(names) > 1:
            needs = [
                f"{name} is {switch.values}" if switch.on else f"{name} is given"
                for switch, name in zip(self.switches, names, strict=True)
            ]
            condition = f"unless {' or '.join(needs)}"
        elif None in switch.on:
            condition = f"beside {name}"
        elif None in switch.off:
            condition = f"without {name}"
        else:
            condition = f"{'unless' if switch.on else 'where'} {name} is {switch.values}"
        return f"{place(self.field)}{self.field} has no effect {condition}: leave it out"


@dataclass(frozen=True, slots=True)
class Conflict:
    """Values of several fields of the trainer's configuration that are refused together."""

    field: str
    """The field to change."""
    sentence: str
    """The refusal, with the paths of a job."""
    switches: tuple[Switch, ...]
    """Refused if all of them are on."""


def expand_requirements(fields: str, *switches: Switch) -> Iterator[Requirement]:
    """Yield a requirement for each of the fields, `folder.{first,second}` or one path."""
    folder, _, names = fields.partition("{")
    for name in names.rstrip("}").split(","):
        yield Requirement(f"{folder}{name}", switches)


def find_without_effect(model: BaseModel, table: Sequence[Requirement]) -> str | None:
    """Return the refusal of the first given field without effect; requirements on fields outside the model are skipped.

    `model` has the paths of the table at its root.
    """
    for requirement in table:
        paths = (requirement.field, *(switch.field for switch in requirement.switches))
        if any(find_field(type(model), path) is None for path in paths):
            continue
        if _is_given(model, requirement.field) and not any(
            switch.is_on(_read_value(model, switch.field)) for switch in requirement.switches
        ):
            return requirement.describe()
    return None


def find_conflict(model: BaseModel, table: Sequence[Conflict]) -> str | None:
    """Return the refusal of the first conflict in a configuration of the trainer; None without one."""
    for conflict in table:
        if all(switch.is_on(_read_value(model, switch.field)) for switch in conflict.switches):
            return conflict.sentence.replace("trainer.", "")
    return None


def find_field(model: type[BaseModel], path: str) -> FieldInfo | None:
    """Return the field at a path on the wire; None if there is none."""
    info: FieldInfo | None = None
    owner: type[BaseModel] | None = model
    for alias in path.split("."):
        info = next((info for info in owner.model_fields.values() if info.alias == alias), None) if owner else None
        owner = None if info is None else find_model(info)
    return info


def find_model(info: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a field that has fields below it, also if it is optional."""
    kinds = (info.annotation, *getattr(info.annotation, "__args__", ()))
    return next((kind for kind in kinds if isinstance(kind, type) and hasattr(kind, "model_fields")), None)


def is_stored(info: FieldInfo) -> bool:
    """Return whether the definition stores the default of a field."""
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    return info.default is not None and not extra.get(DERIVED)


def _find_owner(model: BaseModel, path: str) -> tuple[BaseModel | None, str]:
    """Return the part of a model that has the last field of a path, and that field's name."""
    *parents, last = path.split(".")
    part: Any = model
    for alias in parents:
        part = None if part is None else getattr(part, _format_name(part, alias))
    return part, "" if part is None else _format_name(part, last)


def _format_name(model: BaseModel, alias: str) -> str:
    return next(name for name, info in type(model).model_fields.items() if info.alias == alias)


def _read_value(model: BaseModel, path: str) -> Any:
    owner, name = _find_owner(model, path)
    return None if owner is None else getattr(owner, name)


def _is_given(model: BaseModel, path: str) -> bool:
    owner, name = _find_owner(model, path)
    if owner is None:
        return False
    info, value = type(owner).model_fields[name], getattr(owner, name)
    return bool(value != info.default) if is_stored(info) else name in owner.model_fields_set and value is not None


def _format_value(value: object) -> str:
    plain = value.value if isinstance(value, Enum) else value
    if isinstance(plain, tuple):
        return "[" + ", ".join(map(str, plain)) + "]"
    return str(plain).lower() if isinstance(plain, bool) else f"{plain:g}" if isinstance(plain, float) else str(plain)
