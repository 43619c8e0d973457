"""Run rows of the fault table, save their results, and write the page."""

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
from benchmarks.faults.leaks import LeakDetector
from benchmarks.faults.record import ClusterKind, FaultRun, RowResult
from benchmarks.faults.row import Row, RowRuns
from benchmarks.faults.rows import ROWS
from tests.testing.cluster.shared_cluster import open_cluster

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_STARTED = time.monotonic()


def log(sentence: str) -> None:
    """Print progress."""
    print(f"[{time.monotonic() - _STARTED:6.1f} s] {sentence}", flush=True)


def main() -> int:
    """Run rows; return 1 if a row failed."""
    options = _parse_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # runs the cleanup of existing clusters
    rows = _select_rows(options)
    out: Path = options.out
    results: Path = options.results
    if not options.resume:
        for row in rows:
            _path(results, row, options).unlink(missing_ok=True)
    waiting = [row for row in rows if not _is_done(results, row, options)]
    leaks: list[str] = []
    log(f"{len(waiting)} rows to run, {len(rows) - len(waiting)} are done; seed {options.seed}")
    if waiting:
        from tests.testing.cluster import shared_cluster  # noqa: PLC0415 - the number of nodes is the table's own

        shared_cluster.NODES = NODES
        with open_cluster(options.cluster) as site, FaultEnvironment(site, out, log) as env, ExitStack() as stack:
            search = stack.enter_context(LeakDetector(env)) if options.leaks else None
            for row in waiting:
                _run_row(env, row, options, results)
            leaks = search.found() if search else []
    if options.document is not None:
        write_document(results, options.document)
        log(f"wrote {options.document}")
    everything = [RowResult.load(_path(results, row, options)) for row in rows if _path(results, row, options).exists()]
    failed = [result.name for result in everything if not result.passed and not result.skipped]
    log(f"{sum(result.passed for result in everything)} rows passed; failed: {failed or 'none'}")
    for sentence in leaks:
        log(f"WRONG: {sentence}")
    return 1 if failed or leaks else 0


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--rows", default="", help="for instance 1,4b,25 (25a and 25b); by default all")
    parser.add_argument("--runs", type=int, default=30, help="runs of each row (rows that take long: fewer)")
    parser.add_argument("--seed", type=int, default=1, help="chooses ranks, nodes and times")
    parser.add_argument("--resume", action="store_true", help="add missing runs instead of running all again")
    parser.add_argument("--cluster", choices=("local", "existing"), default="local", help="as for the tests")
    parser.add_argument("--leaks", action="store_true", help="also look for leaks (development cluster only)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "faults", help="folder for diagnostics")
    parser.add_argument(
        "--results", type=Path, default=HERE / "results", help="folder of the figures, kept with the code"
    )
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "fault-table.md", help="the table to write")
    parser.add_argument("--no-document", dest="document", action="store_const", const=None, help="write no table")
    return parser.parse_args()


def _select_rows(options: argparse.Namespace) -> list[Row]:
    wanted = {part for part in options.rows.split(",") if part}
    unknown = sorted(wanted - {name for row in ROWS for name in (row.name, str(row.number))})
    if unknown:
        sys.exit(f"There are no rows {', '.join(unknown)}; there are {', '.join(row.name for row in ROWS)}.")
    rows = [row for row in ROWS if not wanted or wanted & {row.name, str(row.number)}]
    return [row for row in rows if row.kubelet] if options.cluster == "existing" else rows


def _suffix(options: argparse.Namespace) -> str:
    return "-kubelet" if options.cluster == "existing" else "-local"


def _path(results: Path, row: Row, options: argparse.Namespace) -> Path:
    return results / f"{row.number:02d}{row.part}{_suffix(options)}.json"


def _requested_runs(row: Row, options: argparse.Namespace) -> int:
    return min(int(options.runs), row.max_runs)


def _previous_result(results: Path, row: Row, options: argparse.Namespace) -> RowResult | None:
    """Return the result of earlier runs with the same seed when resuming; else None."""
    path = _path(results, row, options)
    if not options.resume or not path.exists():
        return None
    known = RowResult.load(path)
    return None if known.skipped or known.seed != options.seed else known


def _is_done(results: Path, row: Row, options: argparse.Namespace) -> bool:
    known = _previous_result(results, row, options)
    return known is not None and len(known.outcomes) >= _requested_runs(row, options)


def _run_row(env: FaultEnvironment, row: Row, options: argparse.Namespace, results: Path) -> None:
    runs = _requested_runs(row, options)
    where = ClusterKind.KUBELET if options.cluster == "existing" else ClusterKind.REAL
    known = _previous_result(results, row, options) or RowResult(row.name, where, options.seed)
    session = RowRuns(row.name, options.seed, range(len(known.outcomes), runs))
    log(f"row {row.name}: {row.fault}, {len(session.runs)} run{'s' if len(session.runs) > 1 else ''}")
    began = time.monotonic()
    outcomes: list[FaultRun] = []
    skipped = ""
    try:
        for outcome in row.run(env, session):
            outcomes.append(outcome)
            log(f"  {row.name}.{outcome.run} {_format_run(outcome)}")
    except RowSkippedError as reason:
        skipped = str(reason)
        log(f"  not run: {skipped}")
    except Exception as error:  # noqa: BLE001 - one row must not cost the others
        session.add_errors([f"the row ended with an error: {type(error).__name__}: {error}"])
    for sentence in session.deviations:
        log(f"  {row.name} WRONG: {sentence}")
    replace(
        known,
        outcomes=(*known.outcomes, *outcomes),
        deviations=(*known.deviations, *session.deviations),
        skipped=skipped,
        seconds=round(known.seconds + time.monotonic() - began, 1),
        requested=runs,
        commits=tuple(sorted({*known.commits, _commit()})),
    ).save(_path(results, row, options))


def _format_run(outcome: FaultRun) -> str:
    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f} s"

    text = f"detect {shown(outcome.detect)}, recover {shown(outcome.recover)}, lost {outcome.steps_lost}"
    note = f" ({outcome.note})" if outcome.note else ""
    return f"{text}{note}{'' if not outcome.deviations else ' WRONG: ' + '; '.join(outcome.deviations)}"


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
