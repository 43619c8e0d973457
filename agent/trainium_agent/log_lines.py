"""Write the logs of the programs of this distribution: text for people, or lines of the contract's schema.

Guarantees:
- The environment decides (`TRAINIUM_LOG_FORMAT`), so a process and those that it starts do alike.
- A value that nobody knows counts as text here, as the agent has refused it with a sentence.
- Nothing here raises.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_contract.wire import worker_env
from trainium_contract.wire.log_format import JsonFormatter, TextFormatter, choose_log_format, moment
from trainium_contract.wire.log_line import EXIT_LOGGER, LogFormat, LogLevel, LogSource, log_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TERMINATION_LOG = Path("/dev/termination-log")
_TERMINATION_LIMIT = 4096
_AGENT_TEXT = "%(asctime)s %(levelname)s agent %(message)s"
_PLACES = {
    "namespace": worker_env.ENV_NAMESPACE,
    "job": worker_env.ENV_JOB,
    "pod": worker_env.ENV_POD_NAME,
    "node": worker_env.ENV_NODE_NAME,
}
_NUMBERS = {"generation": worker_env.ENV_GENERATION, "attempt": worker_env.ENV_ATTEMPT, "rank": "RANK"}


def is_json() -> bool:
    """Return whether this process's log is lines of the schema."""
    try:
        return choose_log_format(os.environ) is LogFormat.JSON
    except ValueError:
        return False


def place() -> Mapping[str, object]:
    """Return the format of this process's lines, from its environment."""
    numbers = {field: os.environ.get(name, "") for field, name in _NUMBERS.items()}
    return {
        **{field: os.environ[name] for field, name in _PLACES.items() if os.environ.get(name)},
        **{field: int(text) for field, text in numbers.items() if text.isascii() and text.isdigit()},
    }


def write_as_agent(known: Callable[[], Mapping[str, object]] = place) -> None:
    """Everything that is logged from now on goes to standard error, as the agent's."""
    _write(JsonFormatter(LogSource.AGENT, known) if is_json() else TextFormatter(_AGENT_TEXT))


def write_as_rank(rank: int) -> None:
    """Everything that is logged from now on goes to standard error, as this rank's."""
    text = TextFormatter(f"%(asctime)s rank {rank} %(levelname)s %(message)s", datefmt="%H:%M:%S")
    known = {**place(), "rank": rank}
    _write(JsonFormatter(LogSource.TRAINER, lambda: known) if is_json() else text)


def format_sentence(
    sentence: str,
    *,
    error: str = "",
    level: LogLevel = LogLevel.INFO,
    logger: str = EXIT_LOGGER,
    source: LogSource = LogSource.TRAINER,
) -> str:
    """Format a sentence that a program writes without `logging`; as text it follows the traceback, if any.

    A person who runs a command inside of a worker, on a terminal, gets text in any case.
    """
    if not is_json() or sys.stderr.isatty():
        return f"{error}{sentence}"
    fields = {"time": moment(time.time()), "level": level, "source": source, "logger": logger}
    return log_line(sentence, error=error.rstrip("\n") or None, **fields, **place()).to_line()


def _write(formatter: logging.Formatter) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def report_end(
    line: str, *, trace: str = "", level: LogLevel = LogLevel.ERROR, source: LogSource = LogSource.TRAINER
) -> None:
    """Report why the process ends: on stderr, below the traceback, and in the pod's termination log."""
    written = format_sentence(line, error=trace, level=level, source=source)
    print(written, file=sys.stderr, flush=True)  # noqa: T201 - this is the program speaking to its user
    with contextlib.suppress(OSError):
        if TERMINATION_LOG.exists() and os.access(TERMINATION_LOG, os.W_OK):
            TERMINATION_LOG.write_text(line[-_TERMINATION_LIMIT:] + "\n", encoding="utf-8")
