"""The layout of a rank's local tensors in one flat buffer.

Guarantees:
- Tensors lie in the order of their names at offsets that are multiples of 64 bytes.
- The payload is a multiple of the checksum's block, so that no byte is outside a block.
- Equal layouts have equal digests on all machines.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainium_worker.snapshot import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class _TensorSpan:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """The table of contents of a snapshot's payload."""

    parts: tuple[_TensorSpan, ...]
    payload_bytes: int
    digest: str

    @staticmethod
    def of(tensors: Mapping[str, torch.Tensor]) -> BufferLayout:
        """Return the layout of these tensors; depends on names, types and shapes only."""
        parts: list[_TensorSpan] = []
        offset = 0
        for name in sorted(tensors):
            tensor = tensors[name]
            end = offset + tensor.numel() * tensor.element_size()
            parts.append(_TensorSpan(name, tensor.dtype, tuple(tensor.shape), offset, end))
            offset = _round_up(end, _ALIGNMENT)
        text = "\n".join(f"{part.name} {part.dtype} {part.shape}" for part in parts)
        return BufferLayout(
            parts=tuple(parts),
            payload_bytes=max(BLOCK_BYTES, _round_up(offset, BLOCK_BYTES)),
            digest=hashlib.sha256(text.encode()).hexdigest()[:32],
        )

    def views(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """Typed views into a payload buffer, in the layout's order."""
        return [payload[part.start : part.end].view(part.dtype).view(part.shape) for part in self.parts]

    def ordered(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors in the layout's order; KeyError when one is missing."""
        return [tensors[part.name].detach() for part in self.parts]


@torch.no_grad()
def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy many tensors, also across devices; on return the copies are complete."""
    if targets:
        torch._foreach_copy_(targets, sources)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
