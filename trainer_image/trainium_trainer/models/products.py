"""The product of a projection, by the faster of the two libraries that torch has on a CPU.

Torch gives products of float32 to MKL, which on processors that are not Intel's keeps to AVX2; oneDNN takes what the
processor has, and with AVX-512 is twice as fast there. Invariants: float32 throughout, only the order of additions
differs; which library computes follows from the processor and from sizes alone, so a run on the same machine gives the
same bits; a gradient that nobody wants is not computed.
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
"""Multiplications from which on oneDNN is the faster; below, its calls cost more than they save."""


def product(x: Tensor, weight: Tensor) -> Tensor:
    """[..., width] times the transpose of [outputs, width]: [..., outputs], as `torch.nn.functional.linear`."""
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
        and _onednn_is_faster()
    )


@functools.cache
def _onednn_is_faster() -> bool:
    """Return whether MKL leaves AVX-512 unused here."""
    try:
        vendor = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    uses_all = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return "AuthenticAMD" in vendor and uses_all and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class _Product(torch.autograd.Function):
    """Compute the gradient, because the operation is private to torch's compiler and has none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """See `product`."""
        for_x, for_weight = ctx.needs_input_grad
        ctx.save_for_backward(x if for_weight else None, weight if for_x else None)
        out: Tensor = _times(x.reshape(-1, x.shape[-1]), weight)
        # As torch's own: what it returns is no view, which hooks of FSDP could not stand.
        shaped: Tensor = torch.ops.aten._unsafe_view(out, [*x.shape[:-1], out.shape[-1]])  # noqa: SLF001 - as above
        return shaped

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of those inputs that have one."""
        x, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_x = None if weight is None else _times(flat, weight.t()).view(*gradient.shape[:-1], -1)
        of_weight = None if x is None else _times(flat.t(), x.reshape(-1, x.shape[-1]).t())
        return of_x, of_weight


def _times(left: Tensor, right: Tensor) -> Tensor:
    """[m, k] and [n, k] to [m, n]."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")  # noqa: SLF001 - no public name
    return out
