"""Configure the operator's log: lines of the contract's schema (`wire/log_line.py`), or text for people.

Invariant: lines that clients can cause at will (`LIMITED_LOGGERS`) are limited per minute; errors never are.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, TextIO

from trainium_contract.wire.log_format import JsonFormatter, TextFormatter
from trainium_contract.wire.log_line import LogFormat, LogSource
from trainium_contract.wire.worker_env import KIND

if TYPE_CHECKING:
    from collections.abc import Callable

LIMITED_LOGGERS = ("trainium_operator.coordinator.server", "trainium_operator.http.listener.http")
"""Loggers of requests and connections, which cost their senders nothing."""
MAX_LINES = 60
"""Limit for one such logger within a minute."""
_MINUTE = 60.0


class LineLimitFilter(logging.Filter):
    """Drops lines of `LIMITED_LOGGERS` beyond a number per minute; the next line has their count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._since: dict[str, float] = {}
        self._reported: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written."""
        if record.name not in LIMITED_LOGGERS or record.levelno >= logging.ERROR:
            return True
        now, reported = self._clock(), self._reported.get(record.name, 0)
        if now - self._since.setdefault(record.name, now) >= _MINUTE:
            if reported > MAX_LINES:
                record.msg = f"{record.getMessage()} ({reported - MAX_LINES} lines before it were left out)"
                record.args = ()
            self._since[record.name], reported = now, 0
        self._reported[record.name] = reported + 1
        return reported < MAX_LINES


def _name_the_job(record: logging.LogRecord) -> bool:
    """Set the job of a kopf record, which names its object differently; the record is always written."""
    about = getattr(record, "k8s_ref", None)
    if isinstance(about, dict) and about.get("kind") == KIND:
        record.namespace, record.job = about.get("namespace"), about.get("name")
    return True


def configure_logs(level: str, style: str, stream: TextIO | None = None) -> None:
    """Send all logs to `stream` (standard error) in one format, `json` or `text`."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        JsonFormatter(LogSource.OPERATOR)
        if style == LogFormat.JSON
        else TextFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    handler.addFilter(LineLimitFilter())
    handler.addFilter(_name_the_job)
    # kopf logs every event and every retry; only its warnings matter
    for noisy in ("kopf", "asyncio", "aiohttp.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
