"""The training state of one rank of the nxd backend by checkpoint names.

Guarantees:
- Names and boxes refer to whole tensors with Hugging Face's names, although NxD's layers coalesce, repeat and pad.
- The weights of a checkpoint are the master weights.
- Values are copied to the host in one transfer, and only on request.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from trainium_trainer.backends.nxd.layout.parameter_names import MOMENTS
from trainium_trainer.checkpoint.format.live_state import TensorPart
from trainium_trainer.models.state_dict import OPTIMIZER_STEP, WEIGHT, format_state_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from trainium_trainer.backends.nxd.device import XlaDevice
    from trainium_trainer.backends.nxd.layout.divisions import StoredRows
    from trainium_trainer.backends.nxd.layout.pieces import Piece
    from trainium_trainer.backends.nxd.stores import ParameterState


class NxdState:
    """Master weights and moments."""

    def __init__(self, states: Sequence[ParameterState], device: XlaDevice) -> None:
        self._device = device
        self._tensors: dict[tuple[str, str], Tensor] = {}
        self._stored: dict[str, tuple[StoredRows, ...]] = {}
        for entry in states:
            self._stored[entry.name] = entry.stored
            self._tensors[WEIGHT, entry.name] = entry.master
            for (part, _), value in zip(MOMENTS.items(), (entry.exp_avg, entry.exp_avg_sq), strict=True):
                self._tensors[part, entry.name] = value
        self.step = torch.zeros((), dtype=torch.int64)
        self._host_copies: list[Tensor] = []
        self._is_uploaded = False

    def _iterate_stored_rows(self) -> Iterator[tuple[str, tuple[str, str], StoredRows]]:
        """Yield checkpoint name, tensor key and rows of every stacked tensor, including those without rows here."""
        for key in self._tensors:
            for stored in self._stored[key[1]]:
                yield format_state_name(key[0], stored.piece.name), key, stored

    def state_dict(self) -> dict[str, Any]:
        """See `TrainingState.state_dict`; the values are fetched at the first use."""

        @functools.cache
        def host_copies() -> dict[tuple[str, str], Tensor]:
            return dict(zip(self._tensors, self._fetch(), strict=True))

        def load_rows(key: tuple[str, str], piece: Piece) -> Callable[[], Tensor]:
            return lambda: host_copies()[key][piece.start : piece.end]

        state: dict[str, Any] = {OPTIMIZER_STEP: self.step}
        for name, key, stored in self._iterate_stored_rows():
            piece = stored.piece
            state[name] = TensorPart(
                load_rows(key, piece),
                whole=piece.whole,
                offsets=piece.offsets,
                sizes=piece.sizes,
                dtype=self._tensors[key].dtype,
                division=stored.division,
            )
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy every value; the names must be exactly this state's."""
        expected = {name for name, _, _ in self._iterate_stored_rows()} | {OPTIMIZER_STEP}
        if expected != state.keys():
            raise KeyError(sorted(expected ^ state.keys()))
        if state[OPTIMIZER_STEP] is not self.step:
            self.step.copy_(state[OPTIMIZER_STEP])

        def copy_loaded(part: str, piece: Piece, target: Tensor) -> None:
            target.copy_(state[format_state_name(part, piece.name)].local)

        self._replace(copy_loaded)

    def fill(self, write: Callable[[Piece, Tensor], None]) -> None:
        """Fill this rank's rows of the weights with `write`, and zero the moments."""

        def write_weights(part: str, piece: Piece, target: Tensor) -> None:
            if part == WEIGHT:
                write(piece, target)

        self._replace(write_weights)

    @torch.no_grad()
    def _replace(self, write: Callable[[str, Piece, Tensor], None]) -> None:
        """Recreate every tensor on the host, zero where nothing is written, and send it to the device."""
        for (part, name), tensor in self._tensors.items():
            values = torch.zeros(tensor.shape, dtype=tensor.dtype)
            for stored in self._stored[name]:
                if (piece := stored.piece).sizes[0]:
                    write(part, piece, values[piece.start : piece.end])
            tensor.copy_(values.to(tensor.device))
        self._host_copies = []
        self._device.sync()

    def list_local_tensors(self) -> dict[str, Tensor]:
        """See `TrainingState.list_local_tensors`; on a device they are copies, which `upload_local_tensors` writes."""
        copies = self._fetch()
        if not self._is_uploaded:
            self._host_copies = copies
        names = [format_state_name(*key) for key in self._tensors]
        return dict(zip(names, copies, strict=True)) | {OPTIMIZER_STEP: self.step}

    @torch.no_grad()
    def upload_local_tensors(self) -> None:
        """Copy the newest `list_local_tensors` to the device before the first step."""
        for tensor, copy in zip(self._tensors.values(), self._host_copies, strict=False):
            if copy.device != tensor.device:
                tensor.copy_(copy.to(tensor.device))
        self._host_copies, self._is_uploaded = [], True
        self._device.sync()

    def _fetch(self) -> list[Tensor]:
        return self._device.fetch(list(self._tensors.values()))
