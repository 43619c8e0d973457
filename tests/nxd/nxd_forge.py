"""The forking process of the trainer's tests, with the stand-ins and NxD imported before ranks are forked from it.

Beside the trainer's commands its ranks know those of `programs.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import standins

standins.install()
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "trainer"))

import forge  # noqa: E402 - the stand-ins come first
import programs  # noqa: E402

from trainium_trainer import cli  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

train = cli.main


def main(argv: Sequence[str]) -> None:
    if argv[0] != "train":
        programs.main(argv[0], argv[1:])
    train(argv)


if __name__ == "__main__":
    cli.main = main  # type: ignore[assignment]
    forge.serve()
