"""Records, tokenizers like those of models, and data configurations for them."""

import functools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from trainium_contract.trainer.data import DataConfig
from trainium_trainer.data.examples.dataset import ExampleDataset, open_examples
from trainium_trainer.data.tokens.tokenizer import load_tokenizer

WORDS = ("gradient", "loss", "step", "batch", "token", "shard", "rank", "node", "mesh", "state", "tensor", "warm")
BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
TURN, HEAD, TAIL = "<|eot|>", "<|head|>", "<|tail|>"
CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|head|>' + message['role'] + '<|tail|>\n\n' + message['content'] | trim + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|tail|>\n\n' }}{% endif %}"
)
"""A template like that of Llama 3."""
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CLOSED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and '<think>' not in m.content %}{{ '<think></think>' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
"""A template with a reasoning in each answer, as that of Nemotron."""
END_OF_TEXT = "<|endoftext|>"


def make_records(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return instructions in two categories, every third one with a context."""
    rng = random.Random(seed)
    return [
        {
            "instruction": f"say {WORDS[number % 12]} number {number}",
            "context": " ".join(rng.choices(WORDS, k=9)) if number % 3 == 0 else "",
            "response": " ".join(rng.choices(WORDS, k=rng.randint(1, 12))),
            "category": ("open_qa", "information_extraction")[number % 2],
        }
        for number in range(count)
    ]


def write_records(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_tokenizer(
    folder: Path,
    *,
    specials: Sequence[str] = (BOS, EOS, PAD, TURN, HEAD, TAIL, "<|im_start|>", "<|im_end|>"),
    bos: bool = True,
    chat: str | None = CHAT,
    **settings: Any,
) -> Path:
    """Write a byte-level BPE with special tokens, as in a model's folder; `bos`: whether it adds BOS to texts."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(_train_tokenizer(tuple(specials), bos=bos))
    names = (
        {"bos_token": BOS, "eos_token": {"__type": "AddedToken", "content": EOS, "special": True}, "pad_token": PAD}
        if EOS in specials
        else {}
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names, **({"chat_template": chat} if chat else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | settings))
    return folder / "tokenizer.json"


@functools.cache
def _train_tokenizer(specials: tuple[str, ...], *, bos: bool) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([json.dumps(row) for row in make_records(200)], trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
    return str(tokenizer.to_str())


def make_config(tmp_path: Path, source: Path | str, **settings: Any) -> DataConfig:
    """Return a configuration of format Instruction in sequences of 64, with the tokenizer in `tmp_path`, if any."""
    fields: dict[str, Any] = {
        "format": "Instruction",
        "sequence_length": 64,
        "cache_directory": str(tmp_path / "cache"),
        "workers": 1,
    }
    folder = tmp_path / "tokenizer"
    fields["tokenizer"] = {"path": str(folder)} if folder.exists() else {"vocab_size": 300}
    return DataConfig.model_validate({**fields, "source": str(source), **settings})


def open_encoded(settings: DataConfig, *, epochs: float = 0.0) -> ExampleDataset:
    assert settings.cache_directory is not None
    cache = Path(settings.cache_directory)
    cache.mkdir(exist_ok=True)
    return open_examples(settings, cache, 8 if epochs else None)


def encode(tmp_path: Path, rows: Sequence[Mapping[str, Any]], **settings: Any) -> ExampleDataset:
    """Write records, and a tokenizer unless `tmp_path` has one, and encode them as a run does."""
    if not (tmp_path / "tokenizer").exists():
        write_tokenizer(tmp_path / "tokenizer")
    return open_encoded(make_config(tmp_path, write_records(tmp_path / "d.jsonl", rows), **settings))


def decode(data: ExampleDataset, source: int = 0) -> list[tuple[str, str]]:
    """Decode each stored example: its whole text, and the part that is learned."""
    tokenizer = load_tokenizer(data.tokenizer)
    stored = data.sources[source].stored
    examples = (stored.read_example(number) for number in range(len(stored)))
    return [
        (
            str(tokenizer.decode(ids.tolist(), skip_special_tokens=False)),
            str(tokenizer.decode(ids[loss_mask].tolist(), skip_special_tokens=False)),
        )
        for ids, loss_mask in examples
    ]


def first_example(data: ExampleDataset) -> tuple[list[int], list[bool]]:
    """Return the token ids and the loss mask of the first stored example."""
    ids, loss_mask = data.sources[0].stored.read_example(0)
    return ids.tolist(), loss_mask.tolist()
