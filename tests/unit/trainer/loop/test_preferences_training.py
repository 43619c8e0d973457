"""Tune on preferences in real runs: one curve in every layout and after a kill; compute the reference once."""

import math
import os
import random
import shutil
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.testing.trainer.example_files import WORDS, write_records
from tests.testing.trainer.layouts import PP, SHARDED, SP, TP, TWO_PASSES, ZERO
from tests.unit.trainer.conftest import Launcher, ReferenceRuns

pytestmark = pytest.mark.timeout(300)  # real processes; the first test also waits for the imports

LORA = "method: LoRA, lora: {rank: 4, alpha: 8, dropout: 0.2, targets: ['*_proj']}"
DPO = "objective: {kind: DPO, beta: 0.5}"
TUNINGS = {
    "LoRA": f"tuning={{{LORA}, {DPO}}}",
    "full": "tuning={objective: {kind: DPO, beta: 0.5, labelSmoothing: 0.1}}",
}
FIGURES = frozenset({"loss", "rewardChosen", "rewardRejected", "rewardMargin", "rewardAccuracy"})
HELD_OUT = frozenset({"validationLoss", "validationRewardMargin"})


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory, base: Path) -> list[str]:
    """Return the overrides of a run on 40 pairs, five of which are held back."""
    folder = tmp_path_factory.mktemp("pairs")
    rng = random.Random(0)
    rows = [
        {
            "prompt": f"say {WORDS[number % 12]} number {number}:",
            "chosen": " " + " ".join(rng.choices(WORDS[:6], k=rng.randint(1, 6))),
            "rejected": " " + " ".join(rng.choices(WORDS[6:], k=rng.randint(1, 6))),
        }
        for number in range(40)
    ]
    return [
        f"data.source={write_records(folder / 'd.jsonl', rows)}",
        f"data.cacheDirectory={folder / 'cache'}",
        "data.format=Preference",
        "data.sequenceLength=64",
        "data.workers=1",
        "data.validation={fraction: 0.15, everySteps: 3, samples: 5}",
        f"model.weights={base}",
    ]


def run(launch: Launcher, ranks: int, name: str, overrides: Sequence[str]) -> list[dict[str, Any]]:
    return launch(ranks, name, overrides).finish().metrics()


def assert_same(metrics: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for line, expected_line in zip(metrics, expected, strict=True):
        ties = {"rewardAccuracy"} if expected_line["step"] == 1 else set()  # all rewards are zero up to rounding
        for name in (FIGURES | (HELD_OUT & expected_line.keys())) - ties:
            assert line[name] == pytest.approx(expected_line[name], rel=1e-4 if "eward" in name else 1e-5, abs=1e-5)


LAYOUTS = {
    "data": (2, []),
    "uneven": (3, ["batch.microSize=1"]),
    "tensor": (2, [TP, SP, TWO_PASSES]),
    "sharded": (2, [SHARDED, "recompute=Full"]),
    "zero": (2, [ZERO]),
    "pipeline": (2, [PP]),
}


@pytest.mark.parametrize(
    ("tuning", "layouts"),
    [
        pytest.param("full", ("uneven", "tensor", "sharded", "pipeline"), id="full"),
        pytest.param("LoRA", ("tensor", "pipeline"), id="LoRA"),
        *(pytest.param(name, LAYOUTS, id=f"{name}, every layout", marks=pytest.mark.long) for name in TUNINGS),
    ],
)
def test_the_curve_and_the_rewards_do_not_depend_on_the_layout(
    launch: Launcher, reference_run: ReferenceRuns, pairs: list[str], tuning: str, layouts: Iterable[str]
) -> None:
    tuning = TUNINGS[tuning]
    expected_metrics = reference_run(1, [*pairs, tuning]).metrics()
    assert [line["step"] for line in expected_metrics if "validationRewardAccuracy" in line] == [3, 6]
    assert "perplexity" not in expected_metrics[0]
    for name in layouts:
        ranks, overrides = LAYOUTS[name]
        assert_same(run(launch, ranks, name, [*pairs, tuning, *overrides]), expected_metrics)


@pytest.mark.parametrize("tuning", [pytest.param("LoRA", marks=pytest.mark.long), "full"])
def test_columns_that_are_padding_in_all_rows_of_a_micro_batch_are_not_computed(
    launch: Launcher, reference_run: ReferenceRuns, pairs: list[str], tuning: str
) -> None:
    short = reference_run(1, [*pairs, TUNINGS[tuning]]).metrics()
    long = run(launch, 1, "long", [*pairs, TUNINGS[tuning], "data.sequenceLength=256"])
    assert [line["loss"] for line in long] == [line["loss"] for line in short], "bitwise the same tensors"
    divided = run(launch, 2, "pipeline", [*pairs, TUNINGS[tuning], "data.sequenceLength=256", PP])
    assert_same(divided, short)


def test_a_run_starts_at_the_reference_and_learns_the_preferred_answers(launch: Launcher, pairs: list[str]) -> None:
    lines = run(launch, 1, "one", [*pairs, TUNINGS["LoRA"].replace("0.2", "0.0"), "steps=20"])
    assert lines[0]["loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert lines[0]["rewardMargin"] == pytest.approx(0, abs=1e-5)
    assert lines[-1]["loss"] < 0.5 * math.log(2)
    assert lines[-1]["rewardAccuracy"] == 1
    margin = lines[-1]["rewardChosen"] - lines[-1]["rewardRejected"]
    assert lines[-1]["rewardMargin"] == pytest.approx(margin, rel=1e-4)
    assert lines[-1]["validationRewardAccuracy"] > 0.5


def test_a_resumed_run_has_the_bitwise_same_losses_and_does_not_repeat_the_reference(
    launch: Launcher, pairs: list[str]
) -> None:
    overrides = [*pairs, TUNINGS["full"], "schedule.decaySteps=4"]
    expected_metrics = run(launch, 2, "whole", overrides)
    job = launch(2, "half", [*overrides, "checkpoint.durable={everySteps: 2}"])
    job.wait_for_step(3)
    for pid in job.pids:
        os.kill(pid, signal.SIGKILL)
    job.wait()
    restarted = launch(2, "half", [*overrides, "checkpoint.durable={everySteps: 2}"]).finish()
    assert "reference: " not in restarted.log()
    assert [line["loss"] for line in restarted.metrics()] == [line["loss"] for line in expected_metrics]


@pytest.mark.parametrize("layout", [[], [PP]], ids=["data", "pipeline"])
def test_only_pairs_without_a_stored_reference_are_computed(
    launch: Launcher, pairs: list[str], tmp_path: Path, layout: list[str]
) -> None:
    overrides = [*pairs, f"data.cacheDirectory={tmp_path / 'cache'}", TUNINGS["full"], *layout]
    expected_metrics = run(launch, 2, "whole", overrides)
    (file,) = (tmp_path / "cache").glob("examples-*/reference-*.f32")
    values = np.fromfile(file, np.float32)
    assert len(values) == 80
    assert np.isfinite(values).all()
    values[10:30] = np.nan
    values.tofile(file)
    sweep = ["tuning.objective.beta=0.25", "optimizer.learningRate=1e-9", "seed=3", "steps=7"]
    job = launch(2, "again", [*overrides, *sweep]).finish()
    assert "reference: 0 of 10 pairs" in job.log()
    assert job.metrics()[0]["loss"] == pytest.approx(expected_metrics[0]["loss"], rel=1e-5)
    assert len(list(file.parent.glob("reference-*.f32"))) == 1


def change_head(base: Path) -> None:
    """Change the last rows of the output projection, which are outside the middle that the digest reads."""
    stored = load_file(base / "model.safetensors")
    stored["lm_head.weight"][-40:] *= 3
    save_file(stored, base / "model.safetensors", metadata={"format": "pt"})


OTHER_MODELS: dict[str, tuple[int, list[str]]] = {
    "scaled rotary embedding": (1, ["model.ropeScaling={kind: Linear, factor: 8}"]),
    "another rotary base": (1, ["model.ropeTheta=100"]),
    "another epsilon of the norms": (1, ["model.normEps=0.1"]),
    "another precision": (1, ["precision=BFloat16"]),
    "tensor parallelism": (2, [TP]),
    "other weights in the same folder": (1, []),
}


def test_a_reference_is_computed_again_where_the_model_computes_another_one(
    launch: Launcher, pairs: list[str], base: Path, tmp_path: Path
) -> None:
    larger = shutil.copytree(base, tmp_path / "base")
    stored = load_file(larger / "model.safetensors")
    save_file({name: 3 * tensor for name, tensor in stored.items()}, larger / "model.safetensors", {"format": "pt"})
    tuning = "tuning={objective: {kind: DPO, beta: 1.0}}"
    fixed = [f"model.weights={larger}", f"data.cacheDirectory={tmp_path / 'cache'}", tuning]
    assert run(launch, 1, "first", [*pairs, *fixed])[0]["loss"] == pytest.approx(math.log(2), rel=1e-6)
    for name, (ranks, overrides) in OTHER_MODELS.items():
        if not overrides:
            change_head(larger)
        job = launch(ranks, name, [*pairs, *fixed, *overrides]).finish()
        assert "reference: 0 of 40 pairs" in job.log(), name
        assert job.metrics()[0]["loss"] == pytest.approx(math.log(2), rel=1e-6), name
        assert job.metrics()[0]["rewardAccuracy"] == 0, f"{name}: the model begins as its reference"


def test_a_reference_in_a_folder_is_computed_ahead_with_the_result_of_the_base(
    launch: Launcher, reference_run: ReferenceRuns, pairs: list[str], base: Path, tmp_path: Path
) -> None:
    cache = f"data.cacheDirectory={tmp_path / 'cache'}"

    def train_from_reference(ranks: int, folder: Path) -> list[dict[str, Any]]:
        tuning = TUNINGS["LoRA"].replace("beta: 0.5", f"beta: 0.5, reference: {folder}")
        return run(launch, ranks, folder.name, [*pairs, cache, tuning])

    expected_metrics = reference_run(1, [*pairs, TUNINGS["LoRA"]]).metrics()
    assert_same(train_from_reference(2, shutil.copytree(base, tmp_path / "same")), expected_metrics)
    other = train_from_reference(1, save_variant(tmp_path / "other", base))
    assert other[0]["rewardMargin"] != pytest.approx(0, abs=1e-2), "the run starts with another model"


def save_variant(folder: Path, base: Path, **fields: Any) -> Path:
    """Save a model like the base with other weights and fields."""
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig.from_pretrained(base, **fields)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"vocab_size": 500}, "has a vocabulary of 500 tokens, but the trained model has 320"),
        ({"num_hidden_layers": 3}, "describes a model of another shape than the trained one"),
    ],
)
def test_a_reference_that_does_not_fit_is_refused(
    launch: Launcher, pairs: list[str], base: Path, tmp_path: Path, fields: dict[str, Any], sentence: str
) -> None:
    folder = save_variant(tmp_path / "other", base, **fields)
    job = launch(1, "refused", [*pairs, f"tuning={{objective: {{reference: {folder}}}}}"])
    assert job.wait() == [64], job.log()
    assert sentence in job.log().splitlines()[-1]


def test_a_resume_with_another_reference_is_refused(
    launch: Launcher, pairs: list[str], base: Path, tmp_path: Path
) -> None:
    overrides = [*pairs, f"tuning={{objective: {{reference: {save_variant(tmp_path / 'other', base)}}}}}", "steps=2"]
    run(launch, 1, "run", overrides)
    restarted = launch(1, "run", [*pairs, "tuning={objective: {kind: DPO}}", "steps=3"])
    assert restarted.wait() == [64], restarted.log()
    assert "reference" in restarted.log().splitlines()[-1]
