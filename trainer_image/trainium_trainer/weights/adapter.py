"""Read the tensors of an adapter in peft's format, `adapter_model.safetensors`, and compare them with a run.

Names are those of the model's parameters, without peft's prefix, so that `model.layers.0.self_attn.q_proj` has
`...lora_A.weight` [rank, width] and `...lora_B.weight` [outputs, rank], and peft's modules to save have their names in
the model.

The file may also hold the embedding and the output projection, with rows of added tokens: as modules to save, as the
layer below an adapter, or because peft found the vocabulary changed.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from trainium_contract.models.parameters import EMBEDDING, HEAD, parameter_sizes
from trainium_contract.trainer.tuning import LoraConfig
from trainium_trainer.exits import UserError
from trainium_trainer.tuning.trainable import (
    LORA_A,
    LORA_B,
    MAGNITUDE,
    find_adapted_module,
    find_lora_targets,
    find_parent_module,
    is_adapter,
    list_projection_sizes,
    select_trainable,
)
from trainium_trainer.validation_errors import validate
from trainium_trainer.weights.adapter_config import CONFIG_NAME, MERGE_WITH_PEFT, AdapterConfig, refuse_other_kinds
from trainium_trainer.weights.folder import explain_fused, list_some, read_document, read_tensors, strip_wrappers
from trainium_trainer.weights.source import open_source
from trainium_trainer.weights.tensors import TORCH_TYPES, are_equal, compute_mean_row, fill_box

if TYPE_CHECKING:
    from torch import Tensor

    from trainium_contract.models.shape import ModelShape
    from trainium_contract.trainer.tuning import TuningConfig
    from trainium_trainer.weights.base import BaseWeights
    from trainium_trainer.weights.source import WeightsSource
    from trainium_trainer.weights.tensors import FileTensor

TENSORS_NAME = "adapter_model.safetensors"
PICKLE_NAME = "adapter_model.bin"
PREFIX = "base_model.model."
BASE_DIGEST = "base_digest"
"""The key in the metadata of the tensor file, which other programs ignore."""
SETTING = "tuning.lora.adapter"
_SEPARATE = "merge it into its base with peft, and save the merged model with separate projections"
_HEAD_B = f"{find_parent_module(HEAD)}.{LORA_B}.weight"
_ROWS_OF_TOKENS = (EMBEDDING, HEAD, _HEAD_B)
"""The parameters with a row for each token."""


class AdapterWeights:
    """The adapter in one folder."""

    def __init__(
        self, source: WeightsSource, config: AdapterConfig, tensors: dict[str, FileTensor], base_digest: str
    ) -> None:
        """Store the contents of a checked folder; use `open`."""
        self.location = source.label
        self._config = config
        self.source = source
        """The files of the folder."""
        self.base_digest = base_digest
        """The digest of the base on which it was trained; empty if not recorded (peft does not record it)."""
        self.names = tuple(tensors)
        self.targets = tuple(
            name.removesuffix(f".{LORA_A}.weight") for name in tensors if name.endswith(f"{LORA_A}.weight")
        )
        """The modules with a pair of matrices."""
        self.replaced_parameters = tuple(name for name in tensors if not is_adapter(name))
        """The parameters of the model itself that the adapter replaces."""
        self.target_names = tuple(sorted({name.rpartition(".")[2] for name in self.targets}))
        """The last components of the targets' names."""
        self._tensors = tensors

    @classmethod
    def open(cls, location: str, *, field: str = SETTING, tied: bool = False) -> AdapterWeights:
        """Open the folder, or s3://bucket/prefix, of the setting `field`; reads only the header.

        `tied`: whether the output projection of its base is the embedding, of which peft then stores one. Raises
        UserError for an unsupported adapter and StorageError if the store fails.
        """
        source = open_source(location, field)
        sizes = source.list_sizes()
        _refuse_missing(source.label, sizes)
        config = validate(AdapterConfig, read_document(source, CONFIG_NAME), f"{source.label}: {CONFIG_NAME}: ")
        refuse_other_kinds(source.label, config)
        metadata: dict[str, str] = {}
        tensors = read_tensors(source, TENSORS_NAME, sizes[TENSORS_NAME], metadata)
        by_name = _check_names(source.label, tensors, config)
        if tied and _HEAD_B in by_name and HEAD in by_name:
            by_name.setdefault(EMBEDDING, by_name[HEAD])
        return cls(source, config, by_name, metadata.get(BASE_DIGEST, ""))

    @property
    def lora(self) -> LoraConfig:
        """The settings of a run that trains such an adapter."""
        config = self._config
        ranks = {name: config.find_rank(name) for name in self.targets}
        alphas = {name: config.find_alpha(name) for name in self.targets}
        return LoraConfig(
            rank=config.r,
            alpha=config.lora_alpha,
            rank_stabilized=config.use_rslora,
            dora=config.use_dora,
            rank_pattern={name: rank for name, rank in ranks.items() if rank != config.r},
            alpha_pattern={name: alpha for name, alpha in alphas.items() if alpha != config.lora_alpha},
            dropout=config.lora_dropout,
            targets=self.target_names,
        )

    @functools.cached_property
    def digest(self) -> str:
        """Return the hex SHA-256 of rank, scale, names and all values."""
        config = self._config
        patterns = [pattern for pattern in (config.rank_pattern, config.alpha_pattern) if pattern]
        sha = hashlib.sha256(json.dumps([config.r, config.lora_alpha, config.use_rslora, *patterns]).encode())
        for name in sorted(self._tensors):
            sha.update(f"\n{name} {self._tensors[name].dtype} {self._tensors[name].shape} ".encode())
            sha.update(self.read(name).reshape(-1).view(torch.uint8).numpy().data)
        return sha.hexdigest()

    def compute_shape(self, base: ModelShape) -> ModelShape:
        """Return the shape of a base with the adapter, as peft loads it.

        The vocabulary is that of the adapter's embedding or output projection. The two are no longer tied if only one
        of them is replaced or adapted, or if their values differ.
        """
        tied = base.tie_embeddings and not self._has_untied_head()
        return replace(base, vocab_size=self._vocabulary or base.vocab_size, tie_embeddings=tied)

    def _has_untied_head(self) -> bool:
        if self.has(_HEAD_B) or self.has(HEAD) != self.has(EMBEDDING):
            return True
        return self.has(HEAD) and not self._is_equal(HEAD, self, EMBEDDING)

    def _is_equal(self, name: str, other: AdapterWeights | BaseWeights, other_name: str) -> bool:
        size = self.find_size(name)
        fills = functools.partial(self.fill, name), functools.partial(other.fill, other_name)
        return other.find_size(other_name) == size and are_equal(tuple(size), *fills)

    @property
    def _vocabulary(self) -> int | None:
        """The rows of the embedding or of the output projection, None without either."""
        return next((self._tensors[name].shape[0] for name in (EMBEDDING, HEAD) if self.has(name)), None)

    def has(self, name: str) -> bool:
        """Return whether the adapter has values of a parameter."""
        return name in self._tensors

    def find_size(self, name: str) -> torch.Size:
        """Return the size of a parameter. Raises KeyError for an unknown name."""
        return torch.Size(self._tensors[name].shape)

    def read(self, name: str) -> Tensor:
        """Read a whole parameter in the file's type. Raises KeyError for an unknown name; else as `fill`."""
        target = torch.empty(self.find_size(name), dtype=TORCH_TYPES[self._tensors[name].dtype])
        self.fill(name, (0,) * target.dim(), target)
        return target

    def fill(self, name: str, offsets: tuple[int, ...], target: Tensor) -> None:
        """Copy the box of a parameter that begins at `offsets` and has the target's size into `target`.

        Raises the errors of `BaseWeights.fill`. As there, rows of the vocabulary beyond those of the file get the mean
        of its rows; those of an adapter beside the output projection change nothing.
        """
        stored = self._tensors[name]

        def compute_row_beyond() -> Tensor:
            return torch.zeros(stored.shape[1]) if is_adapter(name) else compute_mean_row(self.source, stored)

        fill_box(self.source, name, stored, offsets, target, compute_row_beyond if name in _ROWS_OF_TOKENS else None)

    def check(self, tuning: TuningConfig, shape: ModelShape, base: BaseWeights | None = None) -> None:
        """Raise UserError unless a run with this tuning, model and base can start from the adapter.

        The shape is that of `compute_shape`; it may have more tokens.
        """
        label, lora = self.source.label, tuning.lora
        self.check_base(shape, base)
        for setting, configured, stored in (
            ("rankStabilized", str(lora.rank_stabilized).lower(), str(self._config.use_rslora).lower()),
            ("dora", str(lora.dora).lower(), str(self._config.use_dora).lower()),
        ):
            if configured != stored:
                raise UserError(
                    f"{label}: was made with {setting} {stored}, but tuning.lora.{setting} is {configured}: set it to "
                    f"{stored}"
                )
        expected_targets = set(find_lora_targets(shape, lora))
        for names, template in (
            (
                expected_targets - set(self.targets),
                "tuning.lora.targets names {}, beside which the adapter has nothing",
            ),
            (
                set(self.targets) - expected_targets,
                "the adapter stands beside {}, which tuning.lora.targets does not name",
            ),
        ):
            if names:
                raise UserError(
                    f"{label}: {template.format(list_some(sorted(names)))}: set tuning.lora.targets to what it was "
                    f"made with ({', '.join(self.target_names)})"
                )
        for name in self.targets:
            self._check_numbers(name, lora)
        trained = select_trainable(shape, tuning).weights
        unused = [name for name in self.replaced_parameters if name not in trained and name in parameter_sizes(shape)]
        unused = [name for name in unused if base is None or not self._is_equal(name, base, name)]
        if unused:
            raise UserError(
                f"{label}: holds other values of {list_some(unused)} than the base, which would not be used: add "
                f"{', '.join(dict.fromkeys(map(find_parent_module, unused)))} to tuning.trainable to train them on, or "
                "merge it into its base (trainium-trainer merge) and begin with the merged model and a new adapter"
            )

    def _check_numbers(self, target: str, lora: LoraConfig) -> None:
        """Raise UserError unless rank and alpha of a target are those of the configuration."""
        config = self._config
        ranks, alphas = bool(lora.rank_pattern or config.rank_pattern), bool(lora.alpha_pattern or config.alpha_pattern)
        numbers: tuple[tuple[str, float, float, bool], ...] = (
            ("rank", lora.rank_of(target), config.find_rank(target), ranks),
            ("alpha", lora.find_alpha(target), config.find_alpha(target), alphas),
        )
        for setting, configured, stored, differs_by_target in numbers:
            if configured == stored:
                continue
            label = f"{self.source.label}: was made with {setting} {stored}"
            if differs_by_target:
                raise UserError(
                    f"{label} on {target}, but tuning.lora gives it {configured}: set {setting}, or {setting}Pattern "
                    f"for this target, to {stored}"
                )
            raise UserError(f"{label}, but tuning.lora.{setting} is {configured}: set it to {stored}")

    def check_base(self, shape: ModelShape, base: BaseWeights | None = None) -> None:
        """Raise UserError if the adapter is for another base: by the digest if both are known, else by the sizes.

        The shape is that of `compute_shape`; it may have more tokens.
        """
        label, sizes = self.source.label, parameter_sizes(shape)
        if base is not None and self.base_digest and base.digest != self.base_digest:
            raise UserError(f"{label}: was trained on another base than this one: {self._explain_base(base)}")
        rows = shape.vocab_size - shape.vocab_padding if base is None else base.shape.vocab_size
        for name in self.names:
            if name == HEAD and shape.tie_embeddings:
                continue  # a copy of the embedding
            module = find_adapted_module(name) if is_adapter(name) else find_parent_module(name)
            owner = f"{module}.weight" if is_adapter(name) else name
            size, stored = sizes.get(owner), self._tensors[name].shape
            if size is None:
                fused = explain_fused([name])
                advice = f"{fused}: {_SEPARATE}" if fused else self._explain_base(base)
                raise UserError(f"{label}: has {name}, for which this base has no place: {advice}")
            if name in _ROWS_OF_TOKENS:
                size = (self._vocabulary or rows, *size[1:])
            if name.endswith(f"{LORA_A}.weight"):
                expected: tuple[int, ...] = (self._config.find_rank(module), size[1])
            elif name.endswith(f"{LORA_B}.weight"):
                expected = (size[0], self._config.find_rank(module))
            elif is_adapter(name):
                expected = size[:1]
            else:
                expected = size
            if stored != expected:
                raise UserError(
                    f"{label}: {name} has the size {list(stored)}, but beside this base it would be {list(expected)}: "
                    f"{self._explain_base(base)}"
                )
        self._check_complete(shape)

    def _explain_base(self, base: BaseWeights | None) -> str:
        base_name = self._config.base_model_name_or_path
        if base_name and base is not None and base_name.rstrip("/") == base.location.rstrip("/"):
            return (
                f"{CONFIG_NAME} names this base, so one of the two folders has changed since: copy or fetch both "
                "again, each as it was when the adapter was trained"
            )
        return f"use the base that it was made with{f' ({base_name})' if base_name else ''}"

    def _check_complete(self, shape: ModelShape) -> None:
        """Raise UserError if the file lacks parts of this model that its configuration names."""
        modules = [name.removesuffix(".weight") for name in parameter_sizes(shape) if name.endswith(".weight")]
        targets = [name for name in list_projection_sizes(shape) if self._config.is_target(name)]
        missing = [name for name in targets if name not in self.targets]
        saved_modules = tuple(self._config.modules_to_save or ())  # peft compares the ends of the names, without a dot
        missing += [name for name in modules if name.endswith(saved_modules) and not self.has(f"{name}.weight")]
        if missing:
            raise UserError(
                f"{self.source.label}: {CONFIG_NAME} names {list_some(missing)}, of which {TENSORS_NAME} holds "
                "nothing: copy or fetch the folder again, or name in target_modules and modules_to_save only what it "
                "holds"
            )


def _refuse_missing(label: str, sizes: dict[str, int]) -> None:
    if CONFIG_NAME in sizes and TENSORS_NAME not in sizes and PICKLE_NAME in sizes:
        raise UserError(
            f"{label}: holds its matrices as a pickle ({PICKLE_NAME}), which can run code when it is read: where you "
            "trust it, load it with peft and save it again"
        )
    for name in (CONFIG_NAME, TENSORS_NAME):
        if name not in sizes:
            raise UserError(f"{label}: has no {name}: name the folder of an adapter as peft saves it")


def to_tensor(name: str) -> str:
    """Return peft's name of a parameter; peft saves DoRA's magnitudes without the name of the parameter."""
    return PREFIX + (name.removesuffix(".weight") if name.endswith(f".{MAGNITUDE}.weight") else name)


def from_tensor(tensor: str) -> str:
    """Return the parameter of one of peft's tensors."""
    name = strip_wrappers(tensor).removeprefix(PREFIX)
    name = name.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
    return f"{name}.weight" if name.endswith(f".{MAGNITUDE}") else name


def _check_names(label: str, tensors: dict[str, FileTensor], config: AdapterConfig) -> dict[str, FileTensor]:
    """Return the tensors by the names of the model's parameters. Raises UserError for unknown tensors."""
    if not tensors:
        raise UserError(f"{label}: {TENSORS_NAME} holds nothing: copy or fetch the file again")
    # peft also stores the values before the training of modules to save, if the vocabulary changed.
    tensors = {name: stored for name, stored in tensors.items() if ".original_module." not in name}
    if foreign := [name for name in tensors if not strip_wrappers(name).startswith(PREFIX)]:
        raise UserError(
            f"{label}: {TENSORS_NAME} holds {list_some(foreign)}, but peft's names begin with {PREFIX}: convert the "
            "adapter to peft's format with the program that made it"
        )
    names = {name: from_tensor(name) for name in tensors}
    # These are the parts of linear adapters; every other name with "lora" belongs to another kind.
    if strange := [
        old
        for old, name in names.items()
        if not is_adapter(name) and (not name.endswith((".weight", ".bias")) or "lora_" in name)
    ]:
        raise UserError(
            f"{label}: {TENSORS_NAME} holds {list_some(strange)}, which is no part of a plain LoRA adapter of linear "
            f"layers: {MERGE_WITH_PEFT}, or train a plain LoRA adapter of linear layers"
        )
    by_name = {names[name]: stored for name, stored in tensors.items()}
    for name, stored in by_name.items():
        if stored.dtype not in TORCH_TYPES:
            raise UserError(
                f"{label}: {name} is stored as {stored.dtype}, but weights must be {', '.join(TORCH_TYPES)}: load the "
                "adapter with peft, convert it to float32 and save it again"
            )
        if not is_adapter(name):
            continue
        module = find_adapted_module(name)
        parts = [f"{module}.{LORA_A}.weight", f"{module}.{LORA_B}.weight"]
        if config.use_dora:
            parts.append(f"{module}.{MAGNITUDE}.weight")
        if missing := [part for part in parts if part not in by_name]:
            raise UserError(f"{label}: holds {name} without {missing[0]}: copy or fetch the folder again")
        if name not in parts:
            raise UserError(f"{label}: holds {name}, but {CONFIG_NAME} has no use_dora: set it to true there")
        if name.endswith(f".{MAGNITUDE}.weight"):
            continue
        rank, width = config.find_rank(module), 0
        if len(stored.shape) == 2:
            width = stored.shape[0 if name.endswith(f".{LORA_A}.weight") else 1]
        if width != rank:
            raise UserError(
                f"{label}: {name} has the size {list(stored.shape)}, but {CONFIG_NAME} has rank "
                f"{rank}: copy or fetch the folder again"
            )
    return by_name
