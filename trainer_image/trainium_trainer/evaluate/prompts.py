"""Read a user's prompts, and answer them with a model.

Guarantees:
- With a configuration, token ids equal those of the same record in training.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from trainium_contract.trainer.examples import DataFormat
from trainium_trainer.data.dataset import encode_text_prompts
from trainium_trainer.data.examples.held_out import HeldOutExample, build_prompts
from trainium_trainer.evaluate.answering.folder import ComputeType, ModelLocations, open_models
from trainium_trainer.evaluate.answering.generation import GeneratedAnswer, check_prompts, generate
from trainium_trainer.evaluate.answering.loading import load
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from trainium_contract.accelerators import Device
    from trainium_contract.trainer.data import DataConfig
    from trainium_contract.trainer.evaluate import GenerationConfig

PromptInput = str | dict[str, Any]
"""A text, or a record from which a template builds a text."""
_PROMPT = "prompt"


def read_prompts(file: Path) -> list[PromptInput]:
    """Read the prompts of a file: lines of .jsonl are texts or records, other lines are plain prompts.

    Raises UserError, also if there are none.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"--prompts {file}: cannot be read ({error.strerror}): give an existing file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts {file}: is not UTF-8 text: write one prompt on each line") from error
    plain = (line for line in text.splitlines() if line.strip())
    prompts: list[PromptInput] = list(_read_records(file, text) if file.suffix == ".jsonl" else plain)
    if not prompts:
        raise UserError(f"--prompts {file}: holds no prompt: write one on each line")
    return prompts


def read_plain_text(prompt: PromptInput) -> str:
    """Return the prompt of a record without a configured format. Raises UserError."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt.get(_PROMPT), str):
        return str(prompt[_PROMPT])
    fields = ", ".join(map(repr, prompt)) or "none"
    raise UserError(
        f"a record of --prompts has no text {_PROMPT!r} (its fields: {fields}): give --config, so that the template of "
        "the training makes the prompt"
    )


def _read_records(file: Path, text: str) -> Iterator[PromptInput]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"--prompts {file} line {number}: not valid JSON ({error}): correct the line") from error
        if not isinstance(record, (str, dict)):
            raise UserError(
                f"--prompts {file} line {number}: is neither a text nor an object: write a text in quotes or an "
                "object with the fields of a record"
            )
        yield record


def encode_prompts(prompts: Sequence[PromptInput], data: DataConfig | None) -> list[HeldOutExample]:
    """Build prompts by the training's template, with their token ids in training.

    Without `data` a prompt is a text without tokens, which the model's tokenizer encodes. Raises UserError.
    """
    if data is not None and data.format is not DataFormat.TEXT:
        encoded = build_prompts(data, prompts)
    else:
        texts = [read_plain_text(prompt) for prompt in prompts]
        ids = [()] * len(texts) if data is None else encode_text_prompts(data, texts)
        encoded = list(zip(texts, ids, strict=True))
    return [HeldOutExample(prompt=text, prompt_ids=prompt_ids) for text, prompt_ids in encoded]


def answer_prompts(
    models: ModelLocations,
    prompts: Sequence[HeldOutExample],
    generation: GenerationConfig,
    *,
    device: Device | None,
    precision: ComputeType,
) -> list[GeneratedAnswer]:
    """Return answers in the order of the prompts. Raises UserError and StorageError."""
    with open_models(models) as model_files:
        encoded = [list(prompt.prompt_ids) or model_files.encode(prompt.prompt) for prompt in prompts]
        check_prompts(model_files, encoded)  # checked before the model is loaded, which takes minutes
        model = load(model_files, device=device, precision=precision)
        return generate(model, encoded, generation)
