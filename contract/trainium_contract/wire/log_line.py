"""One line of a log as JSON: what operator, agents and training processes write, and what reads it.

Invariants: who writes is strict, who reads is lenient (what a reader does not know or cannot use is left out, a line
that is none of ours is None); a line is at most `LINE_BYTES` long, because container runtimes break longer ones in two;
it is ASCII, so nothing in it steers a terminal; keys and tokens are removed from what our programs write.
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
"""Logger of the sentence with which a program explains its end."""
PROGRAM = "program"
"""Logger of what a program wrote without a logger of ours."""
_LONGEST_READ = 1 << 16
_OPENING = "{"


class LogFormat(StrEnum):
    """Form of a program's log."""

    TEXT = "text"
    """For people."""
    JSON = "json"
    """Lines of this schema, for whatever collects logs."""


class LogSource(StrEnum):
    """Which program speaks."""

    OPERATOR = "operator"
    AGENT = "agent"
    """Process 1 of a worker pod."""
    TRAINER = "trainer"
    """A training process (then with its rank), or another command of the trainer."""
    OUTPUT = "output"
    """A training process too, past its log: what a user's own code or a library printed, as it is."""


class LogLevel(StrEnum):
    """Severity of a line."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


_Count = Annotated[int, Field(ge=0)]


class LogLine(ContractModel):
    """One line; what does not apply, or is not known where it is written, is absent."""

    time: str = Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)$")
    """RFC 3339."""
    level: LogLevel
    source: LogSource
    logger: str = Field(min_length=1, max_length=128)
    """Which part of the program, as `trainium_operator.cluster.lease`; `program` for output."""
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
    """The traceback; its end, where it is long."""

    def to_line(self) -> str:
        """Serialize the line, without its end; message and traceback are cut to what fits into it."""
        line, written = self, json.dumps(self.to_wire())
        while len(written) > LINE_BYTES:
            # Escaped characters take up to six times their place.
            if line.error and len(line.error) > len(line.message):
                line = line.replaced(error=line.error[len(line.error) // 2 :])
            else:
                line = line.replaced(message=line.message[: len(line.message) // 2])
            written = json.dumps(line.to_wire())
        return written

    def as_text(self) -> str:
        """Format the line as the same program writes it to a text log; several lines where there is a traceback."""
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
            # The last line of a program is the reason for its end, and nothing else.
            return f"{self.error}\n{self.message}" if self.error else self.message
        return f"{head}{self.message}\n{self.error}" if self.error else f"{head}{self.message}"


_NEEDED = frozenset({"time", "source", "logger", "message"})
_KNOWN = frozenset(LogLine.model_fields)
_LEVELS = frozenset(LogLevel)


def log_line(message: str, *, error: str | None = None, **fields: Any) -> LogLine:
    """Build a line of one of our programs: without secrets, within its bounds, and with valid fields only.

    `fields` are those of LogLine. Raises ValidationError where time, level, source or logger are no such.
    """
    given = {**fields, "message": _bounded(message)[:MESSAGE_CHARACTERS]}
    if error:
        given["error"] = _bounded(error[-2 * ERROR_CHARACTERS :])[-ERROR_CHARACTERS:]
    try:
        return LogLine(**given)
    except ValidationError as refused:
        unusable = _fields_of(refused)
        if unusable & (_NEEDED | {"level"}):
            raise
        return LogLine(**{key: value for key, value in given.items() if key not in unusable})


def read_log_line(raw: str | bytes) -> LogLine | None:
    """Parse a line; None for any other text. Never raises."""
    text = raw.decode(errors="replace") if isinstance(raw, bytes) else raw
    if not text.startswith(_OPENING) or len(text) > _LONGEST_READ:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not found.keys() >= _NEEDED:
        return None
    found = {key: value for key, value in found.items() if key in _KNOWN}
    if not isinstance(found.get("level"), str) or found["level"] not in _LEVELS:
        found["level"] = LogLevel.INFO
    try:
        return LogLine.model_validate(found)
    except ValidationError as refused:
        unusable = _fields_of(refused)
    if unusable & _NEEDED:
        return None
    return LogLine.model_validate({key: value for key, value in found.items() if key not in unusable})


def readable(text: str) -> str:
    """Text from somebody's log with each line of the schema as people read it, and all others as they are."""
    if _OPENING not in text:
        return text
    lines = ((line, read_log_line(line)) for line in text.split("\n"))
    return "\n".join(line if read is None else read.as_text() for line, read in lines)


def _bounded(text: str) -> str:
    """Without secrets, of what is looked at at most, and without halves of characters, which no JSON may hold."""
    return redact_secrets(text[: 2 * ERROR_CHARACTERS].encode(errors="backslashreplace").decode())


def _fields_of(refused: ValidationError) -> frozenset[str]:
    return frozenset(
        str(each["loc"][0]) for each in refused.errors(include_url=False, include_input=False) if each["loc"]
    )
