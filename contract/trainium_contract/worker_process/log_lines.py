"""Write the logs of this distribution's programs: text for people, or lines of the contract's schema.

Guarantees:
- The environment decides (`TRAINIUM_LOG_FORMAT`), so a process and its children use the same format.
- An unknown value counts as text here, because the agent refuses it with a sentence.
- No function raises.
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
from trainium_contract.wire.log_format import JsonFormatter, TextFormatter, choose_log_format, format_time
from trainium_contract.wire.log_line import EXIT_LOGGER, LogFormat, LogLevel, LogSource, build_log_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TERMINATION_LOG = Path(os.environ.get(worker_env.ENV_TERMINATION_LOG) or "/dev/termination-log")
_TERMINATION_LIMIT = 4096
_AGENT_TEXT = "%(asctime)s %(levelname)s agent %(message)s"
_NAME_FIELDS = {
    "namespace": worker_env.ENV_NAMESPACE,
    "job": worker_env.ENV_JOB,
    "pod": worker_env.ENV_POD_NAME,
    "node": worker_env.ENV_NODE_NAME,
}
_NUMBER_FIELDS = {"generation": worker_env.ENV_GENERATION, "attempt": worker_env.ENV_ATTEMPT, "rank": "RANK"}


def is_json() -> bool:
    """Return whether this process logs lines of the schema."""
    try:
        return choose_log_format(os.environ) is LogFormat.JSON
    except ValueError:
        return False


def log_context() -> Mapping[str, object]:
    """Return the log context of this process (job, pod, rank), from its environment."""
    numbers = {field: os.environ.get(name, "") for field, name in _NUMBER_FIELDS.items()}
    return {
        **{field: os.environ[name] for field, name in _NAME_FIELDS.items() if os.environ.get(name)},
        **{field: int(text) for field, text in numbers.items() if text.isascii() and text.isdigit()},
    }


def configure_agent_logging(context: Callable[[], Mapping[str, object]] = log_context) -> None:
    """Write all further log records to standard error, as the agent's."""
    _write(JsonFormatter(LogSource.AGENT, context) if is_json() else TextFormatter(_AGENT_TEXT))


def configure_rank_logging(rank: int) -> None:
    """Write all further log records to standard error, as this rank's."""
    text = TextFormatter(f"%(asctime)s rank {rank} %(levelname)s %(message)s", datefmt="%H:%M:%S")
    context = {**log_context(), "rank": rank}
    _write(JsonFormatter(LogSource.TRAINER, lambda: context) if is_json() else text)


def format_sentence(
    sentence: str,
    *,
    error: str = "",
    level: LogLevel = LogLevel.INFO,
    logger: str = EXIT_LOGGER,
    source: LogSource = LogSource.TRAINER,
) -> str:
    """Format a sentence that a program writes without `logging`; as text it follows the traceback, if any.

    A person who runs a command inside a worker, on a terminal, always gets text.
    """
    if not is_json() or sys.stderr.isatty():
        return f"{error}{sentence}"
    fields = {"time": format_time(time.time()), "level": level, "source": source, "logger": logger}
    return build_log_line(sentence, error=error.rstrip("\n") or None, **fields, **log_context()).to_line()


def _write(formatter: logging.Formatter) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def report_exit(
    line: str, *, trace: str = "", level: LogLevel = LogLevel.ERROR, source: LogSource = LogSource.TRAINER
) -> None:
    """Report why the process ends: on stderr, below the traceback, and in the pod's termination log."""
    written = format_sentence(line, error=trace, level=level, source=source)
    print(written, file=sys.stderr, flush=True)  # noqa: T201 - this is the program speaking to its user
    write_termination_message(line[-_TERMINATION_LIMIT:])


def write_termination_message(message: str) -> None:
    """Write the message that the kubelet adds to the pod's status; do nothing outside a pod."""
    with contextlib.suppress(OSError):
        if TERMINATION_LOG.exists() and os.access(TERMINATION_LOG, os.W_OK):
            TERMINATION_LOG.write_text(f"{message}\n", encoding="utf-8")
