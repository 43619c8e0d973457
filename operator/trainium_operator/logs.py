"""Structured logs: one JSON object a line, with the keys `namespace`, `job` and `generation` where they are known.

Invariant: what others can have written as often as they like (`OF_OTHERS`) is bounded by the minute; errors never are.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

_KEYS = ("namespace", "job", "generation", "pod", "node")

OF_OTHERS = ("trainium_operator.coordinator.server", "trainium_operator.entrance.door.http")
"""Loggers that tell of requests and connections, each of which costs its sender nothing."""
MOST_LINES = 60
"""Of one such logger within a minute."""
_MINUTE = 60.0


class Bounded(logging.Filter):
    """Leaves out lines of one of `OF_OTHERS` beyond so many a minute; the next line after it says how many."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._since: dict[str, float] = {}
        self._told: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is written."""
        if record.name not in OF_OTHERS or record.levelno >= logging.ERROR:
            return True
        now, told = self._clock(), self._told.get(record.name, 0)
        if now - self._since.setdefault(record.name, now) >= _MINUTE:
            if told > MOST_LINES:
                record.msg = f"{record.getMessage()} ({told - MOST_LINES} lines before it were left out)"
                record.args = ()
            self._since[record.name], told = now, 0
        self._told[record.name] = told + 1
        return told < MOST_LINES


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON; extra keys other than the known ones are left out, so that no secret slips in."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({key: getattr(record, key) for key in _KEYS if getattr(record, key, None) is not None})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logs(level: str, style: str, stream: TextIO | None = None) -> None:
    """Send all logs to `stream` (standard error) in one style, `json` or `text`."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        JsonFormatter() if style == "json" else logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    handler.addFilter(Bounded())
    # kopf tells every event and every retry; what matters of it comes as a warning.
    for noisy in ("kopf", "asyncio", "aiohttp.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
