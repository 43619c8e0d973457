"""Read a base model's weights box by box: each rank copies only the values that it holds.

Rows of the embedding and of the output projection beyond those of the file (a vocabulary grown by added tokens, or
padded to the tensor-parallel degree) get the mean of the file's rows, so that a new token begins as an average one.

Guarantees:
- Memory beyond the target is at most one chunk.
- Values do not depend on the division of the model.
- `open` refuses incomplete files.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from trainium_contract.models.parameters import EMBEDDING, HEAD, parameter_sizes
from trainium_trainer.exits import UserError
from trainium_trainer.tuning.trainable import find_parent_module
from trainium_trainer.weights.folder import SETTING, ModelFolder, explain_fused, list_some
from trainium_trainer.weights.tensors import TORCH_TYPES, compute_mean_row, fill_box

if TYPE_CHECKING:
    from torch import Tensor

    from trainium_trainer.weights.tensors import FileTensor

_log = logging.getLogger("trainium.train")
_PROBE_BYTES = 4096
_PROBES_AT_ONCE = 8
_ROWS_AT_ONCE = 1024
_BUFFERS = (".rotary_emb.inv_freq",)
"""The ends of names of buffers in old files, which follow from the configuration."""


class BaseWeights:
    """The weights in one Hugging Face folder."""

    def __init__(self, location: str, folder: ModelFolder) -> None:
        """Store the contents of a checked folder; use `open`."""
        self.location = location
        """The location as the user wrote it."""
        self.shape = folder.shape
        """The shape of the model in the folder, with the vocabulary of the file."""
        self.source = folder.source
        """The files of the folder."""
        self._tensors = folder.tensors
        self._means: dict[str, Tensor] = {}

    @classmethod
    def open(cls, location: str, *, field: str = SETTING) -> BaseWeights:
        """Open the folder, or s3://bucket/prefix, of the setting `field`; reads only headers.

        Raises UserError if it is not the complete model of its configuration and StorageError if the store fails.
        """
        folder = ModelFolder.open(location, field=field)
        _refuse_misfits(folder)
        return cls(location, folder)

    @functools.cached_property
    def digest(self) -> str:
        """Return the hex SHA-256 of the shape, and of each tensor's name, type, size and 4 KiB in its middle.

        It reads 4 KiB per tensor, so it costs a second at any size, and does not depend on the division into files. A
        change outside the middle of a tensor goes undetected.
        """
        names = sorted(name for name in parameter_sizes(self.shape))
        with ThreadPoolExecutor(_PROBES_AT_ONCE, thread_name_prefix="weights-digest") as pool:
            probes = list(pool.map(self._probe, (self._tensors[name] for name in names)))
        sha = hashlib.sha256(json.dumps(self.shape.to_json(), sort_keys=True).encode())
        for name, probe in zip(names, probes, strict=True):
            stored = self._tensors[name]
            sha.update(f"\n{name} {stored.dtype} {stored.shape} ".encode() + probe)
        return sha.hexdigest()

    @property
    def versions(self) -> list[tuple[str, int, float]]:
        """Return name, size and time of the last change of the files with the weights."""
        return self.source.list_versions({stored.file for stored in self._tensors.values()})

    def find_size(self, name: str) -> torch.Size:
        """Return the size of a parameter in the file. Raises KeyError for an unknown name."""
        return torch.Size(self._find_stored(name).shape)

    def find_dtype(self, name: str) -> torch.dtype:
        """Return the number format of a parameter in the file. Raises KeyError for an unknown name."""
        return TORCH_TYPES[self._find_stored(name).dtype]

    def fill(self, name: str, offsets: tuple[int, ...], target: Tensor) -> None:
        """Copy the box of a parameter that begins at `offsets` and has the target's size into `target`.

        The target may be on any device and of any floating-point type. Raises KeyError for an unknown name, ValueError
        for a box outside the parameter, UserError if the file was truncated in the meantime, StorageError if the store
        fails.
        """
        row_beyond = functools.partial(self._compute_mean, name) if name in (EMBEDDING, HEAD) else None
        fill_box(self.source, name, self._find_stored(name), offsets, target, row_beyond)

    def compute_row_norms(self, name: str, first: int, count: int) -> Tensor:
        """Return the Euclidean norms of rows of a matrix, [count] float32. Raises as `fill`."""
        lengths, width = torch.empty(count), self.find_size(name)[1]
        for start in range(0, count, _ROWS_AT_ONCE):
            rows = torch.empty(min(_ROWS_AT_ONCE, count - start), width)
            self.fill(name, (first + start, 0), rows)
            lengths[start : start + len(rows)] = torch.linalg.vector_norm(rows, dim=1)
        return lengths

    def _find_stored(self, name: str) -> FileTensor:
        # Files of a model with tied embeddings hold one of the two weights, or both.
        return self._tensors[EMBEDDING if name == HEAD and self.shape.tie_embeddings else name]

    def _compute_mean(self, name: str) -> Tensor:
        if name not in self._means:
            self._means[name] = compute_mean_row(self.source, self._find_stored(name))
        return self._means[name]

    def _probe(self, stored: FileTensor) -> bytes:
        length = min(_PROBE_BYTES, stored.length)
        with self.source.read_range(stored.file, stored.start + (stored.length - length) // 2, length) as view:
            return bytes(view)


def _refuse_misfits(folder: ModelFolder) -> None:
    """Raise UserError unless the files hold the parameters of the shape, in their sizes, and no others of its layers.

    Other tensors, such as those of layers that `config.json` no longer counts, are left out with a warning.
    """
    label, tensors = folder.source.label, folder.tensors
    sizes = parameter_sizes(folder.shape)
    if missing := [name for name in sizes if name not in tensors]:
        advice = "copy or fetch the folder again"
        if fused := explain_fused(tensors):
            advice = f"{fused}: save the model with separate projections"
        elif missing == [HEAD]:
            advice = "save the model with it, as AutoModelForCausalLM does, or set tie_word_embeddings in config.json"
        raise UserError(f"{label}: the files lack {list_some(missing)}: {advice}")
    names = sizes.keys() | {HEAD}
    strange = [name for name in tensors if name not in names and not name.endswith(_BUFFERS)]
    modules, layers = {find_parent_module(name) for name in sizes}, range(folder.shape.num_layers)
    owners = tuple(f"model.layers.{number}." for number in layers)
    if wrong := [name for name in strange if name.startswith(owners) or find_parent_module(name) in modules]:
        raise UserError(
            f"{label}: the files hold {list_some(wrong)}, for which a model as config.json describes it has no place: "
            "use the folder as transformers saved it"
        )
    if strange:
        _log.warning("%s: no part of the model that config.json describes, so left out: %s", label, list_some(strange))
    for name in [*sizes, *({HEAD} & tensors.keys() - sizes.keys())]:
        expected = sizes.get(name, sizes[EMBEDDING])
        stored = tensors[name]
        if stored.dtype not in TORCH_TYPES:
            raise UserError(
                f"{label}: {name} is stored as {stored.dtype}, but weights must be {', '.join(TORCH_TYPES)}: use the "
                "model as it was before it was quantised"
            )
        if stored.shape != expected:
            raise UserError(
                f"{label}: {name} has the size {list(stored.shape)}, but config.json describes {list(expected)}: the "
                "two do not belong together, copy or fetch the folder again"
            )
