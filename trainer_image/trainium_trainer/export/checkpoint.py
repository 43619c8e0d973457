"""A durable checkpoint as a Hugging Face folder; what model it is, the checkpoint itself says."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

from trainium_contract.trainer_data import TokenizerConfig
from trainium_trainer.checkpoint.chosen import choose, damage_is_a_sentence, shape_of
from trainium_trainer.checkpoint.contents import Contents
from trainium_trainer.checkpoint.storage import Retry, open_storage
from trainium_trainer.data.tokenizer import end_of_document, load_tokenizer, tokenizer_file
from trainium_trainer.exits import UserError
from trainium_trainer.export.huggingface import write_folder
from trainium_trainer.models.state_dict import Part, state_name

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from trainium_trainer.models.shapes import ModelShape


def export(root: str, folder: Path, *, step: int | None, dtype: torch.dtype, tokenizer: Path | None = None) -> int:
    """Write the checkpoint of `step` (the newest for None) below `root` to `folder`; returns its step.

    Raises UserError when there is no such checkpoint, when it is damaged or not of a Llama of ours, or when the folder
    is not empty; StorageError when the store fails.
    """
    file = tokenizer_file(TokenizerConfig(path=str(tokenizer))) if tokenizer is not None else None
    storage = open_storage(root)
    checkpoint = choose(storage, root, step, milestones=True)
    shape = shape_of(checkpoint)
    with damage_is_a_sentence(root):
        contents = Contents(storage, checkpoint, Retry())
        if not any(name.startswith(f"{Part.WEIGHT}.") for name in contents.tensors):
            raise UserError(f"{checkpoint.folder} holds no weights: name the root of a training run")
        write_folder(folder, shape, lambda name: contents.read(state_name(Part.WEIGHT, name)), dtype=dtype)
    if file is not None:
        _write_tokenizer(file, folder, shape)
    return checkpoint.step


def _write_tokenizer(file: Path, folder: Path, shape: ModelShape) -> None:
    """The tokenizer beside the model, so that `AutoTokenizer` finds it."""
    tokenizer = load_tokenizer(file)
    shutil.copyfile(file, folder / "tokenizer.json")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.id_to_token(end_of_document(tokenizer, file)),
        "model_max_length": shape.max_positions,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
