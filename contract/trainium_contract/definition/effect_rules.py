"""CEL rules that refuse fields without effect and values that conflict, from the tables of `effects.py`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from trainium_contract.definition.cel import RefusalReason, Rule
from trainium_contract.effects import Conflict, Requirement, Switch, find_field, is_stored
from trainium_contract.job import JOB_REQUIREMENTS, TrainingJobSpec
from trainium_contract.trainer.effects import TRAINER_CONFLICTS, TRAINER_REQUIREMENTS

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

_OF_JOB = ("parallelism.", "checkpoint.")
"""Fields of the trainer's configuration that a job has beside `trainer`."""
_KEYWORDS = ("function",)
"""Names of fields that are keywords of CEL."""
IS_LORA = "self.?trainer.?tuning.?method.orValue(self.?trainer.?tuning.?lora.hasValue() ? 'LoRA' : 'Full') == 'LoRA'"
"""Whether `tuning.method` is LoRA, also where it follows from `tuning.lora`."""


def _format_place(path: str) -> str:
    """Return what precedes a field of the trainer's configuration in a job."""
    return "" if path.startswith(_OF_JOB) else "trainer."


def _format_place_of_job(path: str) -> str:  # noqa: ARG001 - as `_format_place`
    return ""


def _find(path: str) -> FieldInfo:
    info = find_field(TrainingJobSpec, path)
    if info is None:
        raise ValueError(f"{path} is no field of a job")
    return info


def _build_optional(path: str) -> str:
    """Return a field as an optional, whichever of the fields above it are present."""
    return ".?".join(["self", *(f"__{part}__" if part in _KEYWORDS else part for part in path.split("."))])


def _format_literal(value: Any, info: FieldInfo) -> str:
    if isinstance(value, str):
        return f"'{value}'"
    return json.dumps(float(value) if info.annotation is float else value)


def _build_presence_test(path: str) -> str:
    """Return an expression that is true if a field is given."""
    info, field = _find(path), _build_optional(path)
    if not is_stored(info):
        return f"{field}.hasValue()"
    default = _format_literal(info.default, info)
    return f"{field}.orValue({default}) != {default}"


def _is_on(switch: Switch, path: str) -> str:
    """Return an expression that is true if a switch is on; where it is omitted, its default counts."""
    if path == "trainer.tuning.method" and switch.on:
        return f"({IS_LORA})"
    info, field = _find(path), _build_optional(path)
    compare, join, absent = ("==", " || ", "!") if switch.on else ("!=", " && ", "")
    parts = []
    for value in switch.on or switch.off:
        if value is None:
            parts.append(f"{absent}{field}.hasValue()")
        elif is_stored(info):
            parts.append(
                f"{field}.orValue({_format_literal(info.default, info)}) {compare} {_format_literal(value, info)}"
            )
        else:
            parts.append(f"{field}.optMap(given, given {compare} {_format_literal(value, info)}).orValue(true)")
    return f"({join.join(parts)})"


def _build_rule(requirement: Requirement, *, trainer: bool) -> Rule:
    place = _format_place if trainer else _format_place_of_job
    path = f"{place(requirement.field)}{requirement.field}"
    needs = " || ".join(_is_on(switch, f"{place(switch.field)}{switch.field}") for switch in requirement.switches)
    rule = f"!({_build_presence_test(path)}) || {needs}"
    return Rule(rule, requirement.describe(place), f".{path}", reason=RefusalReason.FORBIDDEN)


def _build_conflict_rule(conflict: Conflict) -> Rule:
    paths = [f"{_format_place(switch.field)}{switch.field}" for switch in conflict.switches]
    rule = " && ".join(_is_on(switch, path) for switch, path in zip(conflict.switches, paths, strict=True))
    is_missing = any(switch.field == conflict.field and None in switch.on for switch in conflict.switches)
    reason = RefusalReason.REQUIRED if is_missing else RefusalReason.INVALID
    return Rule(f"!({rule})", conflict.sentence, f".{_format_place(conflict.field)}{conflict.field}", reason=reason)


EFFECT_RULES: tuple[Rule, ...] = (
    *(_build_rule(requirement, trainer=True) for requirement in TRAINER_REQUIREMENTS),
    *(_build_rule(requirement, trainer=False) for requirement in JOB_REQUIREMENTS),
    *(_build_conflict_rule(conflict) for conflict in TRAINER_CONFLICTS),
    # A list is in no table.
    Rule(
        """!has(self.trainer) || self.trainer.data.format == 'Text' || !has(self.trainer.data.sources)
        || self.trainer.data.sources.all(one, !has(one.textField))""",
        "trainer.data.sources[].textField has no effect unless trainer.data.format is Text: leave it out",
        ".trainer.data.sources",
        reason=RefusalReason.FORBIDDEN,
    ),
)
"""Rules of `spec`."""
