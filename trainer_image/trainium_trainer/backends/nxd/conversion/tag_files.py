"""Read and write NxD's checkpoints on disk.

A tag is a folder: `checkpoint` (a mark, written first), `model/dp_rank_00_tp_rank_TT_pp_rank_PP.pt`,
`optim/dp_rank_DD_tp_rank_TT_pp_rank_PP.pt` (all data-parallel ranks with ZeRO-1, else rank 0), `scheduler.pt`,
`user_content.pt`, `done` (written last). With `xser` a `.pt` file holds references, the tensors are in
`X.pt.tensors/tensor_N.pt`, and `X.pt.info.pt` has their types and sizes; weights may be left out where the optimizer
has master weights (`avoid_saving_lower_precision_weights`), and are then tensors on the device `meta` here.

Guarantees:
- Only tensors and plain values are ever unpickled (NxD unpickles anything).
- Only the used tensors of a large file are read.
- `done` is written last.
"""

from __future__ import annotations

import functools
import pickle
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FILE = re.compile(r"^dp_rank_(\d+)_tp_rank_(\d+)_pp_rank_(\d+)\.pt$")
_STARTED, _DONE = "checkpoint", "done"
_OPEN_FILES = 256
"""The maximum number of files mapped at a time."""


@dataclass(frozen=True, slots=True)
class TagDegrees:
    """The parallel degrees at which a tag was written."""

    tensor: int
    pipeline: int
    data: int
    """The number of ranks that share the optimizer's state by ZeRO-1; 1 without it."""


class TensorReference:
    """Stands for torch_xla's class of this name in files that were written with `xser`."""

    tid: int


class Tag:
    """A complete tag."""

    def __init__(self, folder: Path, *, weights_only: bool = False) -> None:
        """List the files. Raises UserError for a folder that is not a complete tag."""
        self.folder = folder
        self._cached = functools.lru_cache(_OPEN_FILES)(self._load)
        if not (folder / _STARTED).exists():
            raise UserError(f"{folder} is not a tag of an NxD checkpoint: name the folder that has `model` and `done`")
        if not (folder / _DONE).exists():
            raise UserError(f"{folder} has no `done`: the save of that tag never ended; take an older one")
        model, optimizer = _list_ranks(folder / "model"), set() if weights_only else _list_ranks(folder / "optim")
        self.sizes = TagDegrees(
            tensor=1 + max((tp for _, tp, _ in model), default=-1),
            pipeline=1 + max((pp for _, _, pp in model), default=-1),
            data=1 + max((dp for dp, _, _ in optimizer), default=0),
        )
        self.has_optimizer = bool(optimizer)
        self._expect("model", model, 1)
        if optimizer:
            self._expect("optim", optimizer, self.sizes.data)

    def read_model(self, tensor: int, pipeline: int) -> dict[str, torch.Tensor]:
        """Return a rank's weights by the names of its modules' parameters; values are read lazily."""
        content = self._cached(f"model/{format_rank_file_name(0, tensor, pipeline)}")
        if not isinstance(content, dict):
            raise UserError(f"{self.folder}/model: not a dictionary of weights")
        return {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}

    def read_optimizer(self, data: int, tensor: int, pipeline: int) -> dict[str, Any]:
        """Return a rank's optimizer state: `state` and `param_groups`, with ZeRO-1 `base_state` and more."""
        content = self._cached(f"optim/{format_rank_file_name(data, tensor, pipeline)}")
        if not isinstance(content, dict) or "param_groups" not in content:
            raise UserError(f"{self.folder}/optim: not the state of an optimizer")
        return content

    def read_user_content(self) -> dict[str, Any]:
        """Return the values stored by the training script if they are plain values, else none."""
        try:
            content = self._load("user_content.pt")
        except UserError:
            return {}
        return content if isinstance(content, dict) else {}

    def _expect(self, kind: str, coordinates: set[tuple[int, int, int]], data: int) -> None:
        sizes = self.sizes
        wanted = {(d, t, p) for d in range(data) for t in range(sizes.tensor) for p in range(sizes.pipeline)}
        if missing := sorted(wanted - coordinates):
            raise UserError(f"{self.folder}/{kind}/{format_rank_file_name(*missing[0])} is missing")
        if not wanted:
            raise UserError(f"{self.folder}/{kind} holds no files of ranks")

    def _load(self, name: str) -> Any:
        path = self.folder / name
        safe = [(TensorReference, "torch_xla.utils.serialization.TensorReference")]
        try:
            with torch.serialization.safe_globals(safe):  # type: ignore[arg-type]
                content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except FileNotFoundError as error:
            raise UserError(f"{path} is missing") from error
        except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
            reason = str(error).splitlines()[0][:200]
            raise UserError(f"{path} cannot be read, or holds more than tensors and plain values: {reason}") from error
        return self._resolve_references(content, path)

    def _resolve_references(self, content: Any, path: Path) -> Any:
        """Return the content with references resolved to tensors."""
        if isinstance(content, TensorReference):
            return self._read_reference(content.tid, path)
        if isinstance(content, dict):
            return {key: self._resolve_references(value, path) for key, value in content.items()}
        return content

    def _read_reference(self, number: int, path: Path) -> torch.Tensor:
        tensor: torch.Tensor
        file = path.with_name(f"{path.name}.tensors") / f"tensor_{number}.pt"
        if file.exists():
            tensor = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
            return tensor
        about = path.with_name(f"{path.name}.info.pt")
        if not about.exists() or path.parent.name != "model":
            raise UserError(f"{file} is missing")
        shard = torch.load(about, weights_only=True)[number]
        return torch.empty(shard["shape"], dtype=shard["dtype"], device="meta")


def format_rank_file_name(data: int, tensor: int, pipeline: int) -> str:
    """Return the name of a rank's file."""
    return f"dp_rank_{data:02d}_tp_rank_{tensor:02d}_pp_rank_{pipeline:02d}.pt"


def begin_tag(folder: Path) -> None:
    """Create a tag. Raises UserError if the folder is not empty."""
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: name a new folder, DIRECTORY/TAG")
    for kind in ("model", "optim"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    (folder / _STARTED).write_text("1")


def finish_tag(folder: Path) -> None:
    """Mark a tag as complete."""
    (folder / _DONE).write_text("1")


def _list_ranks(folder: Path) -> set[tuple[int, int, int]]:
    return set(_matches(folder)) if folder.is_dir() else set()


def _matches(folder: Path) -> Iterator[tuple[int, int, int]]:
    for path in folder.iterdir():
        if match := _FILE.match(path.name):
            yield int(match[1]), int(match[2]), int(match[3])
