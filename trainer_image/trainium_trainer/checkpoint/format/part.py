"""A rank's box of a whole tensor, for divisions that DTensor cannot express.

DTensor knows equal chunks along mesh dimensions. A weight that several tensors are stacked in, cut again by ZeRO-1, has
other boundaries on every rank.

Guarantees:
- A `TensorPart` has the division of the whole over all ranks, so what it wrote is read at any division, and the other
  way round.
- The values are fetched from the device only when they are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from trainium_trainer.checkpoint.dividing import Division


class TensorPart(torch.Tensor):
    """The values of one box of a tensor that other ranks hold other boxes of.

    A tensor in name only, as a state holds tensors. Its size is that of the whole; no operation works on it.
    """

    whole: torch.Size
    offsets: torch.Size
    sizes: torch.Size
    """Sizes of the box."""
    division: Division | None
    """Division of the whole over the ranks of a stage; None: it can be read into, not saved."""
    _values: Callable[[], Tensor]
    _local: Tensor | None
    __torch_function__: Any = torch._C._disabled_torch_function_impl  # noqa: SLF001 - a subclass without one

    @staticmethod
    def __new__(
        cls: type[Self],
        values: Callable[[], Tensor],
        *,
        whole: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
        dtype: torch.dtype,
        division: Division | None = None,
    ) -> Self:
        """Return the box of `sizes` that begins at `offsets` of a tensor of size `whole`.

        `values` gives the tensor in it.
        """
        wrap: Any = torch.Tensor._make_wrapper_subclass  # noqa: SLF001 - as DTensor is made
        part: Self = wrap(cls, torch.Size(whole), dtype=dtype, device="cpu")
        part.whole, part.offsets, part.sizes = torch.Size(whole), torch.Size(offsets), torch.Size(sizes)
        part.division = division
        part._values, part._local = values, None
        return part

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse to compute with a place."""
        raise TypeError(f"{func} on a Part: use its local tensor")

    @property
    def local(self) -> Tensor:
        """The values, the same tensor each time."""
        if self._local is None:
            self._local = self._values().detach()
            assert self._local.shape == self.sizes, (self._local.shape, self.sizes)
        return self._local
