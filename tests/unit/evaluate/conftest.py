"""Write tiny Hugging Face folders: a byte-level tokenizer, a Llama with random weights, adapters and tasks."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.testing.trainer.base_models import save_base

END = "<|endoftext|>"
_WORDS = "gradient loss step batch token shard rank node mesh state tensor warm yes no maybe"
_TASK_WORDS = _WORDS.split()[:12]
_CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {data}}}}}
output_type: multiple_choice
validation_split: validation
fewshot_split: validation
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0}}
"""
_COPY = """
task: tiny_copy
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {data}}}}}
output_type: generate_until
validation_split: validation
fewshot_split: validation
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
generation_kwargs: {{until: ["\\n"], max_gen_toks: 6, do_sample: false}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0}}
"""
_GROUP = """
group: tiny
task: [tiny_choice]
aggregate_metric_list: [{metric: acc, weight_by_size: true}]
metadata: {version: 1.0}
"""


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    from trainium_trainer.data.tokens.encoding import train_tokenizer

    return train_tokenizer([iter([_WORDS] * 20)], 320)


@pytest.fixture(scope="session")
def write_model(tokenizer: Tokenizer) -> Callable[..., Path]:
    """Return a function that writes a folder: `write_model(path, seed=1, max_position_embeddings=32)`."""

    def write(path: Path, *, seed: int = 0, **fields: Any) -> Path:
        shape = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 64, "tie_word_embeddings": False}
        tokens = {"eos_token_id": tokenizer.token_to_id(END), "bos_token_id": None}
        save_base(path, seed=seed, **shape | tokens | fields)
        tokenizer.save(str(path / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
        return path

    return write


@pytest.fixture(scope="session")
def model_folder(write_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    # `test_draws_follow_the_probabilities` needs a seed whose likeliest token has the text of no other token.
    return write_model(tmp_path_factory.mktemp("models") / "random", seed=2)


@pytest.fixture(scope="session")
def tasks_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two tasks and a group as files, with their data."""
    folder = tmp_path_factory.mktemp("tasks")
    rng = random.Random(3)
    choices = [
        {"question": rng.choice(_TASK_WORDS), "choices": rng.sample(_TASK_WORDS, 4), "answer": rng.randrange(4)}
        for _ in range(30)
    ]
    copies = [{"question": f"Repeat {word}:", "answer": word} for word in rng.choices(_TASK_WORDS, k=8)]
    for name, text, records in (("choice", _CHOICE, choices), ("copy", _COPY, copies)):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(record) + "\n" for record in records))
        (folder / f"{name}.yaml").write_text(text.format(data=data))
    (folder / "group.yaml").write_text(_GROUP)
    return folder
