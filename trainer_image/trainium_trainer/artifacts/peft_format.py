"""An adapter in peft's format: names, configuration and metadata.

Guarantees:
- `PeftModel.from_pretrained(base, folder)` gives the same outputs as the run's model.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from trainium_trainer.tuning.trainable import LORA_A, find_parent_module, is_adapter

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from trainium_contract.trainer.tuning import LoraConfig

_UNUSED_FEATURES: dict[str, Any] = {
    "auto_mapping": None,
    "bias": "none",
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "lora_bias": False,
    "peft_type": "LORA",
    "revision": None,
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
}
"""The fields of unused features."""


def create_adapter_config(lora: LoraConfig, names: Collection[str], linears: Iterable[str], base: str | None) -> bytes:
    """Return the contents of `adapter_config.json`.

    `names` are the adapter's parameters, `linears` all linear modules of the model, `base` is the location of the base.
    """
    modules = [name.removesuffix(f".{LORA_A}.weight") for name in names if name.endswith(f".{LORA_A}.weight")]
    saved_modules = list(dict.fromkeys(find_parent_module(name) for name in names if not is_adapter(name)))
    config = _UNUSED_FEATURES | {
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": lora.dropout,
        "rank_pattern": {name: lora.rank_of(name) for name in modules if lora.rank_of(name) != lora.rank},
        "alpha_pattern": {name: lora.find_alpha(name) for name in modules if lora.find_alpha(name) != lora.alpha},
        "use_dora": lora.dora,
        "use_rslora": lora.rank_stabilized,
        "target_modules": shorten_names(modules, linears),
        "modules_to_save": saved_modules or None,
    }
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def shorten_names(modules: Iterable[str], linears: Iterable[str]) -> list[str]:
    """Return the last components of the modules' names if they are unambiguous, else the whole names."""
    chosen = set(modules)
    leaves = {name.rpartition(".")[2] for name in chosen}
    meant = {name for name in linears if name.rpartition(".")[2] in leaves}
    return sorted(leaves if meant == chosen else chosen)
