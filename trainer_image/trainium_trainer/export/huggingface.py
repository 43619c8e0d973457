"""A trained model as a Hugging Face folder: `config.json`, safetensors of at most 5 GB each, and their index.

Invariants: one tensor at a time is asked for, so memory holds no more than one file; a folder with `config.json` is
complete, since that is written last; nothing that exists is overwritten.
"""

from __future__ import annotations

import json
import stat
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from trainium_trainer.exits import UserError
from trainium_trainer.models.huggingface import CONFIG_NAME, to_config
from trainium_trainer.models.llama import Llama

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from trainium_trainer.models.shapes import ModelShape

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def parameter_sizes(shape: ModelShape) -> dict[str, torch.Size]:
    """Names and sizes of a model's parameters; a shared output projection is not among them, as in `transformers`."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in Llama(shape).named_parameters()}


def write_folder(
    folder: Path,
    shape: ModelShape,
    read: Callable[[str], Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    largest: int = 5_000_000_000,
) -> None:
    """Write the model whose parameter `name` is `read(name)`, whole and in any type, with files of `largest` bytes.

    Raises UserError when the folder holds anything already, or a parameter does not have the size that the shape says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: name a folder that does not exist yet")
    files = _split(parameter_sizes(shape), dtype.itemsize, largest)
    places: dict[str, str] = {}
    total = 0
    for number, sizes in enumerate(files, start=1):
        file = _WHOLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {}
        for name, size in sizes.items():
            tensor = read(name)
            if tensor.shape != size:
                raise UserError(
                    f"{name} has the size {list(tensor.shape)}, but the model's is {list(size)}: the checkpoint is of "
                    "another model, give its configuration"
                )
            tensors[name] = tensor.detach().to(dtype).contiguous()
            total += size.numel() * dtype.itemsize
        _save(tensors, folder / file)
        places |= dict.fromkeys(sizes, file)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    config = to_config(shape) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a file that has the rights which the process's umask gives; the library's own are for the owner alone."""
    file.touch()
    rights = stat.S_IMODE(file.stat().st_mode)
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(rights)


def _split(sizes: dict[str, torch.Size], itemsize: int, largest: int) -> list[dict[str, torch.Size]]:
    """The parameters in order, in as few runs of at most `largest` bytes as that allows."""
    files: list[dict[str, torch.Size]] = [{}]
    used = 0
    for name, size in sizes.items():
        length = size.numel() * itemsize
        if files[-1] and used + length > largest:
            files.append({})
            used = 0
        files[-1][name] = size
        used += length
    return files
