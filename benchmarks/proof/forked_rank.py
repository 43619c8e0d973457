"""Run a rank in a process that was forked from one with the trainer's imports, as a worker's agent does."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import TYPE_CHECKING, NoReturn

from benchmarks.proof import kill_points
from trainium_trainer import cli
from trainium_trainer.artifacts import data_files
from trainium_trainer.warm import warm

if TYPE_CHECKING:
    from collections.abc import Mapping

_PR_SET_PDEATHSIG = 1
_MIN_FILE_BYTES = 1 << 14
"""Minimum size of a file of a model, so small that each rank writes a file of the small model."""


def run_rank(environment: Mapping[str, str], log: str, argv: list[str]) -> NoReturn:
    """Run a command of the trainer with its output in a file, and end this process with its exit code."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank outlives an aborted proof
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    data_files.SMALLEST = _MIN_FILE_BYTES
    warm()
    if text := os.environ.get(kill_points.VARIABLE):
        kill_points.install_kill(text)
    cli.main(argv)
