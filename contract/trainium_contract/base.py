"""The one base of every contract model: camelCase on the wire, snake_case in Python, frozen, unknown fields refused."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


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
        """The JSON-ready form with camelCase keys; fields that are None are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    def replaced(self, **changes: Any) -> Self:
        """A copy with these fields changed, not validated anew.

        mypy knows the fields of each model, and their types (`scripts/mypy_replaced.py`): a misspelt one is an error.
        """
        return self.model_copy(update=changes)


class MessageModel(ContractModel):
    """Base of messages and status: a reader ignores fields it does not know, so that old and new sides can talk."""

    model_config = ConfigDict(extra="ignore")


class StatusModel(MessageModel):
    """Base of what a job's status is made of: only numbers that JSON can carry, whoever edited it."""

    model_config = ConfigDict(allow_inf_nan=False)


Text = Annotated[str, Field(max_length=1024)]
"""A bounded human sentence."""
Name = Annotated[str, Field(min_length=1, max_length=253)]
"""A Kubernetes object name."""
