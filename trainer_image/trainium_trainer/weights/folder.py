"""A Hugging Face folder with a model: its `config.json`, its safetensors files, and the file of each tensor.

Guarantees:
- No pickle is ever opened.
- An incomplete folder is refused when it is opened, in one sentence that begins with the setting that names it.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainium_contract.models.parameters import EMBEDDING, HEAD, parameter_sizes
from trainium_trainer.exits import UnreadableError, UserError
from trainium_trainer.models.huggingface import CONFIG_NAME, parse_shape
from trainium_trainer.storage.errors import DamagedFileError
from trainium_trainer.weights.source import open_source
from trainium_trainer.weights.tensors import (
    LENGTH_BYTES,
    TORCH_TYPES,
    are_equal,
    fill_box,
    parse_header,
    parse_header_length,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainium_contract.models.shape import ModelShape
    from trainium_trainer.weights.source import WeightsSource
    from trainium_trainer.weights.tensors import FileTensor

WHOLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
SETTING = "model.weights"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_MAX_NAMES = 3
_BASE_PREFIX = "model."
"""The prefix of all parameters but the output projection; as transformers, names with one less or more are read."""
_FUSED = re.compile(r"\b(?P<parts>gate_up_proj|qkv_proj|query_key_value|W_pack|c_attn)\b")
_WRAPPERS = re.compile(r"^module\.|\b_(?:orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\.")
"""Parts of names that torch adds to those of a compiled, divided or recomputed module."""


def open_shape(location: str) -> ModelShape:
    """Read the shape of the model in a folder or below s3://bucket/prefix, of `model.weights`.

    Raises UserError if there is no model that can be trained and StorageError if the store fails.
    """
    source = open_source(location, SETTING)
    shape = _read_shape(read_config(source, source.list_sizes()), source)
    return ModelFolder.open(location).shape if shape.tie_embeddings else shape


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A checked and complete folder of a model."""

    source: WeightsSource
    shape: ModelShape
    """The shape of `config.json`, without tied embeddings if the files hold an output projection that differs."""
    tensors: dict[str, FileTensor]
    """The tensors by the names of the model's parameters."""

    @staticmethod
    def open(location: str, *, field: str = SETTING) -> ModelFolder:
        """Read the configuration and the headers, and whether the output projection is the embedding, as transformers.

        Raises UserError or StorageError.
        """
        source = open_source(location, field)
        sizes = source.list_sizes()
        shape = _read_shape(read_config(source, sizes), source)
        places = parameter_sizes(shape).keys() | {HEAD}
        tensors = {}
        for name, stored in _list_tensors(source, sizes).items():
            bare = strip_wrappers(name)
            forms = (bare, f"{_BASE_PREFIX}{bare}", bare.removeprefix(_BASE_PREFIX))
            tensors[next((form for form in forms if form in places), bare)] = stored
        if shape.tie_embeddings and HEAD in tensors:
            # The file holds one tensor under either name, or both.
            embedding = tensors.setdefault(EMBEDDING, tensors[HEAD])
            if not _are_equal(source, embedding, tensors[HEAD]):
                shape = replace(shape, tie_embeddings=False)
        return ModelFolder(source, shape, tensors)


def strip_wrappers(name: str) -> str:
    """Return the name of a tensor without what torch adds to the names of wrapped modules."""
    return _WRAPPERS.sub("", name)


def explain_fused(names: Iterable[str]) -> str:
    """Return how to divide projections that are stored as one, empty if none of the modules or tensors is one."""
    fused = next((match for name in names if (match := _FUSED.search(name))), None)
    if fused is None:
        return ""
    parts = "gate_proj and up_proj" if fused["parts"].startswith("gate") else "q_proj, k_proj and v_proj"
    return f"{fused['parts']} is {parts} in one, which this model has apart"


def _are_equal(source: WeightsSource, embedding: FileTensor, head: FileTensor) -> bool:
    if embedding.shape != head.shape or not head.shape or {embedding.dtype, head.dtype} - TORCH_TYPES.keys():
        return embedding == head
    fills = [functools.partial(fill_box, source, HEAD, stored) for stored in (embedding, head)]
    return embedding == head or are_equal(head.shape, *fills)


def read_config(source: WeightsSource, sizes: dict[str, int]) -> dict[str, Any]:
    """Read `config.json`. Raises UserError if it is missing, not JSON, or of a quantised model."""
    if CONFIG_NAME not in sizes:
        raise UnreadableError(
            f"{source.label}: has no {CONFIG_NAME}: name a folder that holds one beside the safetensors"
        )
    document = read_document(source, CONFIG_NAME)
    if document.get("quantization_config"):
        kind = document["quantization_config"].get("quant_method", "some method")
        raise UserError(
            f"{source.label}: is quantised ({kind}), and what is rounded to a few bits can neither be trained nor "
            "merged into: use the model as it was before"
        )
    return document


def read_tensors(
    source: WeightsSource, name: str, size: int, metadata: dict[str, str] | None = None
) -> dict[str, FileTensor]:
    """Read the tensors of a safetensors file of `size` bytes, and its metadata into `metadata`.

    Raises UserError for a damaged file.
    """
    try:
        if size < LENGTH_BYTES:
            raise ValueError("ends within its first bytes")  # noqa: TRY301 - as those of the header
        with source.read_range(name, 0, LENGTH_BYTES) as head:
            length = parse_header_length(bytes(head), size)
        with source.read_range(name, LENGTH_BYTES, length) as text:
            return parse_header(bytes(text), name, size, metadata)
    except (ValueError, DamagedFileError) as error:
        reason = error if isinstance(error, ValueError) else "ends too early"
        raise UserError(f"{source.label}: {name} {reason}: copy or fetch the file again") from error


def _read_shape(document: dict[str, Any], source: WeightsSource) -> ModelShape:
    return parse_shape(document, f"{source.label}: {CONFIG_NAME}")


def _list_tensors(source: WeightsSource, sizes: dict[str, int]) -> dict[str, FileTensor]:
    if WHOLE_NAME in sizes:
        return read_tensors(source, WHOLE_NAME, sizes[WHOLE_NAME])
    if INDEX_NAME not in sizes:
        raise UserError(f"{source.label}: {_explain_missing_index(sizes)}")
    file_of_tensor = read_weight_map(read_document(source, INDEX_NAME), source.label)
    files = sorted(set(file_of_tensor.values()))
    for folder in sorted({file.rpartition("/")[0] for file in files} - {""}):
        sizes = sizes | {f"{folder}/{name}": size for name, size in source.list_sizes(folder).items()}
    if missing := [file for file in files if file not in sizes]:
        raise UserError(
            f"{source.label}: {INDEX_NAME} names {list_some(missing)}, which {_is(missing)} not there: copy or fetch "
            f"{_them(missing)}"
        )
    # As transformers, this reads what the files hold: the map may be older than a file that was written again.
    return {name: stored for file in files for name, stored in read_tensors(source, file, sizes[file]).items()}


def read_weight_map(index: dict[str, Any], label: str) -> dict[str, str]:
    """Return the file of each tensor from the index. Raises UserError if the index has no such map."""
    file_of_tensor = index.get("weight_map")
    if not isinstance(file_of_tensor, dict) or not all(isinstance(file, str) for file in file_of_tensor.values()):
        raise UserError(f"{label}: {INDEX_NAME} has no weight_map: copy or fetch the file again")
    if outside := [file for file in file_of_tensor.values() if file.startswith("/") or ".." in file.split("/")]:
        raise UserError(f"{label}: {INDEX_NAME} names {outside[0]}, which is outside of the folder: use another model")
    return file_of_tensor


def _explain_missing_index(sizes: dict[str, int]) -> str:
    """Return the problem of a folder that has neither a single file nor an index."""
    parts = [name for name in sizes if name.endswith(".safetensors")]
    pickles = [name for name in sizes if name.endswith(_PICKLES)]
    if parts:
        return (
            f"holds {list_some(parts)} but neither {WHOLE_NAME} nor {INDEX_NAME}: copy or fetch the index that belongs "
            f"to {_them(parts)}"
        )
    if pickles:
        return (
            f"holds its weights as pickles only ({list_some(pickles)}), which can run code when they are read: where "
            "you trust them, convert them once: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW, "
            "safe_serialization=True) of transformers, then name NEW"
        )
    return f"holds no weights: there is neither {WHOLE_NAME} nor {INDEX_NAME}: copy or fetch them"


def read_document(source: WeightsSource, name: str) -> dict[str, Any]:
    """Read the fields of a JSON file. Raises UserError if it holds none."""
    try:
        document = json.loads(source.read(name))
    except ValueError as error:
        raise UserError(f"{source.label}: {name} is not valid JSON: copy or fetch the file again") from error
    if not isinstance(document, dict):
        raise UserError(f"{source.label}: {name} holds no fields: copy or fetch the file again")
    return document


def list_some(names: list[str]) -> str:
    """List a few of the names for a message."""
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _them(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"
