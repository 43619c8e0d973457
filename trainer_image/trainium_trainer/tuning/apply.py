"""Apply a tuning to a model before the model is divided or has values.

Guarantees:
- Modules keep their paths, so parallel plans, recompute and FSDP find them.
- Adapters are float32 parameters for every base.
- Frozen parameters have no gradient.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainium_trainer.models.llama import Linear, Llama
from trainium_trainer.models.lora import AdaptedLinear
from trainium_trainer.tuning.trainable import LORA_A

if TYPE_CHECKING:
    from trainium_contract.trainer.tuning import LoraConfig
    from trainium_trainer.tuning.trainable import TrainableParameters


def apply_tuning(model: Llama, trainable: TrainableParameters, lora: LoraConfig, *, frozen: torch.dtype | None) -> None:
    """Add adapters to the chosen projections and freeze the other weights, before the model is divided.

    The model, or a stage of it, has no values yet. `frozen` is the type of frozen weights; None keeps their type.
    """
    for name in trainable.adapters:
        parent_name, _, leaf = name.rpartition(".")
        parent = _find(model, parent_name)
        old = None if parent is None else getattr(parent, leaf, None)
        if isinstance(old, Linear):
            with torch.device("meta"):
                setattr(
                    parent,
                    leaf,
                    AdaptedLinear(name, old.in_features, old.out_features, lora, bias=old.bias is not None),
                )
    seen: dict[int, nn.Parameter] = {}
    tied = model.shape.tie_embeddings and "model.embed_tokens.weight" in trainable.weights
    for owner, module in model.named_modules():
        for leaf, parameter in list(module._parameters.items()):  # noqa: SLF001 - where parameters are replaced
            name = f"{owner}.{leaf}"
            if parameter is None or name in trainable.sizes or (tied and name == "lm_head.weight"):
                continue
            value = parameter.detach() if frozen is None else parameter.detach().to(frozen)
            module.register_parameter(leaf, seen.setdefault(id(parameter), nn.Parameter(value, requires_grad=False)))


def _find(model: nn.Module, name: str) -> nn.Module | None:
    """Return a module by its name; None if another stage of a pipeline holds it."""
    try:
        return model.get_submodule(name) if name else model
    except AttributeError:
        return None


def draw_initial_adapter(name: str, size: torch.Size, seed: int) -> Tensor:
    """Return the initial values of an adapter's whole matrix: A as in peft, uniform within 1/sqrt(width), B zero.

    As for other weights, each matrix has a separate generator, so that a rank draws only those that it needs.
    """
    if not name.endswith(f".{LORA_A}.weight"):
        return torch.zeros(size)
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    bound = 1.0 / math.sqrt(size[1])
    return torch.empty(size).uniform_(-bound, bound, generator=generator)
