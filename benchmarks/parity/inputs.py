"""Create the inputs of fine-tuning: base models that `transformers` trains for a while, and records.

The inputs depend only on the seeds and the running Python; nothing is downloaded.
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.parity import reference
from benchmarks.parity.rows import Settings, write_config
from trainium_trainer.configuration import config as configuration
from trainium_trainer.data.dataset import open_data

if TYPE_CHECKING:
    from trainium_contract.trainer.config import TrainingConfig

MODULES = Path(__file__).with_name("modules.txt").read_text().split()
"""Modules of the standard library whose docstrings are the examples."""
_BASE_STEPS = 100
_MAX_ANSWER_CHARACTERS = 160


def create_base(settings: Settings, out: Path) -> Path:
    """Create a Hugging Face folder with a tokenizer: the model of the settings, trained briefly by `transformers`."""
    folder = out / "bases" / settings.slug
    if (folder / "tokenizer.json").exists():
        return folder
    if settings.family:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings.family))  # type: ignore[no-untyped-call]
        model.save_pretrained(folder)
        return _add_tokenizer(folder, configuration.load(write_config(settings, out, _BASE_STEPS)))
    changes = {"data.seed": 1, "optimizer.learningRate": 3e-3, "model.initialStd": 0.1}
    base_settings = Settings(f"base of {settings.name}", "", settings.overrides | changes)
    config = configuration.load(write_config(base_settings, out, _BASE_STEPS))
    reference.train_reference(config).model.save_pretrained(folder)
    return _add_tokenizer(folder, config)


def _add_tokenizer(folder: Path, config: TrainingConfig) -> Path:
    """Write the tokenizer of the data into the folder, and return the folder."""
    tokenizer = open_data(config.data, config.batch.global_size).tokenizer
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    return folder


def write_instructions(file: Path) -> Path:
    """Create records with Dolly's fields from docstrings of the standard library."""
    rows = [
        {"instruction": f"What does {entry.name} do?", "context": entry.signature, "response": entry.sentence}
        for entry in _list_documented_objects()
    ]
    return _write(file, rows)


def write_questions(file: Path) -> Path:
    """Create records with QNLI's fields: whether a sentence describes a function (1) or a class (0)."""
    rows = [
        {
            "question": f"Is {entry.name.rpartition('.')[2]} a function?",
            "sentence": entry.sentence,
            "label": int(not entry.is_class),
        }
        for entry in _list_documented_objects()
    ]
    return _write(file, rows)


def write_conversations(file: Path) -> Path:
    """Create pairs of messages from the pairs of texts, every other one with an earlier question and answer."""
    rows = [json.loads(line) for line in write_preferences(file).read_text().splitlines()]
    turns = [
        {
            name: [{"role": "user" if name == "prompt" else "assistant", "content": text.strip()}]
            for name, text in row.items()
        }
        for row in rows
    ]
    for number in range(1, len(turns), 2):
        turns[number]["prompt"] = [*turns[number - 1]["prompt"], *turns[number - 1]["chosen"], *turns[number]["prompt"]]
    return _write(file, turns)


def write_preferences(file: Path) -> Path:
    """Create pairs with trl's columns: what a name does, and what another name of the library does."""
    entries = _list_documented_objects()
    rows = []
    for number, entry in enumerate(entries, start=1):
        other = entries[number * 7 % len(entries)]
        if entry.sentence != other.sentence:
            prompt = f"What does {entry.name} do?"
            rows.append({"prompt": prompt, "chosen": f" {entry.sentence}", "rejected": f" {other.sentence}"})
    return _write(file, rows)


def _write(file: Path, rows: list[dict[str, Any]]) -> Path:
    random.Random(0).shuffle(rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@dataclass(frozen=True, slots=True)
class _Documented:
    """A function or class of the standard library."""

    name: str
    signature: str
    sentence: str
    """First sentence of its docstring."""
    is_class: bool


def _list_documented_objects() -> list[_Documented]:
    """Return the functions and classes with docstrings, sorted by name."""
    entries = []
    for module_name in MODULES:
        for name, value in vars(importlib.import_module(module_name)).items():
            if name.startswith("_") or not (inspect.isfunction(value) or inspect.isclass(value)):
                continue
            sentence = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split()).partition(". ")[0]
            if 10 < len(sentence) <= _MAX_ANSWER_CHARACTERS:
                signature = _list_parameters(value) if len(name) % 2 else ""
                entries.append(_Documented(f"{module_name}.{name}", signature, sentence, inspect.isclass(value)))
    return sorted(entries, key=lambda entry: entry.name)


def _list_parameters(value: Any) -> str:
    """Return the names of the parameters; empty if they are unknown."""
    try:
        return ", ".join(inspect.signature(value).parameters)[:_MAX_ANSWER_CHARACTERS]
    except (TypeError, ValueError):
        return ""
