"""Compute the product of a projection with the faster of torch's two CPU libraries.

Torch computes products of float32 with MKL, which uses only AVX2 on processors of other vendors than Intel; oneDNN uses
AVX-512 there and is twice as fast.

Guarantees:
- All products are in float32; only the order of additions differs.
- The choice of the library depends only on the processor and on sizes, so runs on the same machine are bitwise equal.
- Gradients that are not required are not computed.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everybody uses

_PLAIN = (Tensor, nn.Parameter)
_LEAST_WORK = 1 << 21
"""The number of multiplications from which on oneDNN is faster; below it, the overhead of its calls dominates."""


def apply_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply [..., width] by the transpose of [outputs, width], as `torch.nn.functional.linear` does."""
    if _is_for_onednn(x, weight):
        out: Tensor = _Product.apply(x, weight)  # type: ignore[no-untyped-call]
        return out
    return F.linear(x, weight)


def _is_for_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype is weight.dtype is torch.float32
        and type(x) in _PLAIN
        and type(weight) in _PLAIN
        and x.numel() * weight.shape[0] >= _LEAST_WORK
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and _is_onednn_faster()
    )


@functools.cache
def _is_onednn_faster() -> bool:
    """Return whether this processor has AVX-512 that MKL does not use."""
    try:
        vendor = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    uses_all = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return "AuthenticAMD" in vendor and uses_all and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class _Product(torch.autograd.Function):
    """The product with a gradient: torch's operation is private to its compiler and has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Return the product."""
        for_x, for_weight = ctx.needs_input_grad
        ctx.save_for_backward(x if for_weight else None, weight if for_x else None)
        out: Tensor = _multiply_transposed(x.reshape(-1, x.shape[-1]), weight)
        # The result must not be a view, because hooks of FSDP fail on views; torch's `linear` does the same.
        shaped: Tensor = torch.ops.aten._unsafe_view(out, [*x.shape[:-1], out.shape[-1]])  # noqa: SLF001 - as above
        return shaped

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of the inputs that require one."""
        x, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_x = None if weight is None else _multiply_transposed(flat, weight.t()).view(*gradient.shape[:-1], -1)
        of_weight = None if x is None else _multiply_transposed(flat.t(), x.reshape(-1, x.shape[-1]).t())
        return of_x, of_weight


def _multiply_transposed(left: Tensor, right: Tensor) -> Tensor:
    """Multiply [m, k] by the transpose of [n, k]: [m, n]."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")  # noqa: SLF001 - no public name
    return out
