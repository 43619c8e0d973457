"""Elastic trainers of transformers on real torch processes: samples, losses and states at any size."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.worker.elastic_run import Run, start_server
from trainium_worker import STOPPED
from trainium_worker.progress_record import read_progress

pytestmark = pytest.mark.xdist_group("elastic")
ROWS, BATCH = 26, 8
STEPS_PER_EPOCH = 4
STEPS = 2 * STEPS_PER_EPOCH


@pytest.fixture(scope="module")
def server() -> Iterator["subprocess.Popen[str]"]:
    with start_server() as process:
        yield process


@pytest.fixture
def run(server: "subprocess.Popen[str]", tmp_path: Path) -> Run:
    return Run(server, tmp_path)


@pytest.fixture(scope="module")
def undisturbed(server: "subprocess.Popen[str]", tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(server, tmp_path_factory.mktemp("undisturbed"))
    assert run.start([0, 1]) == [0, 0], run.errors
    return run


def test_an_epoch_has_each_sample_once_in_steps_of_one_size(undisturbed: Run) -> None:
    ledger = undisturbed.ledger
    assert [len(ledger[step]) for step in range(1, STEPS + 1)] == [8, 8, 8, 2] * 2
    for epoch in range(2):
        steps = range(epoch * STEPS_PER_EPOCH + 1, (epoch + 1) * STEPS_PER_EPOCH + 1)
        assert sorted(number for step in steps for number in ledger[step]) == list(range(ROWS))
    assert ledger[1] != ledger[1 + STEPS_PER_EPOCH], "epochs have different orders"


@pytest.mark.parametrize("ranks", [1, 3])
def test_samples_and_losses_do_not_depend_on_the_number_of_ranks(undisturbed: Run, run: Run, ranks: int) -> None:
    assert run.start(list(range(ranks))) == [0] * ranks, run.errors
    assert run.ledger == undisturbed.ledger
    assert run.losses == pytest.approx(undisturbed.losses, rel=1e-6)


def test_the_ranks_of_a_launcher_have_the_batch_of_the_requested_nodes(undisturbed: Run, run: Run) -> None:
    assert run.start([0, 1], requested=1, processes=1) == [0, 0], run.errors
    assert run.ledger == undisturbed.ledger
    assert run.losses == undisturbed.losses, "bitwise equal"


def test_a_mean_over_rows_does_not_depend_on_the_number_of_ranks(run: Run, tmp_path: Path) -> None:
    curves = []
    for ranks in (2, 3):
        arguments = {"output_dir": str(tmp_path / f"out-{ranks}")}
        assert run.start(list(range(ranks)), loss="mean", arguments=arguments) == [0] * ranks, run.errors
        curves.append(run.losses)
    assert curves[1] == pytest.approx(curves[0], rel=1e-6)
    assert len(curves[0]) == STEPS


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_a_resize_of_the_job_keeps_the_batch_and_the_order(run: Run, tmp_path: Path, strategy: str) -> None:
    arguments = {"train_sampling_strategy": strategy}
    whole = {**arguments, "output_dir": str(tmp_path / "whole")}
    assert run.start([0, 1], arguments=whole) == [0, 0], run.errors
    losses, ledger = run.losses, run.ledger
    assert -9 in run.start([0, 1], agent=True, kill=[1, 3], arguments=arguments)
    assert -9 in run.start([0], agent=True, requested=1, kill=[0, 5], arguments=arguments), run.errors
    assert run.ledger.items() <= ledger.items()
    assert run.start([0, 1], agent=True, requested=2, arguments=arguments) == [0, 0], run.errors
    assert min(run.ledger) in {5, 6}
    assert run.ledger.items() <= ledger.items()
    assert run.losses == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize(("ranks", "tolerance"), [(2, 0.0), (1, 1e-6)])
def test_a_run_resumes_from_its_checkpoint_in_the_second_epoch(
    undisturbed: Run, run: Run, ranks: int, tolerance: float
) -> None:
    saves = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    assert -9 in run.start([0, 1], kill=[1, 7], arguments=saves)
    assert sorted(path.name for path in run.output.iterdir()) == ["checkpoint-4", "checkpoint-6", "metrics.jsonl"]
    assert run.start(list(range(ranks)), arguments=saves) == [0] * ranks, run.errors
    assert "resuming after step 6, from" in run.errors
    assert sorted(run.ledger) == [7, 8]
    assert run.ledger == {step: undisturbed.ledger[step] for step in (7, 8)}
    assert run.losses == pytest.approx(undisturbed.losses, rel=tolerance)
    assert sorted(path.name for path in run.output.iterdir()) == ["checkpoint-6", "checkpoint-8", "metrics.jsonl"]


@pytest.mark.parametrize("options", [{}, {"fsdp": True}, {"lora": True, "dropout": 0.1}], ids=["ddp", "fsdp", "lora"])
def test_a_killed_rank_costs_at_most_one_step(run: Run, undisturbed: Run, tmp_path: Path, options: Any) -> None:
    expected = undisturbed.losses
    if options:
        assert run.start([0, 1], arguments={"output_dir": str(tmp_path / "other")}, **options) == [0, 0], run.errors
        expected = run.losses
    assert -9 in run.start([0, 1], agent=True, kill=[1, 6], **options)
    assert run.start([0, 1], agent=True, **options) == [0, 0], run.errors
    resumed = min(run.ledger) - 1
    assert resumed >= 5, "step 6 was not complete"
    assert f"resuming after step {resumed}, from memory" in run.errors
    assert run.losses == expected, "bitwise equal"
    record = read_progress(run.progress(0))
    assert (record.step, record.total_steps, record.memory_step) == (STEPS, STEPS, STEPS)
    assert not list(run.output.glob("checkpoint-*")), "the state came from memory"


MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3": {"mixture": {"family": "qwen3_moe"}},
    "gpt-oss": {"mixture": {"family": "gpt_oss"}, "fsdp": True},
    "router-loss": {"mixture": {"family": "qwen3_moe", "output_router_logits": True}},
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_of_experts_goes_on_after_a_killed_rank_and_at_another_size(
    run: Run, tmp_path: Path, kind: str
) -> None:
    options, drops = MIXTURES[kind], {"dataloader_drop_last": kind == "router-loss"}
    whole = {**drops, "output_dir": str(tmp_path / "whole")}
    assert run.start([0, 1], arguments=whole, **options) == [0, 0], run.errors
    losses, ledger = run.losses, run.ledger
    assert -9 in run.start([0, 1], agent=True, kill=[1, 5], arguments=drops, **options)
    assert run.start([0, 1], agent=True, arguments=drops, **options) == [0, 0], run.errors
    assert min(run.ledger) in {5, 6}, run.errors
    assert run.ledger.items() <= ledger.items()
    assert run.losses == losses, "bitwise equal"
    one = {**drops, "output_dir": str(tmp_path / "one")}
    assert run.start([0], arguments=one, **options) == [0], run.errors
    assert run.ledger == ledger
    assert run.losses == pytest.approx(losses, rel=1e-6)


def test_a_loss_of_the_router_that_depends_on_the_size_is_announced(run: Run) -> None:
    assert run.start([0], **MIXTURES["router-loss"]) == [0], run.errors
    assert "Set dataloader_drop_last=True" in run.errors


def test_a_lost_node_and_another_size_cost_at_most_one_step(run: Run, undisturbed: Run) -> None:
    assert -9 in run.start([0, 1, 2], agent=True, kill=[2, 4])
    run.lose_node(2)
    assert -9 in run.start([0, 1], agent=True, kill=[0, 6])
    assert min(run.ledger) in {4, 5}, run.errors
    assert run.start([0, 1, 3], agent=True) == [0, 0, 0], run.errors
    assert min(run.ledger) in {6, 7}, run.errors
    assert run.ledger == {step: undisturbed.ledger[step] for step in run.ledger}
    assert run.losses == pytest.approx(undisturbed.losses, rel=1e-6)


def test_a_requested_stop_saves_and_exits_on_all_ranks(run: Run, undisturbed: Run) -> None:
    assert run.start([0, 1], agent=True, stop_at=5) == [STOPPED, STOPPED], run.errors
    assert sorted(path.name for path in run.output.iterdir()) == ["checkpoint-5", "metrics.jsonl"]
    assert read_progress(run.progress(0)).durable_step == 5
    for node in (0, 1):
        run.lose_node(node)
    assert run.start([0, 1]) == [0, 0], run.errors
    assert run.losses == undisturbed.losses, "bitwise equal"


def test_a_stop_after_which_the_memory_remains_saves_nothing_on_storage(run: Run, undisturbed: Run) -> None:
    assert run.start([0], agent=True, stop_at=5, memory_remains=True) == [STOPPED], run.errors
    assert [path.name for path in run.output.iterdir()] == ["metrics.jsonl"]
    assert run.start([0, 1], agent=True) == [0, 0], run.errors
    assert "resuming after step 5, from memory" in run.errors
    assert run.ledger == {step: samples for step, samples in undisturbed.ledger.items() if step > 5}
    assert run.losses == pytest.approx(undisturbed.losses, rel=1e-6)


@pytest.mark.parametrize(
    ("step", "arguments"),
    [(5, {"logging_steps": 3}), (6, {}), (4, {"save_strategy": "epoch"}), (8, {"save_strategy": "epoch"})],
    ids=["unlogged losses", "before the log", "before the end of an epoch", "before the end of the run"],
)
def test_a_surviving_rank_saves_what_the_trainer_has_not_done_after_a_step(
    run: Run, tmp_path: Path, step: int, arguments: Any
) -> None:
    whole = {**arguments, "output_dir": str(tmp_path / "whole")}
    assert run.start([0, 1], arguments=whole) == [0, 0], run.errors
    losses, ledger = run.losses, run.ledger
    assert -9 in run.start([0, 1], agent=True, kill=[1, step], arguments=arguments)
    assert f"step {step} is saved by rank 0 for all ranks" in run.errors
    run.lose_node(1)
    assert run.start([0, 2], agent=True, arguments=arguments) == [0, 0], run.errors
    assert f"resuming after step {step}, from memory" in run.errors
    assert run.ledger == {number: samples for number, samples in ledger.items() if number > step}
    assert run.losses == losses, "bitwise equal"
    assert {path.name for path in run.output.glob("checkpoint-*")} == (
        {"checkpoint-4", "checkpoint-8"} if arguments.get("save_strategy") else set()
    )


def test_a_rank_that_hangs_costs_no_complete_step(run: Run, undisturbed: Run) -> None:
    assert -9 in run.start([0, 1], agent=True, kill=[1, 6], fault="SIGSTOP")
    assert run.start([0, 1], agent=True) == [0, 0], run.errors
    assert "resuming after step 6, from memory" in run.errors
    assert run.losses == undisturbed.losses, "bitwise equal"


def test_a_step_after_which_the_trainer_ends_early_is_in_memory(run: Run) -> None:
    assert run.start([0, 1], agent=True, end_at=5) == [0, 0], run.errors
    assert max(run.ledger) == 5
    assert run.start([0, 1], agent=True) == [0, 0], run.errors
    assert "resuming after step 5, from memory" in run.errors
