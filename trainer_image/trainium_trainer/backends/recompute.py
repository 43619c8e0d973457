"""Activation recompute: what a layer's backward pass computes again instead of having kept it (arXiv 1604.06174).

Guarantees:
- Results are the same to the bit, because the same operations run on the same inputs.
- Names of parameters stay, because a layer's forward is replaced and no module is wrapped.
- Hooks of FSDP and tensor parallelism stay outside.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainium_contract.trainer.parallelism import Recompute
from trainium_trainer.models.llama import Linear
from trainium_trainer.models.stages import present_layers

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

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
"""Dear to compute again. Not the batched products of attention without a fused kernel: their results are the scores of
all pairs of positions, which is what selective recompute is there to avoid (arXiv 2205.05198, section 4)."""


def apply_recompute(model: Llama, mode: Recompute) -> None:
    """Make every layer of a model or a stage keep less; to be called before FSDP is applied."""
    if mode is Recompute.NONE:
        return
    for layer in present_layers(model):
        # The models have no dropout, so that no state of random numbers needs to be kept.
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if mode is Recompute.SELECTIVE:
            options["context_fn"] = functools.partial(_contexts, _count_products(layer))
        layer.forward = _recomputed(layer.forward, options)  # type: ignore[method-assign]


def _recomputed(forward: Callable[..., Tensor], options: dict[str, Any]) -> Callable[..., Tensor]:
    """Return a function of ours rather than a partial one of torch's, which torch.compile would pass over."""

    def run(*inputs: Any) -> Tensor:
        out: Tensor = checkpoint(forward, *inputs, **options)
        return out

    return run


def _count_products(layer: nn.Module) -> int:
    return sum(isinstance(module, Linear) for module in layer.modules())


def _contexts(products: int) -> Any:
    """Return the pair of contexts of one layer's forward pass and its recomputation."""
    return create_selective_checkpoint_contexts(_Policy(products))  # type: ignore[no-untyped-call]


class _Policy:
    """Keep what is dear, but nothing of the layer's end: no operation of the backward pass needs its last product."""

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
