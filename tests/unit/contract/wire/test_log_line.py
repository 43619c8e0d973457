"""The schema of log lines: strict and bounded for writers, lenient for readers."""

import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from trainium_contract.wire.log_format import JsonFormatter, TextFormatter, choose_log_format, format_time
from trainium_contract.wire.log_line import (
    ERROR_CHARACTERS,
    EXIT_LOGGER,
    LINE_BYTES,
    MESSAGE_CHARACTERS,
    LogFormat,
    LogLevel,
    LogLine,
    LogSource,
    build_log_line,
    format_log_text,
    read_log_line,
)

TIME = "2026-11-24T08:09:10.123+00:00"
FIELDS: dict[str, Any] = {"time": TIME, "level": "info", "source": "trainer", "logger": "trainium.loop"}
TOKEN = "hf_" + "a" * 30


def record(message: str, *args: object, level: int = logging.INFO, **extra: Any) -> logging.LogRecord:
    log_record = logging.LogRecord("a.b", level, "", 0, message, args, None)
    vars(log_record).update(extra)
    return log_record


@given(st.text(max_size=3 * MESSAGE_CHARACTERS), st.text(max_size=300), st.integers(0, 10**7))
def test_any_message_becomes_one_line_of_ascii_that_reads_as_it_was_written(
    message: str, error: str, rank: int
) -> None:
    line = build_log_line(message, error=error, rank=rank, **FIELDS)
    written = line.to_line()
    assert written.isascii()
    assert "\n" not in written
    assert len(written) <= LINE_BYTES
    read = read_log_line(written)
    assert read is not None
    assert read.to_line() == written
    assert line.message.startswith(read.message)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists), st.text(max_size=9))
def test_any_json_line_is_rejected_or_has_time_and_source(value: Any, key: str) -> None:
    for text in (key, json.dumps(value), json.dumps({key: value}), json.dumps(FIELDS | {"message": "", key: value})):
        read = read_log_line(text)
        assert read is None or (read.time, read.source) == (TIME, LogSource.TRAINER)


def test_a_reader_drops_unknown_and_malformed_fields_of_a_line() -> None:
    given = FIELDS | {"message": "m", "level": "fatal", "rank": "three", "job": "", "node": "n", "colour": "red"}
    read = read_log_line(json.dumps(given))
    assert read == LogLine(**FIELDS, message="m", node="n")
    for missing in ("time", "source", "logger", "message"):
        assert read_log_line(json.dumps({key: value for key, value in given.items() if key != missing})) is None
    assert read_log_line(json.dumps(given | {"time": "yesterday"})) is None
    assert read_log_line(json.dumps(given | {"source": "somebody"})) is None
    assert read_log_line(json.dumps(given | {"message": "x" * (1 << 16)})) is None
    assert read_log_line(b"{" + b"\xff" * 9) is None
    assert read_log_line('{"a":' * 20_000) is None


def test_a_writer_of_an_unknown_field_is_refused() -> None:
    with pytest.raises(ValidationError):
        LogLine(**FIELDS, message="m", colour="red")  # type: ignore[call-arg]
    with pytest.raises(ValidationError):
        build_log_line("m", **{**FIELDS, "time": "now"})


def test_an_invalid_field_is_dropped_from_a_written_line() -> None:
    line = build_log_line("m", **FIELDS, rank=-1, job="x" * 300, namespace="team")
    assert (line.rank, line.job, line.namespace) == (None, None, "team")


def test_long_messages_are_cut_at_the_end_and_tracebacks_at_the_start() -> None:
    line = build_log_line("a" + "\x07" * 9_999, error="\x07" * 20_000 + "ValueError: the end", **FIELDS)
    assert len(line.message) == MESSAGE_CHARACTERS
    assert line.error is not None
    assert len(line.error) == ERROR_CHARACTERS
    read = read_log_line(line.to_line())
    assert read is not None
    assert read.error is not None
    assert read.error.endswith("ValueError: the end")
    assert read.message.startswith("a\x07")


def test_no_format_writes_a_secret() -> None:
    log_record = record("token %s, key %s", TOKEN, "AKIA" + "A" * 16, secret=TOKEN, job=f"job-{TOKEN}"[:3])
    log_record.exc_info = (ValueError, ValueError(f"password={TOKEN}"), None)
    for formatter in (JsonFormatter(LogSource.OPERATOR), TextFormatter("%(message)s")):
        written = formatter.format(log_record)
        assert TOKEN not in written
        assert "AKIA" not in written
        assert "***" in written


def test_fields_of_a_record_override_the_defaults_of_the_program() -> None:
    formatter = JsonFormatter(
        LogSource.AGENT, lambda: {"namespace": "team", "job": "llama", "generation": 2, "rank": 0}
    )
    line = formatter.build_line(record("%d of %d", 1, 2, level=logging.WARNING, rank=7, attempt=1, token="no"))
    assert line.to_wire() == {
        "time": line.time, "level": "warning", "source": "agent", "logger": "a.b", "message": "1 of 2",
        "namespace": "team", "job": "llama", "generation": 2, "attempt": 1, "rank": 7,
    }  # fmt: skip
    assert formatter.build_line(record("m", level=35)).level is LogLevel.WARNING
    assert formatter.build_line(record("m", level=5)).level is LogLevel.DEBUG
    assert formatter.build_line(record("m", level=logging.CRITICAL)).level is LogLevel.CRITICAL


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"rank": 3}, "08:09:10 rank 3 INFO a message"),
        ({}, "a message"),
        ({"source": "agent"}, "2026-11-24 08:09:10,123 INFO agent a message"),
        ({"source": "operator", "logger": "x"}, "2026-11-24 08:09:10,123 INFO    x: a message"),
        ({"source": "output", "rank": 3}, "a message"),
        ({"rank": 3, "error": "Traceback\nE: e"}, "08:09:10 rank 3 INFO a message\nTraceback\nE: e"),
        ({"rank": 3, "logger": EXIT_LOGGER, "error": "Traceback\nE: e"}, "Traceback\nE: e\na message"),
        ({"rank": 3, "logger": EXIT_LOGGER}, "a message"),
    ],
)
def test_a_json_line_is_formatted_as_the_program_writes_text(fields: dict[str, Any], text: str) -> None:
    line = build_log_line("a message", **{**FIELDS, **fields})
    assert line.as_text() == text
    assert format_log_text(f"before\n{line.to_line()}\n{{after") == f"before\n{text}\n{{after"


def test_the_log_format_is_chosen_by_an_environment_variable() -> None:
    assert choose_log_format({}) is LogFormat.TEXT
    assert choose_log_format({"TRAINIUM_LOG_FORMAT": ""}) is LogFormat.TEXT
    assert choose_log_format({"TRAINIUM_LOG_FORMAT": "Json"}) is LogFormat.JSON
    with pytest.raises(ValueError, match="TRAINIUM_LOG_FORMAT='xml' must be text or json"):
        choose_log_format({"TRAINIUM_LOG_FORMAT": "xml"})


def test_a_time_is_written_in_utc() -> None:
    assert format_time(0.25) == "1970-01-01T00:00:00.250+00:00"
