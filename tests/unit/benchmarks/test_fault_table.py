"""The fault table: its statistics, and its lines for rows that pass, fail or did not run."""

import inspect
import random
from pathlib import Path

from benchmarks.faults.document import format_table_line, write_document
from benchmarks.faults.environment import hash_curve_code
from benchmarks.faults.injections import CONTEXTS, INJECTIONS
from benchmarks.faults.record import ClusterKind, RowResult, RunResult, Spread
from benchmarks.faults.row import ROWS, RequestedRuns


def result(*runs: RunResult, **more: object) -> RowResult:
    return RowResult("1", ClusterKind.DEVCLUSTER, 7, runs, **more)


def test_percentiles_are_measured_values() -> None:
    assert Spread.summarize([3.0, None, 1.0, 2.0]) == Spread(2.0, 3.0, 3.0)
    assert Spread.summarize([float(number) for number in range(1, 31)]) == Spread(15.0, 29.0, 30.0)
    assert Spread.summarize([]) is None
    assert Spread.summarize([None]) is None


def test_a_row_passes_only_when_it_ran_without_problems() -> None:
    assert not result().passed
    assert result(RunResult(0)).passed
    assert not result(RunResult(0), RunResult(1, deviations=("2 steps were lost",))).passed
    assert not result(RunResult(0), deviations=("the curve differs",)).passed


def test_blame_is_counted_among_the_runs_that_expect_one() -> None:
    assert result(RunResult(0, blame_correct=True), RunResult(1, blame_correct=False), RunResult(2)).blame_counts == (
        1,
        2,
    )


def test_a_result_is_read_as_written(tmp_path: Path) -> None:
    written = result(
        RunResult(0, 0.1, 0.2, 1, True, ("deviations",), "w-1"),
        deviations=("all",),
        duration_seconds=3.5,
        commits=("a",),
    )
    written.save(tmp_path / "row.json")
    assert RowResult.load(tmp_path / "row.json") == written


def test_a_failing_row_stays_in_the_table_with_its_message(tmp_path: Path) -> None:
    runs = (RunResult(0, 0.5, 1.5, 0, True), RunResult(1, 0.7, 2.5, 3, False, ("3 steps were lost",)))
    result(*runs).save(tmp_path / "01-local.json")
    write_document(tmp_path, tmp_path / "table.md")
    text = (tmp_path / "table.md").read_text()
    assert "0.50 / 0.70 / 0.70 | 1.50 / 2.50 / 2.50 | 3 | 1/2 | 7 | **FAILS** 1 of 2 |" in text
    assert "- 3 steps were lost" in text


def test_a_row_that_was_not_run_again_keeps_its_line_and_is_marked_as_older(tmp_path: Path) -> None:
    table = tmp_path / "table.md"
    for name in ("01-local", "05-kubelet"):
        result(RunResult(0, 0.5, 1.5, 0, True)).save(tmp_path / f"{name}.json")
    write_document(tmp_path, table)
    before = [line for line in table.read_text().splitlines() if "0.50 / 0.50 / 0.50" in line]
    for path in tmp_path.glob("*.json"):
        path.unlink()
    for _ in range(2):
        write_document(tmp_path, table)
        after = [line for line in table.read_text().splitlines() if "0.50 / 0.50 / 0.50" in line]
        assert after == [line.replace("| pass |", "| pass (older) |") for line in before]
    assert len(before) == 2


def test_a_row_without_a_result_reports_it() -> None:
    row = ROWS[0]
    assert "not run yet" in format_table_line(row, None)
    skipped = RowResult(row.row, ClusterKind.DEVCLUSTER, 1, skipped="no such node")
    assert "not run: no such node" in format_table_line(row, skipped)


def test_a_seed_gives_the_same_choices_whatever_else_is_run() -> None:
    first, second = RequestedRuns("5", 1, range(2)), RequestedRuns("5", 1, range(30))
    assert first.create_random(1).random() == second.create_random(1).random()
    assert first.create_random(0).random() != RequestedRuns("5", 2, range(2)).create_random(0).random()
    assert isinstance(first.create_random(0), random.Random)


def test_each_row_has_its_descriptions() -> None:
    for row in ROWS:
        assert all((row.fault, row.injected, row.expected, row.checked)), row.row
        assert 1 <= row.runs <= 30


def test_the_function_of_each_row_takes_its_arguments() -> None:
    for row in ROWS:
        inspect.signature(INJECTIONS[row.inject]).bind("run", **row.arguments)
        assert row.context in {"", *CONTEXTS}, row.row


def test_every_row_without_an_accelerator_exists() -> None:
    assert {row.number for row in ROWS} == {*range(1, 7), 8, *range(12, 35), *range(42, 54)}
    assert len({row.row for row in ROWS}) == len(ROWS)


def test_the_reference_curve_is_identified_by_a_digest_of_its_code() -> None:
    assert hash_curve_code() == hash_curve_code()
    assert len(hash_curve_code()) == 12
