# ruff: noqa: INP001, T201 - a script that prints
"""Feeds the operator's entrances with random inputs, in rounds, until there were as many as were asked for.

Each target (`tests/testing/fuzz/targets.py`) has a folder below out/fuzz/seed-N: `corpus` (cases that led somewhere
new), `findings` (a folder for each defect, as far as they can be told apart, with cases and tracebacks) and
`progress.json` (what was played). One round in `GUIDED_ONE_IN`, a short one, looks at coverage and adds to the corpus;
the others draw from it. A run goes on where it stopped; a round that was interrupted is played anew. Exit code 1:
something was found.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SHARES = {"coordinator": 4, "cluster": 4, "spec": 2}
"""Each target's part of the inputs."""
GUIDED_ONE_IN, GUIDED_INPUTS = 10, 2_000
ROUND_SECONDS = 6 * 3600
LONGEST_LINE = 200

Json = dict[str, Any]


class Campaign:
    """One target of one seed."""

    def __init__(self, name: str, seed: int, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self._seed = seed
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "progress.json"
        self.progress: Json = {"inputs": 0, "rounds": 0, "seconds": 0.0, "cpu": 0.0, "slowest": 0.0, "found": {}}
        if self._file.exists():
            self.progress = json.loads(self._file.read_text())

    def play(self, inputs: int, *, dice: bool) -> None:
        """One round of at most so many inputs."""
        number = self.progress["rounds"]
        guided = not dice and number % GUIDED_ONE_IN == 0
        inputs = min(inputs, GUIDED_INPUTS) if guided else inputs
        account = self.folder / "round.json"
        account.unlink(missing_ok=True)
        command = [sys.executable, str(Path(__file__).with_name("fuzz_round.py")), self.name]
        command += ["--seed", str(self._seed * 100_003 + number + 1), "--inputs", str(inputs)]
        command += ["--folder", str(self.folder), *([] if guided else ["--dice"])]
        with (self.folder / "round.log").open("w") as log:
            code = subprocess.run(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=ROUND_SECONDS, check=False
            ).returncode
        if code != 0:
            self._died(code, number)
        self._add(json.loads(account.read_text()) if account.exists() else {})

    def _died(self, code: int, number: int) -> None:
        """The process did not come to its end: the case that it had in hand is a finding."""
        current = (self.folder / "current").read_bytes()
        length = int.from_bytes(current[:8], "big")
        folder = self.folder / "findings" / "the-process-ended"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"round-{number}.json").write_bytes(current[8 : 8 + length])
        said = (self.folder / "round.log").read_text(errors="replace")[-20_000:]
        (folder / f"round-{number}.txt").write_text(f"exit code {code}\n{said}")
        found = self.progress["found"]
        found[folder.name] = found.get(folder.name, 0) + 1

    def _add(self, account: Json) -> None:
        progress = self.progress
        progress["rounds"] += 1
        for key in ("inputs", "seconds", "cpu"):
            progress[key] = round(progress[key] + account.get(key, 0), 1)
        progress["slowest"] = max(progress["slowest"], account.get("slowest", 0.0))
        for key, times in account.get("found", {}).items():
            progress["found"][key] = progress["found"].get(key, 0) + times
        progress["corpus"] = len(list((self.folder / "corpus").iterdir()))
        progress["coverage"] = self._coverage() or progress.get("coverage", "")
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps(progress, indent=1))
        fresh.rename(self._file)

    def _coverage(self) -> str:
        """What the last line of the search says of it."""
        lines = (self.folder / "round.log").read_text(errors="replace").splitlines()
        return next((line.strip()[:LONGEST_LINE] for line in reversed(lines) if " cov: " in line), "")

    def tell(self) -> None:
        """One line, and one for each finding."""
        known = self.progress
        rate = known["inputs"] / known["cpu"] if known["cpu"] else 0.0
        print(
            f"{self.name}: {known['inputs']:,.0f} inputs in {known['rounds']} rounds, {known['seconds']:,.0f} s by the "
            f"clock, {known['cpu']:,.0f} s of a processor ({rate:,.0f} a second), slowest {known['slowest']:.2f} s"
        )
        if known.get("coverage"):
            print(f"  {known['coverage']}")
        for key, times in sorted(known["found"].items(), key=lambda each: -each[1]):
            print(f"  {times} times {key}: {self.folder / 'findings' / key}")


def again(paths: list[Path]) -> int:
    """Play single cases: those of a finding, say. The target is in the path."""
    sys.path.insert(0, str(ROOT))
    # Imported here: rounds are processes of their own, and who starts them needs nothing of what they play.
    from tests.testing.fuzz.hostile import decoded  # noqa: PLC0415
    from tests.testing.fuzz.player import Player  # noqa: PLC0415
    from tests.testing.fuzz.targets import TARGETS  # noqa: PLC0415

    broken = 0
    for path in paths:
        name = next((part for part in path.resolve().parts[::-1] if part in SHARES), "")
        if not name:
            print(f"{path}: no folder above it is named after a target ({', '.join(SHARES)})", file=sys.stderr)
            return 2
        with Player(TARGETS[name]()) as player:
            found = player.play(decoded(path.read_bytes()))
        print(f"{path}: {'every promise was kept' if found is None else found.text}")
        broken += found is not None
    return 1 if broken else 0


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description="Feed the operator's entrances with random inputs.")
    parser.add_argument("--inputs", type=int, default=30_000, help="of all targets together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--targets", default=",".join(SHARES), help="some of them, separated by commas")
    parser.add_argument("--round", type=int, default=20_000, help="inputs of one process")
    parser.add_argument("--dice", action="store_true", help="do not look at coverage")
    parser.add_argument("--out", type=Path, default=ROOT / "out/fuzz", help="what is known, and goes on")
    parser.add_argument("--again", type=Path, nargs="+", metavar="CASE", help="play these cases, and nothing else")
    given = parser.parse_args()
    if given.again:
        return again(given.again)
    names = given.targets.split(",")
    if unknown := set(names) - SHARES.keys():
        parser.error(f"there is no target {', '.join(sorted(unknown))}; there are {', '.join(SHARES)}")
    shares = sum(SHARES[name] for name in names)
    campaigns = [Campaign(name, given.seed, given.out.resolve() / f"seed-{given.seed}" / name) for name in names]
    wanted = {each.name: given.inputs * SHARES[each.name] // shares for each in campaigns}
    while open_ones := [each for each in campaigns if each.progress["inputs"] < wanted[each.name]]:
        for each in open_ones:
            left = wanted[each.name] - int(each.progress["inputs"])
            each.play(min(given.round, left), dice=given.dice)
            each.tell()
            sys.stdout.flush()
    for each in campaigns:
        each.tell()
    return 1 if any(each.progress["found"] for each in campaigns) else 0


if __name__ == "__main__":
    sys.exit(main())
