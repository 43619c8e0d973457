"""A rank's box of a whole tensor, for divisions that DTensor cannot express.

DTensor knows equal chunks along mesh dimensions. A weight that several tensors are stacked in, cut again by ZeRO-1, has
other boundaries on every rank. Invariants: DCP plans writes and reads on a `Part` by the protocol that DTensor itself
uses (`__create_write_items__`, `__create_chunk_list__`, `__get_tensor_shard__`), so what a `Part` wrote is read at any
division, and the other way round; what the values are is asked of the device only when they are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class Part(torch.Tensor):
    """The values of one box of a tensor that other ranks hold other boxes of.

    A tensor in name only: DCP looks for values of that type. Its size is that of the whole; no operation works on it.
    """

    whole: torch.Size
    offsets: torch.Size
    sizes: torch.Size
    """Of the box."""
    _values: Callable[[], Tensor]
    _local: Tensor | None
    __torch_function__: Any = torch._C._disabled_torch_function_impl  # noqa: SLF001 - a subclass that has none says so

    @staticmethod
    def __new__(
        cls: type[Self],
        values: Callable[[], Tensor],
        *,
        whole: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
        dtype: torch.dtype,
    ) -> Self:
        """The box of `sizes` that begins at `offsets` of a tensor of size `whole`; `values` gives the tensor in it."""
        wrap: Any = torch.Tensor._make_wrapper_subclass  # noqa: SLF001 - as DTensor is made
        part: Self = wrap(cls, torch.Size(whole), dtype=dtype, device="cpu")
        part.whole, part.offsets, part.sizes = torch.Size(whole), torch.Size(offsets), torch.Size(sizes)
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

    def over(self, local: Tensor) -> Part:
        """The same box of the same whole with other values."""
        return Part(lambda: local, whole=self.whole, offsets=self.offsets, sizes=self.sizes, dtype=local.dtype)

    def _chunk(self) -> ChunkStorageMetadata:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # noqa: PLC0415 - slow to import

        return ChunkStorageMetadata(self.offsets, self.sizes)

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """What DCP has to write."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties  # noqa: PLC0415 - as above
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType  # noqa: PLC0415

        data = TensorWriteData(self._chunk(), TensorProperties(dtype=self.dtype), self.whole)
        return [WriteItem(MetadataIndex(fqn, self.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What DCP has to read."""
        return [self._chunk()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The tensor that DCP reads from or into."""
        if index.offset is not None and torch.Size(index.offset) != self.offsets:
            raise ValueError(f"{index.fqn}: no part begins at {tuple(index.offset)}")
        return self.local
