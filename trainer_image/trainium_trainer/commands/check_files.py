"""What a configuration names that is not on this machine, or is there and stays unread: for `trainium-trainer check`.

Invariant: names are looked up, nothing is opened, imported or asked of a store.
"""

from __future__ import annotations

import glob
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_contract.trainer.parallelism import BackendChoice
from trainium_trainer.backends.choose import choose
from trainium_trainer.data.sources.files import S3
from trainium_trainer.data.sources.resolve import PYTHON_DOCS, is_data_set
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from trainium_contract.trainer.config import TrainingConfig
    from trainium_contract.trainer.model import ModelConfig

_WEIGHTS = ("*.safetensors", "*.bin")


def missing(config: TrainingConfig) -> list[str]:
    """What a run on this machine would end with, a sentence each: data and packages that are not here."""
    data = config.data
    names = [data.source] if data.sources is None else [source.source for source in data.sources]
    found = [
        f"data.source {name}: there is no such file or folder on this machine: correct the path or mount the data"
        for name in names
        if not _is_here(name)
    ]
    if config.backend is BackendChoice.NXD:
        try:
            choose(config.backend, config.device)
        except UserError as error:
            found.append(str(error))
    return found


def unread(model: ModelConfig) -> list[str]:
    """Weights that lie beside a shape and are not begun with."""
    if model.path is None:
        return []
    folder = Path(model.path).expanduser()
    if not any(file for pattern in _WEIGHTS for file in folder.glob(pattern)):
        return []
    sentence = (
        f"model.path {model.path} gives the shape only and its weights are not read: the run begins with random ones; "
        "to begin with those, name the folder in model.weights instead"
    )
    return [sentence]


def _is_here(name: str) -> bool:
    """Whether a source is on this machine, or is one that does not have to be."""
    if name == PYTHON_DOCS or name.startswith(S3) or is_data_set(name):
        return True
    path = Path(name).expanduser()
    return path.exists() or (glob.has_magic(name) and bool(glob.glob(str(path), recursive=True)))  # noqa: PTH207
