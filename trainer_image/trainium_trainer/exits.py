"""End the program: errors that carry an exit code of the contract, and the code of every other exception.

Guarantees:
- Each error that a user can fix is one sentence.
- The last line on stderr is that sentence and is also written to the pod's termination log.
- A code outside the contract means a crash, which the agent may retry.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

from trainium_contract.exit_codes import ExitCode
from trainium_contract.faults.classify import match_output_line
from trainium_contract.worker_process import log_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

_CRASH = 1
_INTERRUPTED = 130

_STORAGE_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EACCES, errno.EPERM, errno.ENOTCONN}
)
# torch raises plain RuntimeErrors for these.
_MEMORY_TEXTS = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc")
_SHAPE_TEXTS = ("shapes cannot be multiplied", "size mismatch", "must match the size", "invalid for input of size")


class TrainerError(Exception):
    """An error with an exit code; its text is a message for the user."""

    code: ExitCode = ExitCode.USER_ERROR


class UserError(TrainerError):
    """The user has to change the configuration, data or shape (64)."""

    code = ExitCode.USER_ERROR


class UnreadableError(UserError):
    """A file of the configuration cannot be read (64; 81 if this run has read it before)."""


class NumericalError(TrainerError):
    """A non-finite loss or gradient that persisted (65)."""

    code = ExitCode.NUMERICAL


class PeerLostError(TrainerError):
    """A collective failed because another rank exited (76)."""

    code = ExitCode.PEER_LOST


class StorageError(TrainerError):
    """Checkpoint storage cannot be read or written (81)."""

    code = ExitCode.STORAGE_UNAVAILABLE


@contextlib.contextmanager
def retry_files_on_restart(*, restarted: bool) -> Iterator[None]:
    """Raise StorageError instead of UserError for a file that an earlier process of this run has read."""
    try:
        yield
    except UserError as error:
        cause = error.__cause__
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__
        if restarted and (cause is not None or isinstance(error, UnreadableError)):
            raise StorageError(f"{error} (this run has read it before, so look at the storage first)") from error
        raise


def find_exit_code(error: BaseException) -> int:
    """Return the exit code of any exception; 1 (a crash) if the contract has none for it."""
    if isinstance(error, TrainerError):
        return error.code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(bool(error.code))
    if isinstance(error, KeyboardInterrupt):
        return _INTERRUPTED
    if isinstance(error, ImportError):
        return ExitCode.USER_ERROR
    if isinstance(error, MemoryError):
        return ExitCode.OUT_OF_MEMORY
    if isinstance(error, OSError) and error.errno in _STORAGE_ERRORS:
        return ExitCode.STORAGE_UNAVAILABLE
    if isinstance(error, ConnectionError):
        return ExitCode.PEER_LOST
    if isinstance(error, RuntimeError):
        return _find_runtime_error_code(error)
    return _CRASH


def _find_runtime_error_code(error: RuntimeError) -> int:
    text = str(error).lower()
    kinds = {kind.__name__ for kind in type(error).__mro__}
    # By name, so that this module needs no torch: DistError is the base of store, network and backend errors.
    if "OutOfMemoryError" in kinds or any(part in text for part in _MEMORY_TEXTS):
        return ExitCode.OUT_OF_MEMORY
    if "DistError" in kinds or match_output_line(str(error)) is not None:
        return ExitCode.PEER_LOST
    if any(part in text for part in _SHAPE_TEXTS):
        return ExitCode.USER_ERROR
    return _CRASH


def describe_exit(error: BaseException) -> str:
    """Return the one line that is reported for an exception."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, TrainerError):
        return text
    if isinstance(error, MemoryError):
        return f"out of memory: {text}; use fewer samples per micro-batch or more memory per worker"
    first = f"{type(error).__name__}: {text.split(' Exception raised from ')[0]}"
    return f"lost another rank ({first})" if find_exit_code(error) == ExitCode.PEER_LOST else first


def report(error: BaseException, *, where: str = "") -> int:
    """Print why the process ends and return its exit code.

    A traceback is printed only for errors without a message, and not for a lost peer, which all other ranks report.
    """
    code = find_exit_code(error)
    explained = isinstance(error, (TrainerError, KeyboardInterrupt, SystemExit)) or code == ExitCode.PEER_LOST
    log_lines.report_exit(
        f"{where}{describe_exit(error)}", trace="" if explained else "".join(traceback.format_exception(error))
    )
    return code


def leave(code: int) -> NoReturn:
    """End the process now: flush, and skip interpreter shutdown, which may wait for dead peers or slow writers."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
