"""Read an adapter in peft's format: `adapter_config.json` and `adapter_model.safetensors`.

Names are those of the model's parameters, without peft's prefix, so that `model.layers.0.self_attn.q_proj` has
`...lora_A.weight` [rank, width] and `...lora_B.weight` [outputs, rank], and peft's modules to save have their names in
the model.

The file may also hold the embedding and the output projection, with rows of added tokens: as modules to save, as the
layer below an adapter, or because peft found the vocabulary changed.

Guarantees:
- A setting with another meaning here than in peft is refused in one sentence.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field

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
from trainium_trainer.weights.folder import explain_fused, list_some, read_document, read_tensors, strip_wrappers
from trainium_trainer.weights.source import open_source
from trainium_trainer.weights.tensors import TORCH_TYPES, are_equal, compute_mean_row, fill_box

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from trainium_contract.models.shape import ModelShape
    from trainium_contract.trainer.tuning import TuningConfig
    from trainium_trainer.weights.base import BaseWeights
    from trainium_trainer.weights.source import WeightsSource
    from trainium_trainer.weights.tensors import FileTensor

CONFIG_NAME = "adapter_config.json"
TENSORS_NAME = "adapter_model.safetensors"
PICKLE_NAME = "adapter_model.bin"
PREFIX = "base_model.model."
BASE_DIGEST = "base_digest"
"""The key in the metadata of the tensor file, which other programs ignore."""
SETTING = "tuning.lora.adapter"
_PLAIN_INITIALIZATIONS = ("true", "false", "gaussian", "eva", "orthogonal", "mica")
"""The values of init_lora_weights that do not change the base."""
_NO_EFFECT = frozenset(
    {"task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "megatron_config", "megatron_core"}
    | {"loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config"}
)
"""The fields of peft's LoraConfig that do not affect what a plain adapter computes."""
_HEAD_B = f"{find_parent_module(HEAD)}.{LORA_B}.weight"
_ROWS_OF_TOKENS = (EMBEDDING, HEAD, _HEAD_B)
"""The parameters with a row for each token."""


class _AdapterConfig(BaseModel):
    """The supported fields of `adapter_config.json`; the defaults are peft's."""

    model_config = ConfigDict(extra="allow", frozen=True)

    peft_type: str | None = None
    r: Annotated[int, Field(ge=1)] = 8
    lora_alpha: Annotated[float, Field(gt=0)] = 8
    lora_dropout: float = 0.0
    base_model_name_or_path: str | None = None
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    bias: str = "none"
    init_lora_weights: bool | str | None = True
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    layer_replication: list[Any] | None = None
    trainable_token_indices: Any = None
    target_parameters: list[str] | None = None
    alora_invocation_tokens: list[int] | None = None
    ensure_weight_tying: bool = False

    def find_rank(self, module: str) -> int:
        """Return the rank of a module's adapter."""
        return _match_pattern(self.rank_pattern or {}, module, self.r)

    def find_alpha(self, module: str) -> float:
        """Return the alpha of a module's adapter."""
        return _match_pattern(self.alpha_pattern or {}, module, self.lora_alpha)

    def targets(self, module: str) -> bool:
        """Return whether the adapter targets a linear module, by peft's rules."""
        if _matches(self.exclude_modules, module):
            return False
        if self.target_modules == "all-linear":
            return f"{module}.weight" != HEAD
        if not _matches(self.target_modules, module):
            return False
        if self.layers_to_transform is None or isinstance(self.target_modules, str):
            return True
        numbers = [self.layers_to_transform] if isinstance(self.layers_to_transform, int) else self.layers_to_transform
        patterns = [self.layers_pattern] if isinstance(self.layers_pattern, str) else self.layers_pattern
        matches = [re.match(rf".*\.{pattern}\.(\d+)\.", module) for pattern in patterns or (r"[^.]*",)]
        layer = next((int(match[1]) for match in matches if match), None)
        return layer in numbers


_Value = TypeVar("_Value", int, float)


def _match_pattern(values: Mapping[str, _Value], module: str, otherwise: _Value) -> _Value:
    """Return the value of the first of peft's patterns, regular expressions, that matches a module."""
    return next((value for key, value in values.items() if re.match(rf"(.*\.)?({key})$", module)), otherwise)


def _matches(chosen: list[str] | str | None, module: str) -> bool:
    """Return whether peft's list of modules, or its regular expression, matches a module."""
    if isinstance(chosen, str):
        return re.fullmatch(chosen, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in chosen or ())


class AdapterWeights:
    """The adapter in one folder."""

    def __init__(
        self, source: WeightsSource, config: _AdapterConfig, tensors: dict[str, FileTensor], base_digest: str
    ) -> None:
        """Store the contents of a checked folder; use `open`."""
        self.location = source.where
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
        _refuse_missing(source.where, sizes)
        config = validate(_AdapterConfig, read_document(source, CONFIG_NAME), f"{source.where}: {CONFIG_NAME}: ")
        _refuse_other_kinds(source.where, config)
        metadata: dict[str, str] = {}
        tensors = read_tensors(source, TENSORS_NAME, sizes[TENSORS_NAME], metadata)
        by_name = _check_names(source.where, tensors, config)
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
        tied = base.tie_embeddings and not self._unties()
        return replace(base, vocab_size=self._vocabulary or base.vocab_size, tie_embeddings=tied)

    def _unties(self) -> bool:
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

        def row_beyond() -> Tensor:
            return torch.zeros(stored.shape[1]) if is_adapter(name) else compute_mean_row(self.source, stored)

        fill_box(self.source, name, stored, offsets, target, row_beyond if name in _ROWS_OF_TOKENS else None)

    def check(self, tuning: TuningConfig, shape: ModelShape, base: BaseWeights | None = None) -> None:
        """Raise UserError unless a run with this tuning, model and base can start from the adapter.

        The shape is that of `compute_shape`; it may have more tokens.
        """
        where, lora = self.source.where, tuning.lora
        self.check_base(shape, base)
        for setting, ours, stored in (
            ("rankStabilized", str(lora.rank_stabilized).lower(), str(self._config.use_rslora).lower()),
            ("dora", str(lora.dora).lower(), str(self._config.use_dora).lower()),
        ):
            if ours != stored:
                raise UserError(
                    f"{where}: was made with {setting} {stored}, but tuning.lora.{setting} is {ours}: set it to "
                    f"{stored}"
                )
        wanted = set(find_lora_targets(shape, lora))
        for names, template in (
            (wanted - set(self.targets), "tuning.lora.targets names {}, beside which the adapter has nothing"),
            (set(self.targets) - wanted, "the adapter stands beside {}, which tuning.lora.targets does not name"),
        ):
            if names:
                raise UserError(
                    f"{where}: {template.format(list_some(sorted(names)))}: set tuning.lora.targets to what it was "
                    f"made with ({', '.join(self.target_names)})"
                )
        for name in self.targets:
            self._check_numbers(name, lora)
        trained = select_trainable(shape, tuning).weights
        unused = [name for name in self.replaced_parameters if name not in trained and name in parameter_sizes(shape)]
        unused = [name for name in unused if base is None or not self._is_equal(name, base, name)]
        if unused:
            raise UserError(
                f"{where}: holds other values of {list_some(unused)} than the base, which would not be used: add "
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
        for setting, ours, stored, differs_by_target in numbers:
            if ours == stored:
                continue
            where = f"{self.source.where}: was made with {setting} {stored}"
            if differs_by_target:
                raise UserError(
                    f"{where} on {target}, but tuning.lora gives it {ours}: set {setting}, or {setting}Pattern for "
                    f"this target, to {stored}"
                )
            raise UserError(f"{where}, but tuning.lora.{setting} is {ours}: set it to {stored}")

    def check_base(self, shape: ModelShape, base: BaseWeights | None = None) -> None:
        """Raise UserError if the adapter is for another base: by the digest if both are known, else by the sizes.

        The shape is that of `compute_shape`; it may have more tokens.
        """
        where, sizes = self.source.where, parameter_sizes(shape)
        if base is not None and self.base_digest and base.digest != self.base_digest:
            raise UserError(f"{where}: was trained on another base than this one: {self._explain_base(base)}")
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
                raise UserError(f"{where}: has {name}, for which this base has no place: {advice}")
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
                    f"{where}: {name} has the size {list(stored)}, but beside this base it would be {list(expected)}: "
                    f"{self._explain_base(base)}"
                )
        self._check_complete(shape)

    def _explain_base(self, base: BaseWeights | None) -> str:
        named = self._config.base_model_name_or_path
        if named and base is not None and named.rstrip("/") == base.location.rstrip("/"):
            return (
                f"{CONFIG_NAME} names this base, so one of the two folders has changed since: copy or fetch both "
                "again, each as it was when the adapter was trained"
            )
        return f"use the base that it was made with{f' ({named})' if named else ''}"

    def _check_complete(self, shape: ModelShape) -> None:
        """Raise UserError if the file lacks parts of this model that its configuration names."""
        modules = [name.removesuffix(".weight") for name in parameter_sizes(shape) if name.endswith(".weight")]
        targets = [name for name in list_projection_sizes(shape) if self._config.targets(name)]
        missing = [name for name in targets if name not in self.targets]
        saved_modules = tuple(self._config.modules_to_save or ())  # peft compares the ends of the names, without a dot
        missing += [name for name in modules if name.endswith(saved_modules) and not self.has(f"{name}.weight")]
        if missing:
            raise UserError(
                f"{self.source.where}: {CONFIG_NAME} names {list_some(missing)}, of which {TENSORS_NAME} holds "
                "nothing: copy or fetch the folder again, or name in target_modules and modules_to_save only what it "
                "holds"
            )


def _refuse_missing(where: str, sizes: dict[str, int]) -> None:
    if CONFIG_NAME in sizes and TENSORS_NAME not in sizes and PICKLE_NAME in sizes:
        raise UserError(
            f"{where}: holds its matrices as a pickle ({PICKLE_NAME}), which can run code when it is read: where you "
            "trust it, load it with peft and save it again"
        )
    for name in (CONFIG_NAME, TENSORS_NAME):
        if name not in sizes:
            raise UserError(f"{where}: has no {name}: name the folder of an adapter as peft saves it")


_MERGE_WITH_PEFT = "merge it into its base with peft (merge_and_unload) and use the merged model"
_SEPARATE = "merge it into its base with peft, and save the merged model with separate projections"
_USE_PLAIN = "train a plain LoRA adapter instead, because peft cannot merge this kind either"


def _refuse_other_kinds(where: str, config: _AdapterConfig) -> None:
    """Raise UserError unless the configuration sets only fields of plain LoRA."""
    initial = str(config.init_lora_weights if config.init_lora_weights is not None else True).lower()
    for wrong, reason, advice in (
        (
            config.peft_type != "LORA",
            f"is of peft's type {config.peft_type}, but only LORA is supported",
            _MERGE_WITH_PEFT,
        ),
        (config.bias != "none", "trains biases (bias) of its base, which is not supported", _MERGE_WITH_PEFT),
        (config.fan_in_fan_out, "has its matrices transposed (fan_in_fan_out)", _MERGE_WITH_PEFT),
        (bool(config.layer_replication), "repeats layers of its base (layer_replication)", _USE_PLAIN),
        (
            bool(config.trainable_token_indices),
            "trains single rows of the embedding (trainable_token_indices)",
            _MERGE_WITH_PEFT,
        ),
        (
            bool(config.target_parameters),
            "stands beside parameters that are no linear layers (target_parameters)",
            _MERGE_WITH_PEFT,
        ),
        (
            bool(config.alora_invocation_tokens),
            "is an activated LoRA (alora_invocation_tokens), which acts only after certain tokens",
            _USE_PLAIN,
        ),
        (
            initial not in _PLAIN_INITIALIZATIONS,
            f"was initialized with {config.init_lora_weights} (init_lora_weights), which changes the base",
            _MERGE_WITH_PEFT,
        ),
    ):
        if wrong:
            raise UserError(f"{where}: {reason}: {advice}")
    if unknown := _find_changed_fields(config.model_extra or {}):
        raise UserError(
            f"{where}: {CONFIG_NAME} sets {list_some(unknown)}, which plain LoRA does not have: {_MERGE_WITH_PEFT}, or "
            "train a plain LoRA adapter"
        )


def _find_changed_fields(extra: Mapping[str, Any]) -> list[str]:
    """Return the unsupported fields that differ from peft's defaults."""
    given = [name for name, value in extra.items() if name not in _NO_EFFECT and value not in (None, False, {}, [], "")]
    if not given:
        return []
    from peft import LoraConfig  # noqa: PLC0415 - takes seconds to import, for few adapters

    defaults = LoraConfig().to_dict()  # type: ignore[no-untyped-call]
    return [name for name in given if name not in defaults or defaults[name] != extra[name]]


def to_tensor(name: str) -> str:
    """Return peft's name of a parameter; peft saves DoRA's magnitudes without the name of the parameter."""
    return PREFIX + (name.removesuffix(".weight") if name.endswith(f".{MAGNITUDE}.weight") else name)


def from_tensor(tensor: str) -> str:
    """Return the parameter of one of peft's tensors."""
    name = strip_wrappers(tensor).removeprefix(PREFIX)
    name = name.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
    return f"{name}.weight" if name.endswith(f".{MAGNITUDE}") else name


def _check_names(where: str, tensors: dict[str, FileTensor], config: _AdapterConfig) -> dict[str, FileTensor]:
    """Return the tensors by the names of the model's parameters. Raises UserError for unknown tensors."""
    if not tensors:
        raise UserError(f"{where}: {TENSORS_NAME} holds nothing: copy or fetch the file again")
    # peft also stores the values before the training of modules to save, if the vocabulary changed.
    tensors = {name: stored for name, stored in tensors.items() if ".original_module." not in name}
    if foreign := [name for name in tensors if not strip_wrappers(name).startswith(PREFIX)]:
        raise UserError(
            f"{where}: {TENSORS_NAME} holds {list_some(foreign)}, but peft's names begin with {PREFIX}: convert the "
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
            f"{where}: {TENSORS_NAME} holds {list_some(strange)}, which is no part of a plain LoRA adapter of linear "
            f"layers: {_MERGE_WITH_PEFT}, or train a plain LoRA adapter of linear layers"
        )
    by_name = {names[name]: stored for name, stored in tensors.items()}
    for name, stored in by_name.items():
        if stored.dtype not in TORCH_TYPES:
            raise UserError(
                f"{where}: {name} is stored as {stored.dtype}, but weights must be {', '.join(TORCH_TYPES)}: load the "
                "adapter with peft, convert it to float32 and save it again"
            )
        if not is_adapter(name):
            continue
        module = find_adapted_module(name)
        parts = [f"{module}.{LORA_A}.weight", f"{module}.{LORA_B}.weight"]
        if config.use_dora:
            parts.append(f"{module}.{MAGNITUDE}.weight")
        if missing := [part for part in parts if part not in by_name]:
            raise UserError(f"{where}: holds {name} without {missing[0]}: copy or fetch the folder again")
        if name not in parts:
            raise UserError(f"{where}: holds {name}, but {CONFIG_NAME} has no use_dora: set it to true there")
        if name.endswith(f".{MAGNITUDE}.weight"):
            continue
        rank, width = config.find_rank(module), 0
        if len(stored.shape) == 2:
            width = stored.shape[0 if name.endswith(f".{LORA_A}.weight") else 1]
        if width != rank:
            raise UserError(
                f"{where}: {name} has the size {list(stored.shape)}, but {CONFIG_NAME} has rank "
                f"{rank}: copy or fetch the folder again"
            )
    return by_name
