"""Tune a real Hugging Face folder with the same curve and adapter in every layout."""

import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from tests.testing.trainer.base_models import save_base
from tests.testing.trainer.layouts import CP, PP, SHARDED, SP, TP, TWO_PASSES, ZERO
from tests.unit.trainer.conftest import BASE_FIELDS, Job, Launcher, ReferenceRuns
from trainium_contract.trainer.artifacts import ArtifactPrecision
from trainium_trainer.artifacts.export import merge
from trainium_trainer.checkpoint.root.selection import choose_checkpoint
from trainium_trainer.storage import open_storage

LORA = "tuning={method: LoRA, lora: {rank: 4, alpha: 8, targets: ['*_proj']}}"
WITH_DROPOUT = "tuning={method: LoRA, lora: {rank: 4, alpha: 8, dropout: 0.3, targets: ['*_proj']}}"
DORA = (
    "tuning={method: LoRA, lora: {rank: 4, alpha: 8, dora: true, dropout: 0.2, rankPattern: {down_proj: 2}, "
    "alphaPattern: {q_proj: 2}, targets: ['*_proj']}}"
)
PATTERNS = "tuning={trainable: ['model.layers.1.*', 'norm']}"


def run(launch: Launcher, base: Path, ranks: int, name: str, overrides: Sequence[str]) -> Job:
    return launch(ranks, name, [f"model.weights={base}", *overrides]).finish()


LAYOUTS = [
    pytest.param(WITH_DROPOUT, 2, [], id="LoRA, dp2", marks=pytest.mark.long),
    pytest.param(WITH_DROPOUT, 4, [], id="LoRA, dp4", marks=pytest.mark.long),
    pytest.param(WITH_DROPOUT, 3, ["batch.microSize=1"], id="LoRA, dp3, an empty pass"),
    pytest.param(WITH_DROPOUT, 2, [TP], id="LoRA, tp2", marks=pytest.mark.long),
    pytest.param(WITH_DROPOUT, 2, [TP, SP, TWO_PASSES], id="LoRA, tp2, sequence"),
    pytest.param(
        WITH_DROPOUT,
        4,
        ["parallelism.tensor=4", SP],
        id="LoRA, tp4, two ranks to a key/value head, sequence",
        marks=pytest.mark.long,
    ),
    pytest.param(WITH_DROPOUT, 2, [ZERO], id="LoRA, sharded optimizer", marks=pytest.mark.long),
    pytest.param(WITH_DROPOUT, 4, [SHARDED, TP, SP], id="LoRA, sharded, tp2, sequence", marks=pytest.mark.long),
    pytest.param(WITH_DROPOUT, 2, [PP], id="LoRA, pp2"),
    pytest.param(WITH_DROPOUT, 2, [CP], id="LoRA, cp2"),
    pytest.param(
        WITH_DROPOUT,
        4,
        [PP, TP, SP, "recompute=Full"],
        id="LoRA, pp2, tp2, sequence, recompute",
        marks=pytest.mark.long,
    ),
    pytest.param(DORA, 2, [TP, SP, TWO_PASSES], id="DoRA, tp2, sequence"),
    pytest.param(
        DORA, 4, ["parallelism.tensor=4"], id="DoRA, tp4, two ranks to a key/value head", marks=pytest.mark.long
    ),
    pytest.param(DORA, 2, [SHARDED, "recompute=Full"], id="DoRA, sharded, recompute"),
    pytest.param(DORA, 2, [PP], id="DoRA, pp2", marks=pytest.mark.long),
    pytest.param(PATTERNS, 2, [TP, SP, TWO_PASSES], id="patterns, tp2, sequence"),
    pytest.param(PATTERNS, 4, [SHARDED, TP], id="patterns, sharded, tp2", marks=pytest.mark.long),
    pytest.param(PATTERNS, 2, [PP], id="patterns, pp2, the first stage trains nothing"),
]


@pytest.mark.parametrize(("tuning", "ranks", "overrides"), LAYOUTS)
def test_the_curve_and_the_trained_weights_do_not_depend_on_the_layout(
    launch: Launcher, reference_run: ReferenceRuns, base: Path, tuning: str, ranks: int, overrides: list[str]
) -> None:
    reference = reference_run(1, [f"model.weights={base}", tuning])
    other = run(launch, base, ranks, "other", [tuning, *overrides])
    other.assert_same_curve(reference)
    torch.testing.assert_close(other.weights(), reference.weights(), rtol=1e-3, atol=1e-4)


BOTH = ["embed_tokens", "lm_head"]
ADAPTERS: dict[str, tuple[bool, int, dict[str, Any], list[str] | None]] = {
    "plain": (False, 320, {}, None),
    "output projection": (False, 320, {"target_modules": ["q_proj", "lm_head"]}, None),
    "output projection of a tied base": (True, 320, {"target_modules": ["q_proj", "lm_head"]}, None),
    "one more token, tied base": (True, 321, {"modules_to_save": BOTH}, BOTH),
    "embedding of a tied base": (True, 320, {"modules_to_save": ["embed_tokens"]}, ["embed_tokens"]),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # peft and transformers about each other
@pytest.mark.parametrize("case", ADAPTERS)
def test_a_run_starts_from_an_adapter_of_peft_and_writes_one(
    launch: Launcher, base: Path, tmp_path: Path, case: str
) -> None:
    tied, rows, fields, trainable = ADAPTERS[case]
    folder = tmp_path / "base"
    save_base(folder, **BASE_FIELDS | {"tie_word_embeddings": tied})
    shutil.copy(base / "tokenizer.json", folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.resize_token_embeddings(rows)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | fields
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    merge(str(folder), str(tmp_path / "adapter"), tmp_path / "merged", precision=ArtifactPrecision.FLOAT32)
    tokens = torch.arange(24)[None]
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits, rtol=1e-4, atol=1e-4)

    lora = {"rank": 4, "alpha": 8, "targets": settings["target_modules"], "adapter": str(tmp_path / "adapter")}
    tuning = yaml.safe_dump({"method": "LoRA", "trainable": trainable, "lora": lora}, default_flow_style=True)
    started = run(launch, folder, 2, "started", [f"tuning={tuning}", "artifacts.precision=Float32", TP, TWO_PASSES])
    reference = run(launch, tmp_path / "merged", 1, "whole", [])
    assert started.losses()[0] == pytest.approx(reference.losses()[0], rel=1e-5)
    (artifacts,) = (started.folder / "artifacts").iterdir()
    grown = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    grown.resize_token_embeddings(rows)
    written = peft.PeftModel.from_pretrained(grown, str(artifacts / "adapter"))
    expected = LlamaForCausalLM.from_pretrained(artifacts / "model")(tokens).logits
    torch.testing.assert_close(written(tokens).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [321, 300])
def test_a_vocabulary_is_grown_to_the_tokenizer_and_padded_for_the_ranks(
    launch: Launcher, base: Path, tmp_path: Path, rows: int
) -> None:
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.resize_token_embeddings(rows, mean_resizing=False)
    model.save_pretrained(tmp_path / "resized")
    shutil.copy(base / "tokenizer.json", tmp_path / "resized")
    overrides = [f"model.weights={tmp_path / 'resized'}"]
    reference = run(launch, base, 1, "whole", overrides)
    divided = run(launch, base, 2, "divided", [*overrides, TP, TWO_PASSES])
    assert divided.losses() == pytest.approx(reference.losses(), rel=1e-5)
    embedding = divided.weights()["model.model.embed_tokens.weight"]
    tokens = Tokenizer.from_file(str(base / "tokenizer.json")).get_vocab_size()
    assert embedding.shape[0] == (384 if rows == 321 else tokens), "321 rows are odd; 300 are fewer than the tokens"
    refused = launch(1, "refused", [f"model.weights={tmp_path / 'resized'}", LORA])
    assert refused.wait() == ([0] if rows == 321 else [64]), refused.log()


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        pytest.param(2, [], id="pp2"),
        pytest.param(4, [SHARDED], id="pp2, sharded", marks=pytest.mark.long),
        pytest.param(4, [TP, SP], id="pp2, tp2, sequence", marks=pytest.mark.long),
    ],
)
def test_adapters_on_a_tied_model_in_two_stages_do_not_change_the_shared_weight(
    launch: Launcher, base: Path, tmp_path: Path, ranks: int, overrides: list[str]
) -> None:
    config = LlamaConfig.from_pretrained(base, tie_word_embeddings=True)
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tied")
    shutil.copy(base / "tokenizer.json", tmp_path / "tied")
    reference = run(launch, tmp_path / "tied", 1, "whole", [LORA])
    staged = run(launch, tmp_path / "tied", ranks, "staged", [LORA, PP, *overrides])
    assert staged.losses() == pytest.approx(reference.losses(), rel=1e-5)
    assert staged.weights().keys() == reference.weights().keys()


def test_dropout_changes_the_curve_from_the_second_step_on(reference_run: ReferenceRuns, base: Path) -> None:
    plain = reference_run(1, [f"model.weights={base}", LORA]).losses()
    with_dropout = reference_run(1, [f"model.weights={base}", WITH_DROPOUT]).losses()
    assert with_dropout[0] == plain[0], "an adapter has no effect at first"
    assert with_dropout[2] != plain[2]


def test_a_resumed_run_with_dropout_is_bitwise_equal(
    launch: Launcher, reference_run: ReferenceRuns, base: Path
) -> None:
    reference = reference_run(2, [f"model.weights={base}", WITH_DROPOUT])
    durable = "checkpoint.durable={everySteps: 2}"
    half = launch(2, "half", [f"model.weights={base}", WITH_DROPOUT, durable, "schedule.decaySteps=4", "steps=6"])
    half.wait_for_step(3)
    for pid in half.pids:
        os.kill(pid, signal.SIGKILL)
    half.wait()
    resumed = run(launch, base, 2, "half", [WITH_DROPOUT, durable, "schedule.decaySteps=4"])
    assert resumed.losses() == reference.losses()
    torch.testing.assert_close(resumed.weights(), reference.weights(), rtol=0, atol=0)


def test_a_checkpoint_has_only_trained_weights(reference_run: ReferenceRuns, base: Path) -> None:
    job = reference_run(1, [f"model.weights={base}", LORA])
    assert all(".lora_" in name for name in job.weights())
    storage = open_storage(str(job.folder))
    committed = choose_checkpoint(storage, str(job.folder), None, milestones=False)
    values = sum(tensor.numel() for tensor in job.weights().values())
    files = sum(file.size for file in committed.manifest.files if file.name.endswith(".safetensors"))
    assert files <= 1.25 * 3 * 4 * values, "weights and two moments in float32, and headers"
    assert committed.manifest.settings["tuning"]["method"] == "LoRA"
    assert len(committed.manifest.settings["weights"]) == 64


def test_a_resume_on_another_base_is_refused(launch: Launcher, base: Path, tmp_path: Path) -> None:
    run(launch, base, 1, "lora", [LORA, "steps=2"])
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(base))
    model.save_pretrained(tmp_path / "other")
    shutil.copy(base / "tokenizer.json", tmp_path / "other")
    job = launch(1, "lora", [f"model.weights={tmp_path / 'other'}", LORA])
    assert job.wait() == [64], job.log()
    assert "weights is " in job.log().splitlines()[-1]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([LORA, "model.weights=null"], "tuning freezes weights, but model.weights is not given"),
        ([LORA, "model.hiddenSize=64"], "model.hiddenSize is 64, but the model at"),
        ([LORA.replace("*_proj", "q_prj")], "matches none of the model's linear layers"),
    ],
)
def test_an_invalid_tuning_is_refused(launch: Launcher, base: Path, overrides: list[str], sentence: str) -> None:
    job = launch(1, "refused", [f"model.weights={base}", *overrides])
    assert job.wait() == [64], job.log()
    assert sentence in job.log().splitlines()[-1]


def test_bfloat16_tuning_stays_close_to_float32(launch: Launcher, reference_run: ReferenceRuns, base: Path) -> None:
    reference = reference_run(1, [f"model.weights={base}", LORA]).losses()
    for name, overrides in (("replicated", []), ("sharded", [SHARDED])):
        half = run(launch, base, 2, name, [LORA, "precision=BFloat16", *overrides]).losses()
        assert half[-1] == pytest.approx(reference[-1], rel=0.02)
        assert half[-1] != reference[-1]
