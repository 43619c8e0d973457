"""Run the rank server of the trainer tests with the stand-ins and NxD, which it imports before it forks ranks.

Its ranks also have the commands of `programs.py`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import standins

standins.install()
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "trainer"))

import programs  # noqa: E402
import rank_server  # noqa: E402 - the stand-ins come first

from trainium_trainer import cli  # noqa: E402

train = cli.main


def main(argv: Sequence[str]) -> None:
    if argv[0] != "train":
        programs.main(argv[0], argv[1:])
    train(argv)


if __name__ == "__main__":
    cli.main = main  # type: ignore[assignment]
    rank_server.serve()
