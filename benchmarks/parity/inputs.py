"""Create the inputs of fine-tuning: base models that `transformers` trains for a while, and records.

The inputs depend only on the seeds and the running Python; nothing is downloaded.
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
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
_STEPS = 100
_LONGEST = 160  # characters of an answer


def create_base(settings: Settings, out: Path) -> Path:
    """Create a Hugging Face folder with a tokenizer: the model of the settings, trained briefly by `transformers`."""
    folder = out / "bases" / settings.slug
    if (folder / "tokenizer.json").exists():
        return folder
    if settings.family:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings.family))  # type: ignore[no-untyped-call]
        model.save_pretrained(folder)
        return _with_tokenizer(folder, configuration.load(write_config(settings, out, _STEPS)))
    changes = {"data.seed": 1, "optimizer.learningRate": 3e-3, "model.initialStd": 0.1}
    began = Settings(f"base of {settings.name}", "", settings.overrides | changes)
    config = configuration.load(write_config(began, out, _STEPS))
    trained = reference.train_reference(config)
    trained.model.save_pretrained(folder)
    return _with_tokenizer(folder, config)


def _with_tokenizer(folder: Path, config: TrainingConfig) -> Path:
    tokenizer = open_data(config.data, config.batch.global_size).tokenizer
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    return folder


def write_instructions(file: Path) -> Path:
    """Create records with Dolly's fields from docstrings of the standard library."""
    rows = [
        {"instruction": f"What does {name} do?", "context": signature, "response": text}
        for name, signature, text, _ in _documented()
    ]
    return _write(file, rows)


def write_questions(file: Path) -> Path:
    """Create records with QNLI's fields: whether a sentence describes a function (1) or a class (0)."""
    rows = [
        {"question": f"Is {name.rpartition('.')[2]} a function?", "sentence": text, "label": int(not is_class)}
        for name, _, text, is_class in _documented()
    ]
    return _write(file, rows)


def write_preferences(file: Path) -> Path:
    """Create pairs with trl's columns: what a name does, and what another name of the library does."""
    found = _documented()
    rows = [
        {"prompt": f"What does {name} do?", "chosen": f" {text}", "rejected": f" {found[number * 7 % len(found)][2]}"}
        for number, (name, _, text, _) in enumerate(found, start=1)
    ]
    return _write(file, [row for row in rows if row["chosen"] != row["rejected"]])


def _write(file: Path, rows: list[dict[str, Any]]) -> Path:
    random.Random(0).shuffle(rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _documented() -> list[tuple[str, str, str, bool]]:
    """Return name, signature, first sentence and whether it is a class, sorted by name."""
    found: dict[str, tuple[str, str, str, bool]] = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for leaf, value in vars(module).items():
            if leaf.startswith("_") or not (inspect.isfunction(value) or inspect.isclass(value)):
                continue
            text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split()).partition(". ")[0]
            if not 10 < len(text) <= _LONGEST:
                continue
            signature = _signature(value) if len(leaf) % 2 else ""
            found[f"{module_name}.{leaf}"] = (f"{module_name}.{leaf}", signature, text, inspect.isclass(value))
    return [found[name] for name in sorted(found)]


def _signature(value: Any) -> str:
    """Return the names of its parameters; empty if they are unknown."""
    try:
        return ", ".join(inspect.signature(value).parameters)[:_LONGEST]
    except (TypeError, ValueError):
        return ""
