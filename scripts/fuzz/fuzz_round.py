# ruff: noqa: INP001, S311 - a script; dice are no secret
"""One round: a process that plays so many cases of one target, by coverage (atheris) or by dice, and what it finds.

A process of its own, so that what a round leaves in memory is gone, and one that ends in the middle costs a round and
not the run. The case in hand is in the file `current` all the time, for whoever looks for what ended the process.
Looking at coverage makes a case three times as dear; dice draw from what such rounds have found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

atheris: Any = None
if "--dice" not in sys.argv:  # what is instrumented is three times as slow
    with contextlib.suppress(ImportError):
        import atheris

LONGEST_CASE = 64 << 10
"""Bytes as it is written; unfolded it may be larger."""
KEPT = 5
"""Cases of one finding."""
FRESH_ONE_IN = 24
"""Cases that begin anew from a seed, so that none of the target's parts is forgotten."""
MEMORY_MIB = 2048
STUCK_SECONDS = 300
"""By the clock, in code that no signal of Python's gets into."""

with (
    atheris.instrument_imports(include=["trainium_operator", "trainium_contract"])
    if atheris
    else contextlib.nullcontext()
):
    from tests.testing.fuzz.hostile import decoded, encoded
    from tests.testing.fuzz.mutation import Mutator
    from tests.testing.fuzz.player import Player
    from tests.testing.fuzz.targets import TARGETS

if TYPE_CHECKING:
    from tests.testing.fuzz.player import Finding


class Round:
    """Cases in, findings into `folder`, and the account of them into `folder/round.json`."""

    def __init__(self, name: str, seed: int, inputs: int, folder: Path) -> None:
        self.target = TARGETS[name]()
        self.player = Player(self.target)
        self.seeds = [encoded(case) for case in self.target.seeds()]
        guided = self._guided if atheris else None
        self._mutator = Mutator(self.target.seeds(), self.target.values(), bytes_changed=guided)
        self._folder = folder
        self._inputs = inputs
        self._dice = random.Random(seed)
        self._began = time.monotonic()
        self._cpu = time.process_time()
        self._found: dict[str, int] = {}
        self.drawn = False
        """A case was drawn: until then the cases of earlier rounds are played again, and do not count."""
        self.played = 0
        with (folder / "current").open("w+b") as file:
            file.truncate(LONGEST_CASE + 8)
            self._current = mmap.mmap(file.fileno(), 0)

    @staticmethod
    def _guided(text: bytes) -> bytes:
        return bytes(atheris.Mutate(text, len(text) + 64)) if text else text

    def draw(self, data: bytes, dice: random.Random) -> bytes:
        """Another case, from this one or from a seed."""
        self.drawn = True
        if dice.randrange(FRESH_ONE_IN) == 0:
            data = dice.choice(self.seeds)
        try:
            case = decoded(data)
        except ValueError:
            case = decoded(dice.choice(self.seeds))
        try:
            found = encoded(self._mutator.changed(case, dice))
        except RecursionError:
            return data
        return found if len(found) <= LONGEST_CASE else data

    def cross(self, data: bytes, other: bytes, dice: random.Random) -> bytes:
        """A case with parts of two."""
        self.drawn = True
        try:
            found = encoded(self._mutator.crossed(decoded(data), decoded(other), dice))
        except (ValueError, RecursionError):
            return data
        return found if len(found) <= LONGEST_CASE else data

    def play(self, data: bytes) -> None:
        """Play it, and keep it if it broke a promise."""
        try:
            case = decoded(data)
        except ValueError:
            return
        self._current[: len(data) + 8] = len(data).to_bytes(8, "big") + data
        finding = self.player.play(case)
        self.played += self.drawn
        if finding is not None:
            self._keep(finding, data)
        if self.drawn and (self.played == self._inputs or self.played % 1000 == 0):
            self.account()

    def _keep(self, finding: Finding, data: bytes) -> None:
        number = self._found.get(finding.key, 0)
        self._found[finding.key] = number + 1
        folder = self._folder / "findings" / finding.key
        folder.mkdir(parents=True, exist_ok=True)
        if len(list(folder.glob("*.json"))) < KEPT:
            name = f"{int(time.time() * 1000):x}"
            (folder / f"{name}.json").write_bytes(data)
            (folder / f"{name}.txt").write_text(finding.text, errors="replace")

    def account(self) -> None:
        """What was played so far; written whole or not at all."""
        account = {
            "inputs": self.played,
            "seconds": round(time.monotonic() - self._began, 1),
            "cpu": round(time.process_time() - self._cpu, 1),
            "slowest": round(self.player.slowest, 2),
            "rejected": self.player.rejected,
            "found": self._found,
        }
        fresh = self._folder / "round.json.new"
        fresh.write_text(json.dumps(account))
        fresh.rename(self._folder / "round.json")

    def by_dice(self, corpus: Path) -> None:
        """All inputs, drawn from the cases that there are."""
        known = [path.read_bytes() for path in sorted(corpus.iterdir())]
        for _ in range(self._inputs):
            data = self._dice.choice(known)
            if self._dice.randrange(4) == 0:
                data = self.cross(data, self._dice.choice(known), self._dice)
            self.play(self.draw(data, self._dice))

    def by_coverage(self, seed: int, corpus: Path) -> None:
        """All inputs, drawn from those that led to code that none before them did. Never returns."""
        earlier = len(list(corpus.iterdir()))
        options = {
            "runs": self._inputs + earlier + 2,
            "seed": seed,
            "max_len": LONGEST_CASE,
            "len_control": 0,
            "timeout": STUCK_SECONDS,
            "rss_limit_mb": MEMORY_MIB,
            "reload": 0,
            "print_final_stats": 1,
            "artifact_prefix": f"{self._folder}/",
        }
        arguments = [sys.argv[0], *(f"-{key}={value}" for key, value in options.items()), str(corpus)]
        atheris.Setup(
            arguments,
            self.play,
            custom_mutator=lambda data, _most, drawn: self.draw(data, random.Random(drawn)),
            custom_crossover=lambda data, other, _most, drawn: self.cross(data, other, random.Random(drawn)),
        )
        atheris.Fuzz()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--inputs", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--dice", action="store_true")
    given = parser.parse_args()
    corpus: Path = given.folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    playing = Round(given.target, given.seed, given.inputs, given.folder)
    for number, case in enumerate(playing.seeds):
        (corpus / f"seed-{number}").write_bytes(case)
    with playing.player:
        if given.dice or atheris is None:
            playing.by_dice(corpus)
        else:
            playing.by_coverage(given.seed, corpus)
        playing.account()


if __name__ == "__main__":
    main()
