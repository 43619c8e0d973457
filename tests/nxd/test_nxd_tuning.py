"""Tune on the nxd backend with the real neuronx-distributed, and compare with the native backend."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.testing.trainer.base_models import save_family

Launcher = Callable[..., Any]
MakeBase = Callable[..., Path]
Trained = dict[str, torch.Tensor]
Metrics = list[dict[str, Any]]
Run = Callable[..., tuple[Metrics, Trained]]

pytestmark = pytest.mark.timeout(900)  # the first test also waits for NxD's imports

NXD, NATIVE = "backend=Nxd", "backend=Native"
TP, TP4 = "parallelism.tensor=2", "parallelism.tensor=4"
SP = "parallelism.sequence=true"
ZERO1 = "dataParallel=ShardedOptimizer"
CONSTANT = "schedule.kind=Constant"
SETTINGS = "rank: 4, alpha: 8"
LORA = f"tuning={{method: LoRA, lora: {{{SETTINGS}, targets: ['*_proj', lm_head]}}}}"
SOME = f"tuning={{method: LoRA, lora: {{{SETTINGS}, targets: [k_proj, up_proj, down_proj]}}}}"
WITH_DROPOUT = f"tuning={{method: LoRA, lora: {{{SETTINGS}, dropout: 0.3, targets: ['*_proj']}}}}"
BESIDE_WEIGHTS = f"tuning={{method: LoRA, trainable: ['*norm', embed_tokens], lora: {{{SETTINGS}}}}}"
PATTERNS = "tuning={trainable: ['model.layers.1.*', norm]}"
MIXED = "tuning={trainable: [q_proj, v_proj, gate_proj, lm_head]}"
TUNINGS = {
    "LoRA": LORA,
    "LoRA on some": SOME,
    "LoRA with dropout": WITH_DROPOUT,
    "LoRA beside weights": BESIDE_WEIGHTS,
    "patterns": PATTERNS,
    "mixed": MIXED,
}
needs_torch_xla = pytest.mark.torch_xla


@pytest.fixture
def run(launch: Launcher, base: Path) -> Run:
    """Return a function that tunes a base and returns the metrics and the trained tensors."""

    def start(ranks: int, name: str, *overrides: str, weights: Path = base, **options: Any) -> tuple[Metrics, Trained]:
        job = launch(ranks, name, [f"model.weights={weights}", *overrides], **options).finish(300)
        return job.metrics(), job.weights()

    return start


@pytest.fixture(scope="module")
def native_results() -> dict[str, tuple[Metrics, Trained]]:
    """Return the results of the native backend by tuning, computed at their first use."""
    return {}


def assert_same(result: tuple[Metrics, Trained], expected_result: tuple[Metrics, Trained]) -> None:
    (metrics, trained), (expected_metrics, expected_trained) = result, expected_result
    for line, expected in zip(metrics, expected_metrics, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert line["gradNorm"] == pytest.approx(expected["gradNorm"], rel=1e-3)
        assert line.get("parameterNorm", 0) == pytest.approx(expected.get("parameterNorm", 0), rel=1e-5)
    assert trained.keys() == expected_trained.keys()
    for name, tensor in expected_trained.items():
        assert trained[name].dtype == tensor.dtype
        torch.testing.assert_close(trained[name], tensor, rtol=1e-3, atol=1e-4)


LAYOUTS = [
    pytest.param(1, [], id="one"),
    pytest.param(2, [TP], id="tp2"),
    pytest.param(2, [TP, SP], id="tp2, sequence"),
    pytest.param(4, [TP4, SP], id="tp4, sequence, repeated heads as on trn1"),
    pytest.param(4, [TP, SP, ZERO1], id="tp2, sequence, zero1 dp2", marks=needs_torch_xla),
    pytest.param(4, [TP, "recompute=Full"], id="tp2 dp2, full recompute"),
    pytest.param(2, [TP, SP, "recompute=Selective"], id="tp2, sequence, selective recompute"),
]


@pytest.mark.parametrize("tuning", TUNINGS)
@pytest.mark.parametrize(("ranks", "overrides"), LAYOUTS)
def test_curve_and_weights_equal_those_of_the_native_backend(
    run: Run,
    native_results: dict[str, tuple[Metrics, Trained]],
    ranks: int,
    overrides: Sequence[str],
    tuning: str,
) -> None:
    if tuning not in native_results:
        native_results[tuning] = run(1, "native", NATIVE, TUNINGS[tuning])
    assert_same(run(ranks, "nxd", NXD, TUNINGS[tuning], *overrides), native_results[tuning])


@pytest.mark.parametrize("tuning", ["LoRA", "LoRA with dropout", "mixed"])
def test_heads_repeated_as_on_trn2_make_the_same_curve(
    run: Run, native_results: dict[str, tuple[Metrics, Trained]], tuning: str
) -> None:
    if tuning not in native_results:
        native_results[tuning] = run(1, "native", NATIVE, TUNINGS[tuning])
    assert_same(run(4, "nxd", NXD, TUNINGS[tuning], TP4, TEST_NXD_TARGET="trn2"), native_results[tuning])


@pytest.mark.parametrize("overrides", [[TP, SP], pytest.param([TP, SP, ZERO1], marks=needs_torch_xla)])
def test_full_tuning_equals_that_of_the_native_backend(run: Run, overrides: list[str]) -> None:
    assert_same(run(4, "nxd", NXD, *overrides), run(1, "native", NATIVE))


WINDOW = {"sliding_window": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": WINDOW,
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, **WINDOW},
    "qwen3": {"head_dim": 16},
}


@pytest.mark.parametrize("tuning", ["tuning={method: Full}", LORA], ids=["full", "LoRA"])
@pytest.mark.parametrize(("ranks", "overrides"), [(2, [TP, SP]), (4, [TP4])], ids=["tp2, sequence", "tp4, repeated"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tuning_of_a_family_equals_that_of_the_native_backend(
    run: Run, base: Path, tmp_path: Path, family: str, ranks: int, overrides: list[str], tuning: str
) -> None:
    fields = {"vocab_size": 320, "intermediate_size": 64, "tie_word_embeddings": False} | FAMILIES[family]
    weights = save_family(tmp_path / "family", family, **fields)
    shutil.copy(base / "tokenizer.json", weights)
    expected = run(1, "native", NATIVE, tuning, weights=weights)
    assert_same(run(ranks, "nxd", NXD, tuning, *overrides, weights=weights), expected)


@pytest.mark.parametrize("tuning", [BESIDE_WEIGHTS, "tuning={trainable: [down_proj]}"], ids=["trained", "frozen"])
def test_a_tied_embedding_is_trained_or_frozen_once(run: Run, make_base: MakeBase, tuning: str) -> None:
    weights = make_base(tied=True)
    expected = run(1, "native", NATIVE, tuning, weights=weights)
    assert_same(run(2, "nxd", NXD, tuning, TP, SP, weights=weights), expected)


@pytest.mark.parametrize("tuning", [LORA, "tuning={method: Full}"], ids=["LoRA", "full"])
def test_rows_of_a_padded_vocabulary_do_not_count(run: Run, make_base: MakeBase, tuning: str) -> None:
    weights = make_base(vocabulary=321)
    expected = run(2, "native", NATIVE, tuning, TP, weights=weights)
    for name, overrides in (("nxd", [TP]), ("sequence", [TP, SP])):
        assert_same(run(2, name, NXD, tuning, *overrides, weights=weights), expected)


@pytest.mark.parametrize(
    ("tuning", "overrides"),
    [
        pytest.param(LORA, ["precision=BFloat16", TP], id="LoRA"),
        pytest.param(
            BESIDE_WEIGHTS, ["precision=BFloat16", TP, SP, ZERO1], id="LoRA beside weights", marks=needs_torch_xla
        ),
        pytest.param(MIXED, ["precision=BFloat16", TP, SP], id="mixed"),
        pytest.param(MIXED, ["precision=BFloat16Stochastic", TP, ZERO1], id="mixed, bfloat16", marks=needs_torch_xla),
    ],
)
def test_half_precision_stays_close_to_full_precision(run: Run, overrides: list[str], tuning: str) -> None:
    full, _ = run(1, "full", NATIVE, tuning)
    half, adapters = run(4, "half", NXD, tuning, *overrides)
    assert half[-1]["loss"] == pytest.approx(full[-1]["loss"], rel=1e-2)
    assert half[-1]["loss"] != full[-1]["loss"]
    assert {tensor.dtype for name, tensor in adapters.items() if ".lora_" in name} <= {torch.float32}


@pytest.mark.parametrize("tuning", [WITH_DROPOUT, PATTERNS], ids=["LoRA with dropout", "patterns"])
@pytest.mark.parametrize("overrides", [[TP], pytest.param([TP, SP, ZERO1], marks=needs_torch_xla)])
def test_a_resumed_tuning_is_bit_identical(run: Run, overrides: list[str], tuning: str) -> None:
    settings = [NXD, CONSTANT, tuning, *overrides]
    expected, expected_trained = run(4, "uninterrupted", *settings, "steps=6")
    run(4, "halted", *settings, "steps=3")
    resumed, trained = run(4, "halted", *settings, "steps=6")
    assert [line["loss"] for line in resumed] == [line["loss"] for line in expected]
    assert [line["gradNorm"] for line in resumed] == [line["gradNorm"] for line in expected]
    assert [name for name in expected_trained if not torch.equal(trained[name], expected_trained[name])] == []


@needs_torch_xla
@pytest.mark.parametrize("tuning", [WITH_DROPOUT, MIXED], ids=["LoRA with dropout", "mixed"])
def test_a_checkpoint_is_loaded_in_layouts_of_both_backends(run: Run, tuning: str) -> None:
    reference = run(1, "reference", NATIVE, tuning, CONSTANT, "steps=8")
    layouts: list[tuple[int, list[str]]] = [
        (2, [NATIVE]),
        (4, [NXD, ZERO1, TP, SP]),
        (4, [NXD, TP4]),
        (2, [NATIVE, TP]),
    ]
    for number, (ranks, overrides) in enumerate(layouts, start=1):
        resumed = run(ranks, "resumed", *overrides, tuning, CONSTANT, f"steps={2 * number}")
    assert_same(resumed, reference)


def test_a_killed_tuning_resumes_from_memory(launch: Launcher, run: Run, base: Path) -> None:
    settings = [NXD, TP, CONSTANT, WITH_DROPOUT, "steps=12"]
    reference, expected_trained = run(2, "reference", *settings)
    job = launch(2, "killed", [f"model.weights={base}", *settings], memory=True)
    job.wait_for_step(5, 300)
    for pid in job.pids:
        os.kill(pid, signal.SIGKILL)
    job.wait()
    resumed, trained = run(2, "killed", *settings, memory=True)
    assert [line["loss"] for line in resumed] == [line["loss"] for line in reference]
    assert [name for name in expected_trained if not torch.equal(trained[name], expected_trained[name])] == []


@pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)  # from peft about transformers
def test_a_tuning_starts_from_an_adapter_of_peft(run: Run, base: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(base)
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(5)
    peft.get_peft_model(model, lora).save_pretrained(tmp_path / "adapter")
    tuning = (
        f"tuning={{method: LoRA, lora: {{{SETTINGS}, targets: [q_proj, v_proj, down_proj], "
        f"adapter: {tmp_path / 'adapter'}}}}}"
    )
    expected = run(1, "native", NATIVE, tuning)
    assert_same(run(4, "nxd", NXD, tuning, TP, SP), expected)
    started, _ = run(1, "fresh", NATIVE, tuning.replace(str(tmp_path / "adapter"), "null"), "steps=2")
    assert started[0]["loss"] != pytest.approx(expected[0][0]["loss"], rel=1e-3), "the adapter is used"


@pytest.mark.parametrize("overrides", [[TP], pytest.param([TP, SP, ZERO1], marks=needs_torch_xla)])
def test_frozen_weights_have_no_optimizer_state(
    program: Callable[..., list[dict[str, Any]]], base: Path, overrides: list[str]
) -> None:
    for result in program("frozen", 4, NXD, f"model.weights={base}", LORA, "precision=BFloat16", *overrides):
        assert result["states"] > 0
        assert result["notAdapters"] == [], "only adapters have states and gradients"
        assert result["frozen"] == ["torch.bfloat16"]
        assert result["unchanged"]


@pytest.mark.parametrize("tuning", [LORA, "tuning={method: Full}"], ids=["LoRA", "full"])
def test_packed_examples_are_separate_as_on_the_native_backend(run: Run, tmp_path: Path, tuning: str) -> None:
    examples = tmp_path / "examples.jsonl"
    lines = [{"instruction": f"step {number}", "response": "loss " * (1 + number % 4)} for number in range(40)]
    examples.write_text("".join(json.dumps(line) + "\n" for line in lines))
    template = "data.examples.template={prompt: '{instruction}', completion: ' {response}'}"
    packed = [f"data.source={examples}", "data.format=Instruction", template, "data.examples.packing=true", tuning]
    expected = run(1, "native", NATIVE, *packed)
    assert_same(run(2, "divided", NXD, *packed, TP, SP, "recompute=Selective"), expected)
    joined = [*packed, "data.examples.maskExamples=false"]
    joined_result = run(1, "joined", NATIVE, *joined)
    assert joined_result[0][0]["loss"] != expected[0][0]["loss"]
    assert_same(run(2, "joined and divided", NXD, *joined, TP), joined_result)
