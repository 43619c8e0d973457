"""Define one JSON line of a log, as operator, agents and training processes write it and tools read it.

Invariants: writers are strict, readers lenient (unknown or unusable fields are left out, another line is None). A line
is at most `LINE_BYTES` long, because container runtimes split longer ones. It is ASCII, so nothing in it controls a
terminal. Keys and tokens are removed from lines of this project's programs.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, ValidationError

from trainium_contract.base import ContractModel, Name
from trainium_contract.redaction import redact_secrets

LINE_BYTES = 16_000
"""Without the end of the line; containerd and CRI-O break lines at 16 KiB."""
MESSAGE_CHARACTERS = 4_096
ERROR_CHARACTERS = 8_192
EXIT_LOGGER = "trainium.exit"
"""Logger of the sentence that explains a program's end."""
PROGRAM = "program"
"""Logger of a program's output that did not use a logger of this project."""
_MAX_READ_CHARACTERS = 1 << 16
_OPENING = "{"


class LogFormat(StrEnum):
    """Form of a program's log."""

    TEXT = "text"
    """For people."""
    JSON = "json"
    """Lines of this schema, for log collectors."""


class LogSource(StrEnum):
    """The program that wrote the line."""

    OPERATOR = "operator"
    AGENT = "agent"
    """Process 1 of a worker pod."""
    TRAINER = "trainer"
    """A training process (then with its rank), or another command of the trainer."""
    OUTPUT = "output"
    """A training process too, but outside its log: the output of a user's code or a library, unchanged."""


class LogLevel(StrEnum):
    """Severity of a line."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


_Count = Annotated[int, Field(ge=0)]


class LogLine(ContractModel):
    """One line; fields that do not apply, or are not known to the writer, are absent."""

    time: str = Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)$")
    """RFC 3339."""
    level: LogLevel
    source: LogSource
    logger: str = Field(min_length=1, max_length=128)
    """The part of the program, as `trainium_operator.cluster.lease`; `program` for output."""
    message: str = Field(max_length=MESSAGE_CHARACTERS)
    namespace: Name | None = None
    """Namespace of the job."""
    job: Name | None = None
    pod: Name | None = None
    node: Name | None = None
    generation: _Count | None = None
    attempt: _Count | None = None
    rank: _Count | None = None
    error: str | None = Field(default=None, max_length=ERROR_CHARACTERS)
    """The traceback, or its end if it is long."""

    def to_line(self) -> str:
        """Serialize the line, without its end; message and traceback are cut to fit."""
        line, written = self, json.dumps(self.to_wire())
        while len(written) > LINE_BYTES:
            # Escaped characters take up to six times their length.
            if line.error and len(line.error) > len(line.message):
                line = line.replaced(error=line.error[len(line.error) // 2 :])
            else:
                line = line.replaced(message=line.message[: len(line.message) // 2])
            written = json.dumps(line.to_wire())
        return written

    def as_text(self) -> str:
        """Format the line as the same program writes it to a text log; several lines if there is a traceback."""
        clock, level = self.time[11:19], self.level.upper()
        # As `logging` writes a time.
        stamp = f"{self.time[:10]} {clock}" + (f",{self.time[20:23]}" if self.time[19] == "." else "")
        match self.source:
            case LogSource.OUTPUT:
                return self.message
            case LogSource.OPERATOR:
                head = f"{stamp} {level:<7} {self.logger}: "
            case LogSource.AGENT:
                head = f"{stamp} {level} agent "
            case LogSource.TRAINER:
                head = "" if self.rank is None else f"{clock} rank {self.rank} {level} "
        if self.logger == EXIT_LOGGER:
            # The last line of a program is only the reason for its end.
            return f"{self.error}\n{self.message}" if self.error else self.message
        return f"{head}{self.message}\n{self.error}" if self.error else f"{head}{self.message}"


_REQUIRED_FIELDS = frozenset({"time", "source", "logger", "message"})
_FIELDS = frozenset(LogLine.model_fields)
_LEVELS = frozenset(LogLevel)


def build_log_line(message: str, *, error: str | None = None, **fields: Any) -> LogLine:
    """Build a line of one of this project's programs: without secrets, within its bounds, with valid fields only.

    `fields` are those of LogLine. Raises ValidationError if time, level, source or logger is invalid.
    """
    values = {**fields, "message": _sanitize(message)[:MESSAGE_CHARACTERS]}
    if error:
        values["error"] = _sanitize(error[-2 * ERROR_CHARACTERS :])[-ERROR_CHARACTERS:]
    try:
        return LogLine(**values)
    except ValidationError as validation_error:
        invalid_fields = _list_invalid_fields(validation_error)
        if invalid_fields & (_REQUIRED_FIELDS | {"level"}):
            raise
        return LogLine(**{key: value for key, value in values.items() if key not in invalid_fields})


def read_log_line(raw: str | bytes) -> LogLine | None:
    """Parse a line; None for any other text. Never raises."""
    text = raw.decode(errors="replace") if isinstance(raw, bytes) else raw
    if not text.startswith(_OPENING) or len(text) > _MAX_READ_CHARACTERS:
        return None
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or not values.keys() >= _REQUIRED_FIELDS:
        return None
    values = {key: value for key, value in values.items() if key in _FIELDS}
    if not isinstance(values.get("level"), str) or values["level"] not in _LEVELS:
        values["level"] = LogLevel.INFO
    try:
        return LogLine.model_validate(values)
    except ValidationError as validation_error:
        invalid_fields = _list_invalid_fields(validation_error)
    if invalid_fields & _REQUIRED_FIELDS:
        return None
    return LogLine.model_validate({key: value for key, value in values.items() if key not in invalid_fields})


def format_log_text(text: str) -> str:
    """Return text of a log with the schema's lines in readable form, and all others unchanged."""
    if _OPENING not in text:
        return text
    lines = ((line, read_log_line(line)) for line in text.split("\n"))
    return "\n".join(line if read is None else read.as_text() for line, read in lines)


def _sanitize(text: str) -> str:
    """Return the text without secrets, bounded, and without halves of surrogate pairs, which JSON cannot hold."""
    return redact_secrets(text[: 2 * ERROR_CHARACTERS].encode(errors="backslashreplace").decode())


def _list_invalid_fields(validation_error: ValidationError) -> frozenset[str]:
    return frozenset(
        str(error["loc"][0])
        for error in validation_error.errors(include_url=False, include_input=False)
        if error["loc"]
    )
