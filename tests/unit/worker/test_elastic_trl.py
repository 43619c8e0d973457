"""Elastic trainers of TRL on real torch processes; `make test-trl` has TRL."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.worker.elastic_run import Run, start_server

pytest.importorskip("trl", reason="TRL is not installed: make test-trl")
pytestmark = pytest.mark.xdist_group("elastic-trl")
PROMPTS = {"trl": "grpo", "rows": 12}
KINDS: dict[str, dict[str, Any]] = {
    "sft": {"trl": "sft"},
    "sft-packed-lora": {"trl": "sft", "packing": True, "lora": True},
    "dpo": {"trl": "dpo"},
    "dpo-lora": {"trl": "dpo", "lora": True},
    # Adam scales a gradient that cancels between both answers to the learning rate, with the rounding of its sum: in
    # single precision the losses of two sizes differ by 3e-6 after 8 steps. In double precision only their log rounds.
    "reward": {"trl": "reward", "double": True},
    "grpo": PROMPTS,
}


@pytest.fixture(scope="module")
def server() -> Iterator["subprocess.Popen[str]"]:
    with start_server() as process:
        yield process


@pytest.fixture
def run(server: "subprocess.Popen[str]", tmp_path: Path) -> Run:
    return Run(server, tmp_path)


def read_ledger(run: Run) -> dict[int, list[int]]:
    """Return the samples of each step; a rank without one computes one of the step again, which does not count."""
    return {step: sorted(set(numbers)) for step, numbers in run.ledger.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_of_trl_goes_on_with_the_same_samples_and_losses(run: Run, tmp_path: Path, kind: str) -> None:
    options = KINDS[kind]
    assert run.start([0, 1], arguments={"output_dir": str(tmp_path / "whole")}, **options) == [0, 0], run.errors
    losses, ledger = run.losses, read_ledger(run)
    half = len(ledger) // 2
    for epoch in (range(1, half + 1), range(half + 1, 2 * half + 1)):
        samples = [number for step in epoch for number in ledger[step]]
        assert sorted(samples) == list(range(options.get("rows", 26)))

    assert -9 in run.start([0, 1], agent=True, kill=[1, half + 2], **options)
    assert run.start([0, 1], agent=True, **options) == [0, 0], run.errors
    assert min(run.ledger) in {half + 2, half + 3}, run.errors
    assert read_ledger(run) == {step: ledger[step] for step in run.ledger}
    assert run.losses == losses, "bitwise equal"

    assert run.start([0], arguments={"output_dir": str(tmp_path / "one")}, **options) == [0], run.errors
    assert read_ledger(run) == ledger
    if kind != "grpo" and "lora" not in options:  # rewards have another order, and dropout depends on the rank
        assert run.losses == pytest.approx(losses, rel=2e-7 if options.get("double") else 1e-6)
    assert run.losses.keys() == losses.keys()


def test_grpo_goes_on_with_the_same_answers_and_counts_each_reward_once(run: Run, tmp_path: Path) -> None:
    assert run.start([0, 1], arguments={"output_dir": str(tmp_path / "whole")}, **PROMPTS) == [0, 0], run.errors
    losses, answers = run.losses, run.answers
    assert {len(step) for step in answers.values()} == {8}, "two prompts with four answers"

    counted: dict[int, list[list[Any]]] = {}
    for step in (2, 5):
        assert -9 in run.start([0, 1], agent=True, kill=[1, step], **PROMPTS), run.errors
        counted |= run.answers
    assert run.start([0, 1], agent=True, **PROMPTS) == [0, 0], run.errors
    assert min(run.answers) > 2, "it resumed"
    assert counted | run.answers == answers, "each prompt with its four answers and their rewards, once"
    assert {step: losses[step] for step in run.losses} == run.losses, "bitwise equal"

    assert run.start([0], arguments={"output_dir": str(tmp_path / "one")}, **PROMPTS) == [0], run.errors
    assert run.answers == answers, "also at another size: an answer depends on the step and its position"
