"""Save the state of a loop after each step: real processes on nodes of one rank, killed and restarted."""

from pathlib import Path

import pytest

from tests.unit.worker.programs import SimulatedJob, save_each_step

STEPS = 9
VALUES_BYTES = 4096


def run(folder: Path, nodes: list[int], **options: object) -> SimulatedJob:
    folder.mkdir(exist_ok=True)
    job = SimulatedJob(folder)
    assert job.run(nodes=nodes, train=save_each_step, **options) == [0] * len(nodes), job.errors
    return job


@pytest.mark.parametrize("case", ["", "buffers", "values", "fsdp"])
def test_a_lost_node_costs_at_most_one_step_and_the_run_ends_bit_for_bit(tmp_path: Path, case: str) -> None:
    expected = run(tmp_path / "whole", [0, 1], steps=STEPS, case=case)
    assert [report["saved"] for report in expected.reports] == [[*range(1, STEPS + 1)]] * 2
    job = SimulatedJob(tmp_path)
    assert job.run(nodes=[0, 1], train=save_each_step, steps=STEPS, case=case, kill=[1, 7])[1] == -9
    job.lose_node(0)
    assert job.run(nodes=[2, 1], train=save_each_step, steps=STEPS, case=case) == [0, 0], job.errors
    assert [report["resumed"] for report in job.reports] == [6, 6]
    assert job.reports[0]["values"] == [800 * 6 if case == "values" else 0, 0]
    assert job.reports[1]["weights"] == expected.reports[1]["weights"], "bitwise equal"


def test_ranks_with_equal_tensors_send_their_values_only(tmp_path: Path) -> None:
    for report in run(tmp_path, [0, 1], steps=STEPS).reports:
        planned, *repeated = report["sent"]
        assert planned > VALUES_BYTES
        assert repeated == [VALUES_BYTES] * (STEPS - 1)


def test_ranks_with_other_tensors_under_one_name_send_all(tmp_path: Path) -> None:
    job = run(tmp_path, [0, 1], steps=STEPS, case="buffers")
    planned = [report["sent"][0] for report in job.reports]
    repeated = [report["sent"][1:] for report in job.reports]
    assert repeated[0] == [VALUES_BYTES] * (STEPS - 1), "its part has no buffer"
    assert repeated[1] == [VALUES_BYTES, *[planned[1]] * (STEPS - 1)], "the first copy was repeated as a whole"


@pytest.mark.parametrize(
    ("case", "missing"), [("new tensor", set()), ("new tensor of rank 1", {4}), ("new tensor of rank 0", {4})]
)
def test_a_new_tensor_is_saved_at_once_if_all_ranks_have_it(tmp_path: Path, case: str, missing: set[int]) -> None:
    job = run(tmp_path, [0, 1], steps=STEPS, case=case)
    assert [set(range(1, STEPS + 1)) - set(report["saved"]) for report in job.reports] == [missing, missing]


def test_a_discarded_save_leaves_the_newest_complete_one(tmp_path: Path) -> None:
    job = SimulatedJob(tmp_path)
    assert job.run(nodes=[0, 1], train=save_each_step, steps=STEPS, case="new tensor of rank 1", kill=[0, 5])[0] == -9
    job.lose_node(0)
    assert job.run(nodes=[2, 1], train=save_each_step, steps=STEPS) == [0, 0], job.errors
    assert [report["resumed"] for report in job.reports] == [3, 3]
