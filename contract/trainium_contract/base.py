"""The one base of every contract model: camelCase on the wire, snake_case in Python, frozen, unknown fields refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

DERIVED = "derived"
"""Marks a field whose default the definition does not store, see `derived`."""
MATCHING = "matching"
"""JSON schema key under which `MatchesPattern` stores its pattern and its sentence."""
_Value = TypeVar("_Value")
_shared_fields_sets: dict[frozenset[str], set[str]] = {}
_MAX_SHARED_SETS = 512
"""Maximum number of sets of given fields that are shared; beyond it each message keeps a separate set."""


class ContractModel(BaseModel):
    """Base of every contract model; instances are immutable and hashable by value where their fields are."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="forbid",
        use_enum_values=False,
        use_attribute_docstrings=True,
    )

    def to_wire(self) -> dict[str, Any]:
        """Return the JSON-ready form with camelCase keys, without fields that are None."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    def replaced(self, **changes: Any) -> Self:
        """Copy the model with changed fields, without validation.

        mypy knows the fields of each model and their types (`scripts/mypy_contract.py`), so a misspelt one is an error.
        """
        # Like model_copy, but cheaper: a simulation copies models for each worker and plan.
        copied = type(self).__new__(type(self))
        object.__setattr__(copied, "__dict__", {**self.__dict__, **changes})
        object.__setattr__(copied, "__pydantic_fields_set__", self.__pydantic_fields_set__ | changes.keys())
        object.__setattr__(copied, "__pydantic_extra__", None)
        object.__setattr__(copied, "__pydantic_private__", None)
        return copied

    def set_if_omitted(self, field: str, value: Any) -> None:
        """Set a field that was not given; for validators of the model."""
        if field not in self.model_fields_set:
            self.__dict__[field] = value

    def share_fields_set(self) -> Self:
        """Share the set of given fields between models with the same one; for models that are kept for long.

        pydantic stores a set in each model: 700 bytes for more than four fields.
        """
        fields_set = self.model_fields_set
        key = frozenset(fields_set)
        if key in _shared_fields_sets or len(_shared_fields_sets) < _MAX_SHARED_SETS:
            object.__setattr__(self, "__pydantic_fields_set__", _shared_fields_sets.setdefault(key, fields_set))
        for value in self.__dict__.values():
            if isinstance(value, ContractModel):
                value.share_fields_set()
            elif isinstance(value, tuple):
                for part in value:
                    if isinstance(part, ContractModel):
                        part.share_fields_set()
        return self


class IdentityKey(Generic[_Value]):
    """Key of a cache for a value that is not hashable and never changes: equal only to the key of the same object."""

    __slots__ = ("value",)

    def __init__(self, value: _Value) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def derived(default: Any, **bounds: Any) -> Any:
    """Declare a field with bounds whose default adapts to other fields of the same file.

    Guarantees:
    - The definition does not store the default, so a reader knows that the field was not given.
    - A value that equals the default is not written to the wire.
    """
    return Field(default, exclude_if=lambda value: value == default, json_schema_extra={DERIVED: True}, **bounds)


@dataclass(frozen=True, slots=True)
class MatchesPattern:
    """Annotation of a text that must match a regular expression; `sentence` explains the form.

    The definition has the sentence as a rule, because the refusal of a schema's `pattern` shows only the expression.
    """

    pattern: str
    """In the common syntax of Python and RE2; it must match the whole text."""
    sentence: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate the text after its type and length."""
        return core_schema.no_info_after_validator_function(self._validate, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Carry pattern and sentence to `definition/crd.py`."""
        return {**handler(schema), MATCHING: {"pattern": self.pattern, "sentence": self.sentence}}

    def _validate(self, text: str) -> str:
        if re.fullmatch(self.pattern, text) is None:
            raise PydanticCustomError("text_form", "{sentence}", {"sentence": self.sentence})
        return text


class MessageModel(ContractModel):
    """Base of messages and status: a reader ignores unknown fields, so that versions can differ."""

    model_config = ConfigDict(extra="ignore")


class StatusModel(MessageModel):
    """Base of the parts of a job's status: only numbers that JSON can represent."""

    model_config = ConfigDict(allow_inf_nan=False)


Text = Annotated[str, Field(max_length=1024)]
"""A bounded sentence for people."""
Name = Annotated[str, Field(min_length=1, max_length=253)]
"""A Kubernetes object name."""
