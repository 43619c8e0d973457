"""The example scripts of TRL with the arguments of their jobs, on small local models; `make test-trl` has TRL."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.testing.suite.timeouts import scaled
from trainium_contract.job import TrainingJobSpec

pytest.importorskip("trl", reason="TRL is not installed: make test-trl")
pytestmark = pytest.mark.xdist_group("elastic-trl")
EXAMPLES = Path(__file__).parents[3] / "manifests" / "examples"
ROWS: dict[str, dict[str, Any]] = {
    "sft": {"messages": [{"role": "user", "content": "word1 word2"}, {"role": "assistant", "content": "word3"}]},
    "dpo": {
        "chosen": [{"role": "user", "content": "word1"}, {"role": "assistant", "content": "word2"}],
        "rejected": [{"role": "user", "content": "word1"}, {"role": "assistant", "content": "word3"}],
    },
    "grpo": {"question": "word1 word2", "answer": "#### 72"},
}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {{ eos_token }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def write_model(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.unit.worker.trl_trainers import build_tokenizer

    tokenizer = build_tokenizer(1)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=2048, pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


@pytest.mark.parametrize("kind", ROWS)
def test_an_example_script_of_trl_trains_with_the_arguments_of_its_job(tmp_path: Path, kind: str) -> None:
    document = yaml.safe_load((EXAMPLES / f"trl-{kind}-qwen3-trn2.yaml").read_text(encoding="utf-8"))
    program = TrainingJobSpec.model_validate(document["spec"]).program
    assert program is not None
    write_model(tmp_path / "model")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("".join(f"{json.dumps(ROWS[kind])}\n" for _ in range(8)))
    arguments = {name: value for name, value in zip(program.args, [*program.args[1:], ""], strict=True) if "--" in name}
    local = {
        "--model_name_or_path": str(tmp_path / "model"), "--dataset_name": str(tmp_path / "data"),
        "--output_dir": str(tmp_path / "run"), "--max_steps": "2", "--save_steps": "1",
        "--gradient_accumulation_steps": "8", "--max_completion_length": "4",
    }  # fmt: skip
    for name, value in local.items():
        if name in arguments or name == "--max_steps":
            arguments[name] = value
    for name in ("--fsdp", "--fsdp_config", "--dataset_config"):  # one process, and a folder
        arguments.pop(name, None)
    words = [word for name, value in arguments.items() for word in (name, "" if value.startswith("--") else value)]
    command = [sys.executable, str(EXAMPLES / f"{kind}.py"), *filter(None, words), "--use_cpu", "--bf16", "False"]
    environment = {
        **os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "TRAINIUM_GLOBAL_BATCH": "8",
        "PYTHONPATH": str(EXAMPLES.parents[1] / "worker"),
    }  # fmt: skip
    run = subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment, timeout=scaled(120), cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr[-3000:]
    state = json.loads((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    assert (tmp_path / "run" / "checkpoint-2" / "elastic.json").exists()
