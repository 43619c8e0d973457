"""Structured logs: one JSON object a line, with the keys `namespace`, `job` and `generation` where they are known."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

_KEYS = ("namespace", "job", "generation", "pod", "node")


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
    # kopf tells every event and every retry; what matters of it comes as a warning.
    for noisy in ("kopf", "asyncio", "aiohttp.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
