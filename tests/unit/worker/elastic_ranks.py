"""Import transformers once, and fork ranks that train a small Llama, as JSON lines on the standard input order.

An order has the environments of the ranks and the options of `train`; its answer has the exit codes of the ranks.
"""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.tensor
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from trainium_worker.hooks.elastic import elastic
from trainium_worker.progress_record import read_progress, stop_at
from trainium_worker.save_request import request_save

TOKENS = 24


class Rows(torch.utils.data.Dataset[Any]):
    """Texts of random tokens, each with its number and another number of labels."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self.count:
            raise IndexError(index)
        tokens = torch.randint(0, 128, (TOKENS,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        labels[: index % 5] = -100
        return {"input_ids": tokens, "labels": labels, "number": torch.tensor(index), "length": index % 11}


class MeanLoss(torch.nn.Module):
    """A model whose loss is the mean over the rows of a batch, as those of preferences and rewards are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(TOKENS, 8)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(input_ids / 128).pow(2).sum(1).mean()}


class LedgerTrainer(Trainer):
    """Records which samples count in each step."""

    ledger: dict[int, list[int]]

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        numbers = inputs.pop("number").tolist()
        inputs.pop("length")
        counted = [number for number, labels in zip(numbers, inputs["labels"], strict=True) if (labels != -100).any()]
        self.ledger.setdefault(self.state.global_step + 1, []).extend(counted)
        return super().training_step(model, inputs, *args, **kwargs)


class Faults(TrainerCallback):
    """Kills a rank after a step, or requests a stop of all ranks."""

    def __init__(self, options: dict[str, Any], report: Any) -> None:
        self._options, self._report = options, report

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._report()
        if self._options.get("kill") == [args.process_index, state.global_step]:
            os.kill(os.getpid(), signal.Signals[self._options.get("fault", "SIGKILL")])
        control.should_training_stop |= self._options.get("end_at") == state.global_step
        if self._options.get("stop_at") == state.global_step:
            path = Path(os.environ["TRAINIUM_PROGRESS_FILE"])
            reading = read_progress(path)
            assert reading is not None
            stop_at(path, reading.stop_checks + 1, memory_remains=self._options.get("memory_remains", False))


def build_model(options: dict[str, Any]) -> torch.nn.Module:
    torch.manual_seed(0)
    if options.get("loss") == "mean":
        return MeanLoss()
    if "mixture" in options:
        return build_mixture(**options["mixture"])
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attention_dropout=options.get("dropout", 0.0),
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if options.get("lora"):
        import peft

        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
    return model


def build_mixture(family: str, **fields: Any) -> torch.nn.Module:
    """Return a model of four experts, of which two compute each token."""
    config = AutoConfig.for_model(
        family, vocab_size=128, hidden_size=32, intermediate_size=32, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64, num_experts=4,
        num_local_experts=4, num_experts_per_tok=2, pad_token_id=0, eos_token_id=1, attn_implementation="eager",
        **fields,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def train(results: Path, options: dict[str, Any]) -> None:
    if options.get("fsdp"):
        options["arguments"] |= {"fsdp": "full_shard", "fsdp_config": {"fsdp_version": 2}}
    arguments = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 2, "logging_steps": 1,
        "save_strategy": "no", "use_cpu": True, "report_to": [], "disable_tqdm": True,
        "learning_rate": options.get("learning_rate", 1e-2), "ddp_find_unused_parameters": False,
        **options["arguments"],
    }  # fmt: skip
    rows = options.get("rows", 26)
    trainer: Any
    if "trl" in options:
        from tests.unit.worker.trl_trainers import build_trainer

        trainer = build_trainer(options["trl"], rows, options, {"bf16": False, **arguments})
    else:
        settings = TrainingArguments(**{"remove_unused_columns": False, **arguments})
        trainer = LedgerTrainer(build_model(options), settings, train_dataset=Rows(rows))
    trainer.ledger = {}
    report_file = results / f"rank-{trainer.args.process_index}.json"

    def report() -> None:
        losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
        draft = report_file.with_suffix(".draft")
        draft.write_text(
            json.dumps(
                {
                    "losses": losses,
                    "ledger": trainer.ledger,
                    "step": trainer.state.global_step,
                    "answers": getattr(trainer, "answers", {}),
                }
            )
        )
        draft.replace(report_file)

    trainer.add_callback(Faults(options, report))
    elastic(trainer).train()
    report()


def run_rank(environment: dict[str, str], results: Path, options: dict[str, Any]) -> None:
    os.environ.update(environment)
    errors = results / f"errors-{environment['RANK']}"
    for descriptor in (1, 2):
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    code = 1
    try:
        train(results, options)
        dist.barrier() if dist.is_initialized() else None
        code = 0
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    except BaseException:  # noqa: BLE001 - a rank of a test
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def run_ranks(order: dict[str, Any]) -> list[int]:
    """Fork the ranks, end all as the agent does once one has failed, and return their exit codes."""
    children = []
    for environment in order["environments"]:
        child = os.fork()
        if child == 0:
            run_rank(environment, Path(order["results"]), order["options"])
        children.append(child)
    codes: dict[int, int] = {}
    deadline = time.monotonic() + order["seconds"]
    while len(codes) < len(children):
        for child in children:
            if child not in codes and (ended := os.waitpid(child, os.WNOHANG | os.WUNTRACED))[0]:
                if os.WIFSTOPPED(ended[1]):
                    os.kill(child, signal.SIGKILL)
                else:
                    codes[child] = os.waitstatus_to_exitcode(ended[1])
        if time.monotonic() > deadline or any(code not in {0, 75} for code in codes.values()):
            for child, environment in zip(children, order["environments"], strict=True):
                if child not in codes:
                    if "TRAINIUM_PROGRESS_FILE" in environment:
                        request_save(Path(environment["TRAINIUM_PROGRESS_FILE"]), order["seconds"])
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[child] for child in children]


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_warning()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(run_ranks(json.loads(line))) + "\n")
        sys.stdout.flush()
