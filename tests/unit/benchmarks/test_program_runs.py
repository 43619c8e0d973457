"""Programs of others through all faults: their report, and its table on the page."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.program_recovery.costs import FaultCost, RunCost, read_report, write_report
from benchmarks.program_recovery.document import PAGE, RESULTS, update_page
from benchmarks.program_recovery.programs import PROGRAMS
from trainium_devcluster.jobs.ledger import Computation, Ledger, read_ledger

_RUN = RunCost(
    title="loop",
    faults=(
        FaultCost("killed rank", 0.71, 1),
        FaultCost("killed operator", 0.05, 0),
        FaultCost("resize to 1", None, 0),
    ),
    completed=True,
    steps=400,
    samples_missing=0,
    samples_repeated=2,
    loss_difference=4.2e-7,
    loss_difference_before_resize=0.0,
    uses=(2,),
    load=3.4,
    seconds=120.0,
    date="2026-11-29",
)
_EMPTY_PAGE = "<!-- table of programs.json -->\n<!-- end of the table -->\n"


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_report(tmp_path / "out" / "report.json", {"loop": _RUN})
    assert read_report(tmp_path / "out" / "report.json") == {"loop": _RUN}
    assert read_report(tmp_path / "report.json") == {}


def test_the_table_has_a_line_for_each_program() -> None:
    page = update_page(_EMPTY_PAGE, {"loop": _RUN})
    assert "| loop | 0.7 s, 1 | not run | not run | none | never | not run | 0, 2 | equal | 4e-07 |" in page
    assert update_page(page, {"loop": _RUN}) == page


def test_a_program_that_did_not_end_is_named_with_its_reason() -> None:
    page = update_page(_EMPTY_PAGE, {"loop": replace(_RUN, completed=False, problem="The job failed.")})
    assert "not completed" in page
    assert "Not to the end: loop, The job failed.\n" in page


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="no marks"):
        update_page("# Runs\n", {"loop": _RUN})


def test_the_page_has_the_recorded_runs() -> None:
    runs = read_report(RESULTS)
    assert runs.keys() <= PROGRAMS.keys()
    assert update_page(PAGE.read_text(), runs) == PAGE.read_text()


def test_losses_are_compared_up_to_the_first_step_at_another_size() -> None:
    reference = Ledger({(step, 0.0): Computation([step], ranks=2, loss=1.0) for step in (1, 2, 3)}, ended_ranks=2)
    resized = Ledger(reference.computations | {(3, 1.0): Computation([3], ranks=1, loss=1.5)}, ended_ranks=1)
    assert resized.find_first_step_at_another_size(reference) == 3
    assert resized.compute_max_loss_difference(reference, before=3) == 0.0
    assert resized.compute_max_loss_difference(reference) == 0.5
    assert reference.find_first_step_at_another_size(reference) == math.inf


def test_losses_close_to_zero_are_compared_with_the_mean() -> None:
    reference = Ledger({(step, 0.0): Computation([step], loss=loss) for step, loss in ((1, 0.0), (2, 2.0))}, 1)
    other = Ledger({(step, 0.0): Computation([step], loss=loss) for step, loss in ((1, 0.5), (2, 2.0))}, 1)
    assert other.compute_max_loss_difference(reference) == 0.5
    assert (
        Ledger({(1, 0.0): Computation([1])}, 1).compute_max_loss_difference(Ledger({(1, 0.0): Computation([1])}, 1))
        == 0.0
    )


@pytest.mark.parametrize("last", [1, 2])
def test_samples_of_a_rank_that_is_killed_at_the_end_of_a_step_count(tmp_path: Path, last: int) -> None:
    """Rank 1 is killed after the gradients of the last step are reduced; rank 0 begins the next one."""
    for rank, ended_steps in (("0", last), ("1", last - 1)):
        lines = []
        steps = range(1, ended_steps + 1)
        for step in range(1, ended_steps + 2):
            samples = [2 * step + int(rank)]
            lines.append({"start": 5.0, "time": step - 0.5, "started": samples})
            ended = {"start": 5.0, "time": step, "step": step, "samples": samples, "loss": 1.0, "ranks": 2}
            lines += [ended] if step in steps else []
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"samples-{rank}-5.0.jsonl").write_text(text)
    ledger = read_ledger(tmp_path)
    assert ledger.group_samples_by_step() == {step: [2 * step, 2 * step + 1] for step in range(1, last + 1)}
    assert ledger.newest_step == last
    other = Ledger({(step, 0.0): Computation([], ranks=2, loss=1.0) for step in range(1, last + 1)}, 2)
    assert ledger.compute_max_loss_difference(other) == 0.0
