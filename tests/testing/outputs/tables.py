"""Print TrainingJobs as `kubectl get` does, by the columns of the definition.

Compared with the real kubectl by `tests/cluster/definition/test_tables.py`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trainium_contract.definition.crd import build_custom_resource_definition
from trainium_contract.rfc3339 import parse_rfc3339

_GAP, _NARROWEST = 3, 6
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


def table(jobs: Sequence[Mapping[str, Any]], now: float, *, wide: bool = False) -> str:
    """Return a heading and a row for each job; `now` is in Unix seconds."""
    columns = build_custom_resource_definition()["spec"]["versions"][0]["additionalPrinterColumns"]
    shown = [column for column in columns if wide or not column.get("priority")]
    rows = [["NAME", *(column["name"].upper() for column in shown)]]
    rows += [[job["metadata"]["name"], *(_cell(job, column, now) for column in shown)] for job in jobs]
    widths = [max(max(map(len, column)) + _GAP, _NARROWEST) for column in zip(*rows, strict=True)]
    return "\n".join(
        "".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def read_columns(job: Mapping[str, Any]) -> dict[str, str]:
    """Return the value of each column of `kubectl get -o wide` by its name; empty where the job has none."""
    columns = build_custom_resource_definition()["spec"]["versions"][0]["additionalPrinterColumns"]
    values = {column["name"]: _read_value(job, column["jsonPath"]) for column in columns}
    return {name: "" if value is None else str(value) for name, value in values.items()}


def _read_value(job: Mapping[str, Any], path: str) -> Any:
    value: Any = job
    for name, index, kind in re.findall(r'\.(\w+)(?:\[(-?\d+)\]|\[\?\(@\.type=="(\w+)"\)\])?', path):
        value = value.get(name) if isinstance(value, dict) else None
        if index:
            value = value[int(index)] if value else None
        if kind:
            value = next((each for each in value or () if each["type"] == kind), None)
    return value


def _cell(job: Mapping[str, Any], column: Mapping[str, Any], now: float) -> str:
    value = _read_value(job, column["jsonPath"])
    if value is None:
        return ""
    return age(now - (parse_rfc3339(value) or now)) if column["type"] == "date" else f"{value}"


def age(seconds: float) -> str:
    """Format a duration as kubectl does: two units if the first is small, with seconds below ten minutes."""
    whole_seconds = int(seconds)
    minutes, hours, days = whole_seconds // _MINUTE, whole_seconds // _HOUR, whole_seconds // _DAY
    for limit, text in (
        (2 * _MINUTE, f"{whole_seconds}s"),
        (10 * _MINUTE, _two(minutes, "m", whole_seconds % _MINUTE, "s")),
        (3 * _HOUR, f"{minutes}m"),
        (8 * _HOUR, _two(hours, "h", minutes % 60, "m")),
        (2 * _DAY, f"{hours}h"),
        (8 * _DAY, _two(days, "d", hours % 24, "h")),
    ):
        if whole_seconds < limit:
            return text
    return f"{days}d"


def _two(first: int, unit: str, second: int, smaller: str) -> str:
    return f"{first}{unit}{second}{smaller}" if second else f"{first}{unit}"
