"""`make proof`: kills real ranks at seeded points until so many were struck, and writes what became of them.

    python -m benchmarks.proof [--uneven | --tuning] [--points 200] [--seed 0] [--json FILE] [--document FILE]
                                [--folder DIR]

A point counts when a rank died there. A trial that fails leaves its folder (logs, metrics, checkpoints) where it is.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.proof.document import placed, section, summary
from benchmarks.proof.families import trial
from benchmarks.proof.stage import Stage
from benchmarks.proof.suites import PRETRAINING, TUNING, UNEVEN

if TYPE_CHECKING:
    from benchmarks.proof.judge import Verdict

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Play, judge, write; 1 when a promise was broken."""
    parser = argparse.ArgumentParser(prog="benchmarks.proof", description=__doc__.splitlines()[0] if __doc__ else "")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--uneven", action="store_true", help="pretraining at sizes that leave slots of the batch empty")
    which.add_argument("--tuning", action="store_true", help="LoRA and what follows it, in place of pretraining")
    parser.add_argument("--points", type=int, help="ranks that have to die where they should; 200, of the others 100")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    parser.add_argument("--json", type=Path, help="for the figures; below out/bench by default")
    parser.add_argument("--document", type=Path, help="put the table into this page, too")
    parser.add_argument("--folder", type=Path, help="for the runs; a temporary one by default")
    options = parser.parse_args()
    suite = UNEVEN if options.uneven else TUNING if options.tuning else PRETRAINING
    points = options.points or (200 if suite is PRETRAINING else 100)
    began = time.time()
    verdicts: list[Verdict] = []
    folder = options.folder or Path(tempfile.mkdtemp(prefix="recovery-proof-"))
    with Stage(folder, suite) as stage:
        seed = options.seed
        while sum(verdict.struck for verdict in verdicts) < points:
            verdicts.append(stage.play(trial(seed, suite)))
            seed += 1
            _tell(verdicts[-1], sum(verdict.struck for verdict in verdicts), points)
    report = summary(verdicts, suite, options.seed, time.time() - began)
    file = options.json or ROOT / "out/bench" / f"recovery_proof{'' if suite is PRETRAINING else f'_{suite.name}'}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=2) + "\n")
    part = section(report, suite)
    if options.document:
        known = options.document.read_text() if options.document.exists() else ""
        options.document.write_text(placed(known, part, suite))
    print(part)
    return 1 if report["wrong"] else 0


def _tell(verdict: Verdict, struck: int, wanted: int) -> None:
    lives = ", ".join(
        f"{life.layout} from {life.resumed} to {life.completed}{f' ({life.point})' if life.struck else ''}"
        for life in verdict.lives
    )
    wrong = "".join(f"\n    WRONG: {text}" for text in verdict.wrong)
    lost = [each.steps for each in verdict.lost]
    line = f"{struck:>4}/{wanted} seed {verdict.seed} {verdict.family}: {lives}; lost {lost}"
    print(line + wrong, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
