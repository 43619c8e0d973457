"""Run rows of the fault table, save their results, and write the page."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from benchmarks.faults.document import write_document
from benchmarks.faults.environment import NODES, FaultEnvironment, RowSkippedError
from benchmarks.faults.leaks import LeakDetector
from benchmarks.faults.record import ClusterKind, RowResult, RunResult
from benchmarks.faults.row import ROWS, RequestedRuns, Row
from benchmarks.harness.conditions import ROOT, read_commit
from tests.testing.cluster.shared_cluster import open_cluster

HERE = Path(__file__).parent
_STARTED = time.monotonic()


def log(sentence: str) -> None:
    """Print progress."""
    print(f"[{time.monotonic() - _STARTED:6.1f} s] {sentence}", flush=True)


def main() -> int:
    """Run rows; return 1 if a row failed."""
    options = _parse_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # runs the cleanup of existing clusters
    rows = _select_rows(options)
    if not options.resume:
        for row in rows:
            _find_result_path(row, options).unlink(missing_ok=True)
    pending = [row for row in rows if not _is_complete(row, options)]
    leaks: list[str] = []
    log(f"{len(pending)} rows to run, {len(rows) - len(pending)} are complete; seed {options.seed}")
    if pending:
        leaks = _run_rows(pending, options)
    if options.document is not None:
        write_document(options.results, options.document)
        log(f"wrote {options.document}")
    results = [RowResult.load(path) for row in rows if (path := _find_result_path(row, options)).exists()]
    failed = [result.name for result in results if not result.passed and not result.skipped]
    log(f"{sum(result.passed for result in results)} rows passed; failed: {failed or 'none'}")
    for sentence in leaks:
        log(f"WRONG: {sentence}")
    return 1 if failed or leaks else 0


def _run_rows(rows: list[Row], options: argparse.Namespace) -> list[str]:
    """Run rows on one cluster; return a sentence for each leak."""
    with (
        open_cluster(options.cluster, NODES) as cluster,
        FaultEnvironment(cluster, options.out, log) as env,
        LeakDetector(env) if options.leaks else nullcontext() as detector,
    ):
        for row in rows:
            _run_row(env, row, options)
        return detector.report() if detector else []


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--rows", default="", help="for instance 1,4b,25 (25a and 25b); by default all")
    parser.add_argument("--runs", type=int, default=30, help="runs of each row (rows that take long: fewer)")
    parser.add_argument("--seed", type=int, default=1, help="determines random ranks, nodes and times")
    parser.add_argument("--resume", action="store_true", help="add missing runs instead of running all again")
    parser.add_argument("--cluster", choices=("local", "existing"), default="local", help="as for the tests")
    parser.add_argument("--leaks", action="store_true", help="also look for leaks (development cluster only)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "faults", help="folder for diagnostics")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the results")
    parser.add_argument(
        "--document", type=Path, default=ROOT / "benchmarks" / "faults" / "fault-table.md", help="page to write"
    )
    parser.add_argument("--no-document", dest="document", action="store_const", const=None, help="write no page")
    return parser.parse_args()


def _select_rows(options: argparse.Namespace) -> list[Row]:
    selected = {part for part in options.rows.split(",") if part}
    unknown = sorted(selected - {name for row in ROWS for name in (row.row, str(row.number))})
    if unknown:
        sys.exit(f"There are no rows {', '.join(unknown)}; there are {', '.join(row.row for row in ROWS)}.")
    rows = [row for row in ROWS if not selected or selected & {row.row, str(row.number)}]
    return [row for row in rows if row.kubelet] if options.cluster == "existing" else rows


def _find_result_path(row: Row, options: argparse.Namespace) -> Path:
    suffix = "kubelet" if options.cluster == "existing" else "local"
    folder: Path = options.results
    return folder / f"{row.file_stem}-{suffix}.json"


def _count_requested_runs(row: Row, options: argparse.Namespace) -> int:
    return min(int(options.runs), row.runs)


def _read_previous_result(row: Row, options: argparse.Namespace) -> RowResult | None:
    """Return the result of earlier runs with the same seed when resuming; else None."""
    path = _find_result_path(row, options)
    if not options.resume or not path.exists():
        return None
    result = RowResult.load(path)
    return None if result.skipped or result.seed != options.seed else result


def _is_complete(row: Row, options: argparse.Namespace) -> bool:
    previous = _read_previous_result(row, options)
    return previous is not None and len(previous.runs) >= _count_requested_runs(row, options)


def _run_row(env: FaultEnvironment, row: Row, options: argparse.Namespace) -> None:
    cluster = ClusterKind.KUBELETS if options.cluster == "existing" else ClusterKind.DEVCLUSTER
    previous = _read_previous_result(row, options) or RowResult(row.row, cluster, options.seed)
    requested = RequestedRuns(row.row, options.seed, range(len(previous.runs), _count_requested_runs(row, options)))
    log(f"row {row.row}: {row.fault}, {len(requested.runs)} run{'s' if len(requested.runs) > 1 else ''}")
    started_at = time.monotonic()
    results: list[RunResult] = []
    skipped = ""
    try:
        for result in row.run(env, requested):
            results.append(result)
            log(f"  {row.row}.{result.run} {_format_run(result)}")
    except RowSkippedError as reason:
        skipped = str(reason)
        log(f"  not run: {skipped}")
    except Exception as error:  # noqa: BLE001 - the other rows still run
        requested.add_errors([f"the row ended with an error: {type(error).__name__}: {error}"])
    for sentence in requested.deviations:
        log(f"  {row.row} WRONG: {sentence}")
    replace(
        previous,
        runs=(*previous.runs, *results),
        deviations=(*previous.deviations, *requested.deviations),
        skipped=skipped,
        duration_seconds=round(previous.duration_seconds + time.monotonic() - started_at, 1),
        requested_runs=_count_requested_runs(row, options),
        commits=tuple(sorted({*previous.commits, read_commit()})),
    ).save(_find_result_path(row, options))


def _format_run(result: RunResult) -> str:
    def format_seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f} s"

    detection, recovery = format_seconds(result.detection_seconds), format_seconds(result.recovery_seconds)
    note = f" ({result.note})" if result.note else ""
    deviations = f" WRONG: {'; '.join(result.deviations)}" if result.deviations else ""
    return f"detect {detection}, recover {recovery}, lost {result.steps_lost}{note}{deviations}"


if __name__ == "__main__":
    sys.exit(main())
