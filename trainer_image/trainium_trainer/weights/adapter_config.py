"""Read `adapter_config.json` of an adapter in peft's format, and apply its patterns as peft does.

Guarantees:
- A setting with another meaning here than in peft is refused in one sentence.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from trainium_contract.models.parameters import HEAD
from trainium_trainer.exits import UserError
from trainium_trainer.weights.folder import list_some

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG_NAME = "adapter_config.json"
_PLAIN_INITIALIZATIONS = ("true", "false", "gaussian", "eva", "orthogonal", "mica")
"""The values of init_lora_weights that do not change the base."""
_NO_EFFECT = frozenset(
    {"task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "megatron_config", "megatron_core"}
    | {"loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config"}
)
"""The fields of peft's LoraConfig that do not affect what a plain adapter computes."""


class AdapterConfig(BaseModel):
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

    def is_target(self, module: str) -> bool:
        """Return whether the adapter targets a linear module, by peft's rules."""
        if _is_listed(self.exclude_modules, module):
            return False
        if self.target_modules == "all-linear":
            return f"{module}.weight" != HEAD
        if not _is_listed(self.target_modules, module):
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


def _is_listed(chosen: list[str] | str | None, module: str) -> bool:
    """Return whether peft's list of modules, or its regular expression, matches a module."""
    if isinstance(chosen, str):
        return re.fullmatch(chosen, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in chosen or ())


MERGE_WITH_PEFT = "merge it into its base with peft (merge_and_unload) and use the merged model"
_USE_PLAIN = "train a plain LoRA adapter instead, because peft cannot merge this kind either"


def refuse_other_kinds(label: str, config: AdapterConfig) -> None:
    """Raise UserError unless the configuration sets only fields of plain LoRA."""
    initial = str(config.init_lora_weights if config.init_lora_weights is not None else True).lower()
    for wrong, reason, advice in (
        (
            config.peft_type != "LORA",
            f"is of peft's type {config.peft_type}, but only LORA is supported",
            MERGE_WITH_PEFT,
        ),
        (config.bias != "none", "trains biases (bias) of its base, which is not supported", MERGE_WITH_PEFT),
        (config.fan_in_fan_out, "has its matrices transposed (fan_in_fan_out)", MERGE_WITH_PEFT),
        (bool(config.layer_replication), "repeats layers of its base (layer_replication)", _USE_PLAIN),
        (
            bool(config.trainable_token_indices),
            "trains single rows of the embedding (trainable_token_indices)",
            MERGE_WITH_PEFT,
        ),
        (
            bool(config.target_parameters),
            "stands beside parameters that are no linear layers (target_parameters)",
            MERGE_WITH_PEFT,
        ),
        (
            bool(config.alora_invocation_tokens),
            "is an activated LoRA (alora_invocation_tokens), which acts only after certain tokens",
            _USE_PLAIN,
        ),
        (
            initial not in _PLAIN_INITIALIZATIONS,
            f"was initialized with {config.init_lora_weights} (init_lora_weights), which changes the base",
            MERGE_WITH_PEFT,
        ),
    ):
        if wrong:
            raise UserError(f"{label}: {reason}: {advice}")
    if unknown := _find_changed_fields(config.model_extra or {}):
        raise UserError(
            f"{label}: {CONFIG_NAME} sets {list_some(unknown)}, which plain LoRA does not have: {MERGE_WITH_PEFT}, or "
            "train a plain LoRA adapter"
        )


def _find_changed_fields(extra: Mapping[str, Any]) -> list[str]:
    """Return the unsupported fields that differ from peft's defaults."""
    set_fields = [
        name for name, value in extra.items() if name not in _NO_EFFECT and value not in (None, False, {}, [], "")
    ]
    if not set_fields:
        return []
    from peft import LoraConfig  # noqa: PLC0415 - takes seconds to import, for few adapters

    defaults = LoraConfig().to_dict()  # type: ignore[no-untyped-call]
    return [name for name in set_fields if name not in defaults or defaults[name] != extra[name]]
