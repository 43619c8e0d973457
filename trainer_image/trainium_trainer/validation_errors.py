"""Explain a validation error of pydantic: field, value, bound and remedy."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

M = TypeVar("M", bound=BaseModel)


def validate(model: type[M], fields: Any, where: str = "") -> M:
    """Return the fields as a model. Raises UserError with the first problem; `where` begins its sentence."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise UserError(where + explain(error, model)) from error


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Return the first problem of a validation error as one sentence, with the number of further problems."""
    details = error.errors()
    first = find_first_problem(details)
    message = _format_problem(first, model)
    more = len(details) - 1
    return message + (f" (and {more} more problem{'s' if more > 1 else ''})" if more else "")


def find_first_problem(details: list[ErrorDetails]) -> ErrorDetails:
    """Return the problem to report: an unknown field before all others, which often follow from it."""
    return min(details, key=lambda item: item["type"] != "extra_forbidden")


def _format_problem(item: ErrorDetails, model: type[BaseModel]) -> str:
    field = ".".join(str(part) for part in item["loc"]) or "the configuration"
    context = item.get("ctx", {})
    value = item["input"]
    subject = f"{field} is {value!r}" if isinstance(value, (str, int, float, bool)) or value is None else field
    match item["type"]:
        case "extra_forbidden":
            return _find_unknown_field(item["loc"], model)
        case "value_error":
            return str(context["error"])
        case "enum":
            return f"{subject}, which is not one of its values: use {context['expected']}"
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            return f"{subject}: use {_format_range(item, model)}"
        case "int_parsing" | "int_type" | "int_from_float":
            return f"{subject}, which is not a whole number: use one"
        case "float_parsing" | "float_type" | "finite_number":
            return f"{subject}, which is not a number: use one"
        case "bool_parsing" | "bool_type":
            return f"{subject}, which is neither true nor false: use one of them"
        case "string_type":
            return f"{subject}, which is not text: use quotes"
        case "string_too_short":
            return f"{field} is empty: give a value or leave the field out"
        case "string_too_long":
            return f"{field} has {len(value)} characters: use at most {context['max_length']}"
        case "missing":
            return f"{field} is missing: give a value"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{field} is {value!r}, but it has fields of its own: write them below it, or leave it out"
        case _:
            return f"{subject}: {item['msg']}; correct the value or leave the field out"


_WORDS = {"ge": "of at least {}", "gt": "greater than {}", "le": "at most {}", "lt": "less than {}"}
_LARGEST = 2**31 - 1


def _format_range(item: ErrorDetails, model: type[BaseModel]) -> str:
    """Format both ends of the field's legal range, if they are useful to a user."""
    bounds = {key: value for key, value in item.get("ctx", {}).items() if key in _WORDS}
    for part in _find_constraints(item["loc"], model):
        for key in _WORDS:
            bound = getattr(part, key, None)
            if bound is not None:
                bounds.setdefault(key, bound)
    # The limit of a 32-bit number is reported only if the value exceeds it.
    if bounds.get("le") == _LARGEST and item["type"] != "less_than_equal":
        del bounds["le"]
    words = [_WORDS[key].format(_format_number(bounds[key])) for key in ("ge", "gt", "le", "lt") if key in bounds]
    text = " and ".join(words)
    return f"a number {text if text.startswith(('of', 'greater')) else 'of ' + text}"


def _format_number(bound: float) -> float:
    """Format a number as a user writes it: 1 for 1.0."""
    return int(bound) if float(bound).is_integer() else bound


def _find_constraints(location: tuple[int | str, ...], model: type[BaseModel]) -> list[Any]:
    """Return the bounds that the field at `location` declares in any layer of its annotation."""
    owner: type[BaseModel] | None = model
    for name in location[:-1]:
        owner = _find_child(owner, str(name)) if owner else None
    if owner is None:
        return []
    for key, info in owner.model_fields.items():
        if location[-1] in (key, info.alias):
            return [*info.metadata, *_list_annotated_parts(info.annotation)]
    return []


def _list_annotated_parts(annotation: Any) -> list[Any]:
    parts: list[Any] = []
    for part in (annotation, *getattr(annotation, "__args__", ())):
        for meta in getattr(part, "__metadata__", ()):
            parts += getattr(meta, "metadata", [meta])
    return parts


def _find_unknown_field(location: tuple[int | str, ...], model: type[BaseModel]) -> str:
    names = [str(part) for part in location]
    owner: type[BaseModel] | None = model
    for name in names[:-1]:
        owner = _find_child(owner, name) if owner else None
    fields = sorted(info.alias or key for key, info in owner.model_fields.items()) if owner else []
    close = difflib.get_close_matches(names[-1], fields, n=1)
    advice = f"did you mean {close[0]}?" if close else f"known fields: {', '.join(fields)}"
    return f"{'.'.join(names)} is not a field: {advice}"


def _find_child(model: type[BaseModel], alias: str) -> type[BaseModel] | None:
    for key, info in model.model_fields.items():
        if alias in (key, info.alias):
            for kind in (info.annotation, *getattr(info.annotation, "__args__", ())):
                if isinstance(kind, type) and hasattr(kind, "model_fields"):
                    return kind
    return None
