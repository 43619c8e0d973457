"""Format the logs of this project's programs, on top of `logging`, as text or JSON.

Invariants: every record becomes a line. Its extra fields count only if the schema has them, so that no secret is
included. Both forms omit what looks like a secret.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from trainium_contract.redaction import redact_secrets
from trainium_contract.wire.log_line import LogFormat, LogLevel, build_log_line
from trainium_contract.wire.worker_env import ENV_LOG_FORMAT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainium_contract.wire.log_line import LogLine, LogSource

_EXTRA_FIELDS = ("namespace", "job", "pod", "node", "generation", "attempt", "rank")
"""Fields that a record may have as `extra`."""
_MAX_LOGGER_CHARACTERS = 128


def choose_log_format(environment: Mapping[str, str]) -> LogFormat:
    """Return the log format that an environment sets. Raises ValueError with a sentence."""
    given = environment.get(ENV_LOG_FORMAT) or LogFormat.TEXT
    try:
        return LogFormat(given.lower())
    except ValueError:
        raise ValueError(f"{ENV_LOG_FORMAT}={given!r} must be {' or '.join(LogFormat)}.") from None


def format_time(seconds: float) -> str:
    """Format Unix seconds as `LogLine.time`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


class JsonFormatter(logging.Formatter):
    """Formats records as lines of the schema."""

    def __init__(self, source: LogSource, known: Callable[[], Mapping[str, object]] = dict) -> None:
        """`known()` returns fields of the line that apply to the whole program now; a record's own fields win."""
        super().__init__()
        self._source = source
        self._known = known

    def format(self, record: logging.LogRecord) -> str:
        """Format one line, without its end."""
        return self.build_line(record).to_line()

    def build_line(self, record: logging.LogRecord) -> LogLine:
        """Return the line of a record."""
        own = {key: getattr(record, key) for key in _EXTRA_FIELDS if getattr(record, key, None) is not None}
        return build_log_line(
            record.getMessage(),
            error=self.formatException(record.exc_info) if record.exc_info else None,
            time=format_time(record.created),
            level=_round_level(record.levelno),
            source=self._source,
            logger=record.name[:_MAX_LOGGER_CHARACTERS] or "root",
            **{**self._known(), **own},
        )


class TextFormatter(logging.Formatter):
    """Formats records as text, by a format of `logging`."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record, with its traceback below it."""
        return redact_secrets(super().format(record))


def _round_level(number: int) -> LogLevel:
    """Return the level of any number; a custom level counts as the next lower one."""
    if number < logging.INFO:
        return LogLevel.DEBUG
    if number < logging.WARNING:
        return LogLevel.INFO
    if number < logging.ERROR:
        return LogLevel.WARNING
    return LogLevel.ERROR if number < logging.CRITICAL else LogLevel.CRITICAL
