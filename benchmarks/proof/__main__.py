"""Kill real ranks at seeded points until the requested number of kills, and write the results (`make proof`).

    python -m benchmarks.proof [--uneven | --tuning | --preferences] [--points 200] [--seed 0] [--json FILE]
                               [--document FILE] [--folder DIR]

A point counts if a rank was killed there. A trial that fails keeps its folder (logs, metrics, checkpoints).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.conditions import ROOT, write_report
from benchmarks.proof.document import render_section, replace_section, summarize
from benchmarks.proof.runner import Runner
from benchmarks.proof.suites import PRETRAINING, SUITES, draw_trial

if TYPE_CHECKING:
    from benchmarks.proof.checks import TrialResult


def main() -> int:
    """Run trials and write the results; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="benchmarks.proof", description=__doc__.splitlines()[0] if __doc__ else "")
    suites = parser.add_mutually_exclusive_group()
    for name, suite in SUITES.items():
        if suite is not PRETRAINING:
            help_text = suite.introduction.splitlines()[0].lstrip("# ")
            suites.add_argument(f"--{name}", dest="suite", action="store_const", const=suite, help=help_text)
    parser.set_defaults(suite=PRETRAINING)
    parser.add_argument("--points", type=int, help="number of kills; default 200 for pretraining, else 100")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first trial")
    parser.add_argument("--json", type=Path, help="file of the figures; below out/bench by default")
    parser.add_argument("--document", type=Path, help="also write the table to this page")
    parser.add_argument("--folder", type=Path, help="folder of the runs; a temporary one by default")
    options = parser.parse_args()
    suite = options.suite
    points = options.points or (200 if suite is PRETRAINING else 100)
    started_at = time.time()
    results: list[TrialResult] = []
    folder = options.folder or Path(tempfile.mkdtemp(prefix="recovery-proof-"))
    with Runner(folder, suite) as runner:
        seed = options.seed
        while sum(result.killed for result in results) < points:
            results.append(runner.run(draw_trial(seed, suite)))
            seed += 1
            _log(results[-1], sum(result.killed for result in results), points)
    report = summarize(results, suite, options.seed, time.time() - started_at)
    file = options.json or ROOT / "out/bench" / f"recovery_proof{'' if suite is PRETRAINING else f'_{suite.name}'}.json"
    write_report(file, "recovery_proof", **report)
    section = render_section(report, suite)
    if options.document:
        previous = options.document.read_text() if options.document.exists() else ""
        options.document.write_text(replace_section(previous, section, suite))
    print(section)
    return 1 if report["deviations"] else 0


def _log(result: TrialResult, killed: int, requested: int) -> None:
    attempts = ", ".join(
        f"{attempt.layout} from {attempt.resumed} to {attempt.completed}"
        + (f" ({attempt.point})" if attempt.killed else "")
        for attempt in result.attempts
    )
    deviations = "".join(f"\n    WRONG: {text}" for text in result.deviations)
    lost = [kill.steps for kill in result.lost]
    line = f"{killed:>4}/{requested} seed {result.seed} {result.scenario}: {attempts}; lost {lost}"
    print(line + deviations, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
