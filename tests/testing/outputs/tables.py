"""Print TrainingJobs as `kubectl get` does, by the columns of the definition.

Compared with the real kubectl by `tests/cluster/definition/test_tables.py`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trainium_contract.definition.crd import custom_resource_definition
from trainium_contract.views.raw import parse_rfc3339

_GAP, _NARROWEST = 3, 6
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


def table(jobs: Sequence[Mapping[str, Any]], now: float, *, wide: bool = False) -> str:
    """Heading and a row for each job; `now` in Unix seconds."""
    columns = custom_resource_definition()["spec"]["versions"][0]["additionalPrinterColumns"]
    shown = [each for each in columns if wide or not each.get("priority")]
    rows = [["NAME", *(each["name"].upper() for each in shown)]]
    rows += [[job["metadata"]["name"], *(_cell(job, each, now) for each in shown)] for job in jobs]
    widths = [max(max(map(len, column)) + _GAP, _NARROWEST) for column in zip(*rows, strict=True)]
    return "\n".join(
        "".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _cell(job: Mapping[str, Any], column: Mapping[str, Any], now: float) -> str:
    value: Any = job
    for name, index in re.findall(r"\.(\w+)(?:\[(-?\d+)\])?", column["jsonPath"]):
        value = value.get(name) if isinstance(value, dict) else None
        if index:
            value = value[int(index)] if value else None
    if value is None:
        return ""
    return age(now - (parse_rfc3339(value) or now)) if column["type"] == "date" else f"{value}"


def age(seconds: float) -> str:
    """A duration in kubectl's words: two units where the first is small, of seconds only below ten minutes."""
    whole = int(seconds)
    minutes, hours, days = whole // _MINUTE, whole // _HOUR, whole // _DAY
    for limit, text in (
        (2 * _MINUTE, f"{whole}s"),
        (10 * _MINUTE, _two(minutes, "m", whole % _MINUTE, "s")),
        (3 * _HOUR, f"{minutes}m"),
        (8 * _HOUR, _two(hours, "h", minutes % 60, "m")),
        (2 * _DAY, f"{hours}h"),
        (8 * _DAY, _two(days, "d", hours % 24, "h")),
    ):
        if whole < limit:
            return text
    return f"{days}d"


def _two(first: int, unit: str, second: int, smaller: str) -> str:
    return f"{first}{unit}{second}{smaller}" if second else f"{first}{unit}"
