"""Record the spec of a failed job by fields, and compare it with later versions.

Number and length of the fields are bounded. A longer value is cut and a secret is left out; both are followed by a
digest, so that a change of them is detected. No value of a pod template is kept, because its variables may hold secrets
of any form.

Invariant: two specs with the same record are the same spec, except for collisions of 32 bits of SHA-256.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from trainium_contract.base import StatusModel
from trainium_contract.redaction import redact_secrets

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAX_FIELDS = 256
MAX_CHANGES = 32
_MAX_PATH_LENGTH = 160
_MAX_VALUE_LENGTH = 100
_OMITTED_FIELDS = "…"
"""All fields beyond the bound, as one."""
_REDACTED_PREFIX = "workers.template."


class SpecField(StatusModel):
    """One field of a spec."""

    field: Annotated[str, Field(max_length=256)]
    """Its path below `spec`, for instance trainer.data.source."""
    value: Annotated[str, Field(max_length=256)]
    """Value as JSON; what is cut or left out is followed by `#` and a digest."""


class SpecChange(StatusModel):
    """One field that differs from the failed spec."""

    field: Annotated[str, Field(max_length=256)]
    """Its path below `spec`."""
    was: Annotated[str, Field(max_length=256)] = ""
    """Value that failed; empty where it was not set."""
    now: Annotated[str, Field(max_length=256)] = ""
    """Value since then; empty where it is not set."""


class FailedSpecStatus(StatusModel):
    """The spec of a failed job, and the changes since, which apply from a retry on."""

    fields: Annotated[tuple[SpecField, ...], Field(max_length=MAX_FIELDS)] = ()
    """The spec that failed; empty if unknown."""
    changes: Annotated[tuple[SpecChange, ...], Field(max_length=MAX_CHANGES)] | None = None
    """Differences from it, by field; empty for none, absent if unknown."""


def record_failed_spec(spec: Mapping[str, Any]) -> FailedSpecStatus:
    """Record a spec in its wire form, with no changes since."""
    return FailedSpecStatus(fields=_list_spec_fields(spec), changes=())


def compare_failed_spec(record: FailedSpecStatus, spec: Mapping[str, Any]) -> FailedSpecStatus:
    """Compare the record with this spec."""
    if not record.fields:
        return record
    was, now = ({item.field: item.value for item in fields} for fields in (record.fields, _list_spec_fields(spec)))
    changes = (
        SpecChange(field=name, was=was.get(name, ""), now=now.get(name, ""))
        for name in sorted(was.keys() | now.keys())
        if was.get(name) != now.get(name)
    )
    return record.replaced(changes=tuple(changes)[:MAX_CHANGES])


def _list_spec_fields(spec: Mapping[str, Any]) -> tuple[SpecField, ...]:
    leaves = sorted(_iterate_leaves("", spec))
    shown, omitted = leaves[:MAX_FIELDS], leaves[MAX_FIELDS:]
    if omitted:
        shown, omitted = leaves[: MAX_FIELDS - 1], leaves[MAX_FIELDS - 1 :]
    fields = [
        SpecField(field=_truncate(path, _MAX_PATH_LENGTH), value=_redact_value(path, text)) for path, text in shown
    ]
    if omitted:
        fields.append(SpecField(field=_OMITTED_FIELDS, value=f"#{_digest(json.dumps(omitted))}"))
    return tuple(fields)


def _iterate_leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the path of each leaf with its JSON; a list of plain values is one leaf."""
    if isinstance(value, dict) and value:
        for key, element in value.items():
            yield from _iterate_leaves(f"{path}.{key}" if path else str(key), element)
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        for index, element in enumerate(value):
            yield from _iterate_leaves(f"{path}[{index}]", element)
    elif path:
        yield path, json.dumps(value, ensure_ascii=False, sort_keys=True)


def _redact_value(path: str, text: str) -> str:
    if path.startswith(_REDACTED_PREFIX):
        return f"#{_digest(text)}"
    shown = redact_secrets(text)
    return _truncate(shown, _MAX_VALUE_LENGTH) if shown == text else f"{shown[:_MAX_VALUE_LENGTH]}#{_digest(text)}"


def _truncate(text: str, max_length: int) -> str:
    return text if len(text) <= max_length else f"{text[: max_length - 10]}…#{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
