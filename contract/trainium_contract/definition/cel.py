"""Write rules in the Common Expression Language (CEL) for the API server.

Invariant: nothing here needs a newer version than Kubernetes 1.30. Before 1.33 the API server bounds neither the cost
of comparing two optionals nor that of a comprehension over the result of `map`, and the name of a field that is a
keyword of CEL is written with two underscores around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class RefusalReason(StrEnum):
    """Reason of a refusal, as the API server reports it."""

    INVALID = "FieldValueInvalid"
    FORBIDDEN = "FieldValueForbidden"
    REQUIRED = "FieldValueRequired"


@dataclass(frozen=True, slots=True)
class Rule:
    """One CEL rule; `message` is a literal sentence, `expression` a computed one that can contain the values.

    The API server uses the sentence if the expression fails or is too long, so it is required.
    """

    rule: str
    message: str
    field: str = ""
    """Path of the field to change, below the schema with the rule; empty for the whole."""
    expression: str = ""
    reason: RefusalReason = RefusalReason.INVALID
    optional_old: bool = False
    """Whether it is also checked at creation, with `oldSelf` as an optional."""

    def to_schema(self) -> dict[str, Any]:
        """Return the entry of x-kubernetes-validations."""
        given: dict[str, Any] = {"rule": " ".join(self.rule.split()), "message": self.message}
        if self.expression:
            given["messageExpression"] = " ".join(self.expression.split())
        if self.field:
            given["fieldPath"] = self.field
        if self.reason is not RefusalReason.INVALID:
            given["reason"] = self.reason.value
        if self.optional_old:
            given["optionalOldSelf"] = True
        return given


# CEL before Kubernetes 1.34 has no range, so the numbers below 10,000 are written as hundreds and ones.
ZERO_TO_99 = "[" + ",".join(str(number) for number in range(100)) + "]"


def format_message(text: str, *values: str) -> str:
    """Return an expression that formats `text`, with a %s for each of `values`; `c` is the cores per node.

    It formats in one call instead of joining: the API server cannot bound the length of `string(number)` and would
    refuse the concatenation as too costly.
    """
    return f"'{text}'.format([{', '.join(f'dyn({value})' for value in values)}])"


def bind_value(name: str, value: str, condition: str) -> str:
    """Bind a value to a name in `condition`, so that each step of a search does not read it from the object."""
    return f"[{value}].all({name}, {condition})"


def exists_up_to(limit: str, root: int, name: str, condition: str) -> str:
    """Return an expression that is true if `condition` holds for some `name` >= 1 with name ** root <= `limit`."""
    hundreds = " * ".join(["h * 100"] * root)
    power = " * ".join([name] * root)
    number = bind_value(name, "h * 100 + l", f"{name} >= 1 && {power} <= {limit} && {condition}")
    return f"{ZERO_TO_99}.exists(h, {hundreds} <= {limit} && {ZERO_TO_99}.exists(l, {number}))"
