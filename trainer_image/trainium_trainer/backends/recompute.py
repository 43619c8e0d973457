"""Activation recompute: a layer's backward pass recomputes activations that were not kept (arXiv 1604.06174).

Guarantees:
- Results are the same to the bit, because the same operations run on the same inputs.
- The names of parameters do not change, because the forward of a layer is replaced and no module is wrapped.
- Hooks of FSDP and tensor parallelism stay outside.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainium_contract.trainer.parallelism import Recompute
from trainium_trainer.models.llama import Linear
from trainium_trainer.models.stages import list_present_layers

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from trainium_trainer.models.llama import Llama

_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "mkldnn::_linear_pointwise"})
_KEPT = _PRODUCTS | {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "_c10d_functional::all_reduce",
    "_c10d_functional::reduce_scatter_tensor",
}
"""Operations that are expensive to recompute. The batched products of attention without a fused kernel are excluded:
their results are the scores of all pairs of positions, whose memory selective recompute avoids (arXiv 2205.05198,
section 4).
"""


def apply_recompute(model: Llama, mode: Recompute) -> None:
    """Recompute the activations of every layer of a model or a stage; call this before FSDP is applied."""
    if mode is Recompute.NONE:
        return
    for layer in list_present_layers(model):
        # Dropout needs no generator, so no state of random numbers is kept.
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if mode is Recompute.SELECTIVE:
            products = sum(isinstance(module, Linear) for module in layer.modules())
            options["context_fn"] = functools.partial(_create_contexts, products)
        layer.forward = _wrap_with_recompute(layer.forward, options)  # type: ignore[method-assign]


def _wrap_with_recompute(forward: Callable[..., Tensor], options: dict[str, Any]) -> Callable[..., Tensor]:
    """Return a plain function, because torch.compile would skip a partial function of torch."""

    def run(*inputs: Any) -> Tensor:
        out: Tensor = checkpoint(forward, *inputs, **options)
        return out

    return run


def _create_contexts(products: int) -> Any:
    """Return the pair of contexts of one layer's forward pass and its recomputation."""
    return create_selective_checkpoint_contexts(_Policy(products))  # type: ignore[no-untyped-call]


class _Policy:
    """Keep expensive results except the layer's last product, which no operation of the backward pass needs."""

    def __init__(self, products: int) -> None:
        self._products = products
        self._seen = {False: 0, True: 0}

    def __call__(self, context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        name = operation._schema.name  # noqa: SLF001 - torch's own name of the operation
        seen = self._seen
        if name in _PRODUCTS:
            seen[context.is_recompute] += 1
        if name in _KEPT and seen[context.is_recompute] < self._products:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE
