"""Test what an elastic trainer refuses, and what it accepts beside training: in one process, without an agent."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from trainium_contract.views.curve import read_curve
from trainium_worker.hooks.transformers import elastic

pytestmark = pytest.mark.xdist_group("elastic")
ROWS, STEPS = 8, 8


class Rows(torch.utils.data.Dataset[Any]):
    """Texts of random tokens."""

    def __init__(self, seed: int = 0, count: int = ROWS) -> None:
        self.seed, self.count = seed, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = torch.randint(2, 32, (6,), generator=torch.Generator().manual_seed(100 * self.seed + index))
        return {"input_ids": tokens, "labels": tokens.clone()}


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Rows())


class Stop(Exception):  # noqa: N818 - not an error
    """The end of a process."""


class Callback(TrainerCallback):
    """Calls a function after each step."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.function(state, control)


def build(folder: Path, dataset: Any = None, kind: Any = Trainer, **arguments: Any) -> Any:
    torch.manual_seed(0)
    if kind is Seq2SeqTrainer:
        settings: Any = Seq2SeqTrainingArguments
        sizes: dict[str, Any] = {
            "vocab_size": 32,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 1,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        }
        config = T5Config(**sizes)
        model: Any = T5ForConditionalGeneration(config)
    else:
        settings = TrainingArguments
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=2,
            )
        )  # fmt: skip
    values = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "num_train_epochs": 2, "logging_steps": 1,
        "save_strategy": "steps", "save_steps": 2, "use_cpu": True, "report_to": [], "disable_tqdm": True,
        "learning_rate": 1e-2, **arguments,
    }  # fmt: skip
    return kind(model, settings(**values), train_dataset=Rows() if dataset is None else dataset, eval_dataset=Rows(1))


def train_until(trainer: Any, step: int) -> Any:
    """Train, and end as a killed process does once a step has completed."""

    def stop(state: Any, control: Any) -> None:
        if state.global_step == step:
            raise Stop

    trainer.add_callback(Callback(stop))
    with pytest.raises(Stop):
        elastic(trainer).train()


def losses(trainer: Any) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def started(folder: Path) -> Any:
    trainer = build(folder, max_steps=1)
    trainer.train()
    return trainer


FSDP1 = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1)))


def replaced(folder: Path, **attributes: Any) -> Any:
    """Build a trainer with attributes that only other hardware or packages give it."""
    trainer = build(folder)
    vars(trainer).update(attributes)
    return trainer


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (started, r"has trained already: call elastic\(trainer\) before trainer.train\(\)"),
        (
            lambda folder: build(folder, Stream(), max_steps=2),
            "is a stream, in which no run can continue at a position",
        ),
        (lambda folder: replaced(folder, train_dataset=None), "it has no train_dataset"),
        (lambda folder: replaced(folder, train_dataset=Rows(count=0)), "its train_dataset has no samples"),
        (lambda folder: build(folder, auto_find_batch_size=True), "set per_device_train_batch_size"),
        (lambda folder: build(folder, train_sampling_strategy="batch_rebalance"), "use 'random' or 'group_by_length'"),
        (lambda folder: replaced(folder, is_deepspeed_enabled=True), "use FSDP2 instead"),
        (lambda folder: replaced(folder, is_fsdp_enabled=True, accelerator=FSDP1), "use FSDP2 .*fsdp_version"),
        (
            lambda folder: replaced(folder, get_tp_size=lambda: 2),
            "1 ranks cannot be divided into groups of 2 .*lower these degrees, or run at another size",
        ),
    ],
    ids=["started", "stream", "no-data", "no-samples", "batch-size", "rebalance", "deepspeed", "fsdp1", "world-size"],
)
def test_what_cannot_be_elastic_is_refused_with_the_remedy(tmp_path: Path, prepare: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"Trainer cannot be elastic: .*{message}"):
        elastic(prepare(tmp_path))


def test_a_trainer_is_made_elastic_once_and_trains_once(tmp_path: Path) -> None:
    trainer = elastic(build(tmp_path))
    assert elastic(trainer) is trainer
    assert type(trainer).__mro__.count(Trainer) == 1
    trainer.train()
    with pytest.raises(ValueError, match="trains once: create another one, with another output_dir"):
        trainer.train()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 5}, "another seed .*: 42 then, 5 now"),
        ({"data_seed": 5}, "another seed .*: 42 then, 5 now"),
        ({"per_device_train_batch_size": 4}, "another batch .*: 2 then, 4 now"),
        ({"dataset": Rows(count=9)}, "another number of samples: 8 then, 9 now"),
        ({"dataset": Rows(seed=3)}, "another data set: some of its samples, or their order, differ"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    train_until(build(tmp_path), 3)
    with pytest.raises(ValueError, match=f"{message}.*Start with what the run had, or choose another output_dir"):
        elastic(build(tmp_path, **change)).train()
    trainer = elastic(build(tmp_path))
    trainer.train()
    assert trainer.state.global_step == STEPS, "nothing was lost"


@pytest.mark.parametrize("file", ["elastic.json", "trainer_state.json"])
def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path, file: str) -> None:
    train_until(build(tmp_path), 3)
    path = tmp_path / "checkpoint-2" / file
    record = json.loads(path.read_text())
    record = {**record, "of_tomorrow": 1} if file == "trainer_state.json" else {"output_dir": record["output_dir"]}
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"checkpoint-2 was saved by another version of \w+: "):
        elastic(build(tmp_path)).train()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "model.safetensors",
            b"x" * 10,
            "cannot be read .*: delete it, and the run resumes from the checkpoint before",
        ),
        ("optimizer.pt", b"x" * 10, "cannot be read .Weights only load failed.: delete it"),
    ],
)
def test_a_damaged_checkpoint_is_named_with_the_remedy(tmp_path: Path, file: str, content: bytes, message: str) -> None:
    train_until(build(tmp_path), 5)
    (tmp_path / "checkpoint-4" / file).write_bytes(content)
    with pytest.raises(ValueError, match=f"checkpoint-4 {message}"):
        elastic(build(tmp_path)).train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    trainer = elastic(build(tmp_path))
    trainer.train()
    assert min(losses(trainer)) <= 3, "it resumed from checkpoint-2"


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    train_until(build(tmp_path), 3)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    trainer = build(tmp_path)
    trainer.model = trainer.model_wrapped = model
    with pytest.raises(
        ValueError, match=r"checkpoint-2 is of another model: .*Create the model as when the run started"
    ):
        elastic(trainer).train()


def test_a_named_checkpoint_has_to_exist(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"resume_from_checkpoint names .*correct it or leave it out"):
        elastic(build(tmp_path)).train(str(tmp_path / "checkpoint-100"))


def test_a_fault_after_the_last_step_repeats_none(tmp_path: Path) -> None:
    for _ in range(2):
        trainer = elastic(build(tmp_path, max_steps=2))
        trainer.train()
        assert trainer.state.global_step == 2


def test_epochs_are_ignored_beside_max_steps(tmp_path: Path) -> None:
    train_until(build(tmp_path, max_steps=6), 5)
    trainer = elastic(build(tmp_path, max_steps=6))
    trainer.train()
    assert trainer.state.global_step == 6
    assert len(losses(trainer)) == 6


def test_a_script_may_save_in_its_own_callback(tmp_path: Path) -> None:
    trainer = build(tmp_path, save_strategy="no")

    def save(state: Any, control: Any) -> None:
        if state.global_step == 3:
            trainer.save_model(str(tmp_path / "own"))
            trainer._save_checkpoint(trainer.model, None)
            control.should_save = True

    trainer.add_callback(Callback(save))
    train_until(trainer, 4)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    assert (tmp_path / "own" / "model.safetensors").exists()
    assert not (tmp_path / ".incomplete").exists()
    again = elastic(build(tmp_path, save_strategy="no"))
    again.train()
    whole = elastic(build(tmp_path / "whole", save_strategy="no"))
    whole.train()
    assert losses(again) == losses(whole), "bitwise equal"
    with (tmp_path / "metrics.jsonl").open() as lines:
        assert {point.step: point.loss for point in read_curve(lines)} == losses(whole), "drawn by kubectl trn report"


def test_an_evaluation_that_generates_and_the_best_model_survive_a_fault(tmp_path: Path) -> None:
    arguments = {
        "kind": Seq2SeqTrainer, "eval_strategy": "steps", "eval_steps": 2, "predict_with_generate": True,
        "load_best_model_at_end": True, "save_total_limit": 1,
    }  # fmt: skip
    whole = elastic(build(tmp_path / "whole", **arguments))
    whole.train()
    train_until(build(tmp_path / "faults", **arguments), 5)
    trainer = elastic(build(tmp_path / "faults", **arguments))
    trainer.train()
    assert losses(trainer) == losses(whole), "bitwise equal"
    assert trainer.state.best_metric == whole.state.best_metric
    assert Path(trainer.state.best_model_checkpoint).name == Path(whole.state.best_model_checkpoint).name
    for parameter, expected in zip(trainer.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(parameter, expected)
