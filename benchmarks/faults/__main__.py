"""Run rows of the fault table, save their results and write the page."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.faults.document import write_document
from benchmarks.faults.environment import NODES, FaultEnvironment, RowSkippedError
from benchmarks.faults.leaks import LeakSearch
from benchmarks.faults.record import FaultRun, RowResult, Where
from benchmarks.faults.row import Row, Session
from benchmarks.faults.rows import ROWS
from tests.testing.cluster.sites import open_site

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_STARTED = time.monotonic()


def log(sentence: str) -> None:
    """Print progress."""
    print(f"[{time.monotonic() - _STARTED:6.1f} s] {sentence}", flush=True)


def main() -> int:
    """Run rows; return 1 if a row failed."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that existing clusters are cleaned up
    rows = _chosen(options)
    out: Path = options.out
    results: Path = options.results
    if not options.resume:
        for row in rows:
            _file(results, row, options).unlink(missing_ok=True)
    waiting = [row for row in rows if not _is_done(results, row, options)]
    leaks: list[str] = []
    log(f"{len(waiting)} rows to run, {len(rows) - len(waiting)} are done; seed {options.seed}")
    if waiting:
        from tests.testing.cluster import sites  # noqa: PLC0415 - the number of nodes is the table's own

        sites.NODES = NODES
        with open_site(options.cluster) as site, FaultEnvironment(site, out, log) as env, ExitStack() as stack:
            search = stack.enter_context(LeakSearch(env)) if options.leaks else None
            for row in waiting:
                _run(env, row, options, results)
            leaks = search.found() if search else []
    if options.document is not None:
        write_document(results, options.document)
        log(f"wrote {options.document}")
    everything = [RowResult.load(_file(results, row, options)) for row in rows if _file(results, row, options).exists()]
    failed = [result.name for result in everything if not result.passed and not result.skipped]
    log(f"{sum(result.passed for result in everything)} rows passed; failed: {failed or 'none'}")
    for sentence in leaks:
        log(f"WRONG: {sentence}")
    return 1 if failed or leaks else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--rows", default="", help="for instance 1,4b,25 (25a and 25b); by default all")
    parser.add_argument("--runs", type=int, default=30, help="runs of each row (rows that take long: fewer)")
    parser.add_argument("--seed", type=int, default=1, help="chooses ranks, nodes and times")
    parser.add_argument("--resume", action="store_true", help="add missing runs instead of running all again")
    parser.add_argument("--cluster", choices=("local", "existing"), default="local", help="as for the tests")
    parser.add_argument("--leaks", action="store_true", help="look for leaks meanwhile (development cluster only)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "faults", help="folder for diagnostics")
    parser.add_argument(
        "--results", type=Path, default=HERE / "results", help="folder of the figures, kept with the code"
    )
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "fault-table.md", help="the table to write")
    parser.add_argument("--no-document", dest="document", action="store_const", const=None, help="write no table")
    return parser.parse_args()


def _chosen(options: argparse.Namespace) -> list[Row]:
    wanted = {part for part in options.rows.split(",") if part}
    unknown = sorted(wanted - {name for row in ROWS for name in (row.name, str(row.number))})
    if unknown:
        sys.exit(f"There are no rows {', '.join(unknown)}; there are {', '.join(row.name for row in ROWS)}.")
    rows = [row for row in ROWS if not wanted or wanted & {row.name, str(row.number)}]
    return [row for row in rows if row.kubelet] if options.cluster == "existing" else rows


def _suffix(options: argparse.Namespace) -> str:
    return "-kubelet" if options.cluster == "existing" else "-local"


def _file(results: Path, row: Row, options: argparse.Namespace) -> Path:
    return results / f"{row.number:02d}{row.part}{_suffix(options)}.json"


def _wanted(row: Row, options: argparse.Namespace) -> int:
    return min(int(options.runs), row.max_runs)


def _known(results: Path, row: Row, options: argparse.Namespace) -> RowResult | None:
    """Return the result of earlier runs with the same seed, if runs are resumed."""
    path = _file(results, row, options)
    if not options.resume or not path.exists():
        return None
    known = RowResult.load(path)
    return None if known.skipped or known.seed != options.seed else known


def _is_done(results: Path, row: Row, options: argparse.Namespace) -> bool:
    known = _known(results, row, options)
    return known is not None and len(known.outcomes) >= _wanted(row, options)


def _run(env: FaultEnvironment, row: Row, options: argparse.Namespace, results: Path) -> None:
    runs = _wanted(row, options)
    where = Where.KUBELET if options.cluster == "existing" else Where.REAL
    known = _known(results, row, options) or RowResult(row.name, where, options.seed)
    session = Session(row.name, options.seed, range(len(known.outcomes), runs))
    log(f"row {row.name}: {row.fault}, {len(session.runs)} run{'s' if len(session.runs) > 1 else ''}")
    began = time.monotonic()
    outcomes: list[FaultRun] = []
    skipped = ""
    try:
        for outcome in row.run(env, session):
            outcomes.append(outcome)
            log(f"  {row.name}.{outcome.run} {_line(outcome)}")
    except RowSkippedError as reason:
        skipped = str(reason)
        log(f"  not run: {skipped}")
    except Exception as error:  # noqa: BLE001 - one row must not cost the others
        session.add_errors([f"the row ended with an error: {type(error).__name__}: {error}"])
    for sentence in session.wrong:
        log(f"  {row.name} WRONG: {sentence}")
    replace(
        known,
        outcomes=(*known.outcomes, *outcomes),
        wrong=(*known.wrong, *session.wrong),
        skipped=skipped,
        seconds=round(known.seconds + time.monotonic() - began, 1),
        asked=runs,
        commits=tuple(sorted({*known.commits, _commit()})),
    ).save(_file(results, row, options))


def _line(outcome: FaultRun) -> str:
    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f} s"

    text = f"detect {shown(outcome.detect)}, recover {shown(outcome.recover)}, lost {outcome.steps_lost}"
    note = f" ({outcome.note})" if outcome.note else ""
    return f"{text}{note}{'' if not outcome.wrong else ' WRONG: ' + '; '.join(outcome.wrong)}"


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
