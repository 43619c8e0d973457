# ruff: noqa: INP001 - installed beside coverage
"""Counts the branches of every process of the environment of `make coverage`, while there is something to measure.

Imported at the start of Python, from a .pth file, with the path of coverage's configuration; without that file nothing
is done. An environment that a test makes for its process takes nothing away.
Invariant: what a process has done is kept however it ends: it leaves by `sys.exit` or `os._exit`, or is killed, which
loses what it did since the last save. A fork counts on, into a file of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from typing import NoReturn

_SAVE_SECONDS = 0.3


def start(configuration: str) -> None:
    """Count from here on."""
    if not os.path.exists(configuration):  # noqa: PTH110 - pathlib would be imported into every process
        return
    from coverage import Coverage  # noqa: PLC0415 - most processes of the environment do without

    counted = Coverage(config_file=configuration, data_suffix=True)
    saving = False

    def save() -> None:
        nonlocal saving
        if saving:  # a signal came while the same thread saves
            return
        saving = True
        try:
            with contextlib.suppress(Exception):
                counted.save()
        finally:
            saving = False

    def save_last() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)  # Python takes its handlers away while it ends
        save()

    leave_at_once = os._exit

    def leave(status: int) -> NoReturn:
        save_last()
        leave_at_once(status)

    def save_now_and_then() -> None:
        with contextlib.suppress(ValueError):  # no signals outside the main thread
            signal.signal(signal.SIGALRM, lambda *_: save())
            signal.setitimer(signal.ITIMER_REAL, _SAVE_SECONDS, _SAVE_SECONDS)

    os._exit = leave
    atexit.register(save_last)
    os.register_at_fork(after_in_child=save_now_and_then)
    if not any(word in argument for argument in sys.orig_argv for word in ("pytest", "execnet")):  # its time limits
        save_now_and_then()
    counted.start()
