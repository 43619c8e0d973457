"""Find the ranks whose values were not finite before the reduction over ranks.

In a pipeline nonfinite values reach all later stages forward and all earlier ones backward, so only the first or the
last stage with such values counts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from trainium_trainer.checkpoint.format.live_state import build_grid, to_local

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from trainium_trainer.backends.base import Mesh
    from trainium_trainer.models.stages import LlamaStage
    from trainium_worker.pulse import Pulse


class NonfiniteOrigins:
    """Sums of the activations and gradients that this rank's stage sent since the last update."""

    def __init__(self, mesh: Mesh, pulse: Pulse) -> None:
        self._mesh = mesh
        self._pulse = pulse
        self._outputs: list[Tensor] = []
        self._gradients: list[Tensor] = []

    def watch(self, stage: LlamaStage) -> None:
        """Record sums of the tensors that the stage sends forward and backward."""

        def record(sums: list[Tensor], value: Tensor) -> None:
            sums.append(to_local(value).sum(dtype=torch.float32))

        def before(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            if stage.is_first or not torch.is_grad_enabled():
                return None
            view = inputs[0].view_as(inputs[0])  # the pipeline reuses its tensors, and hooks stay on tensors
            view.register_hook(lambda gradient: record(self._gradients, gradient))  # type: ignore[no-untyped-call]
            return (view, *inputs[1:])

        def after(_: Any, __: Any, output: Tensor) -> None:
            if not stage.is_last and torch.is_grad_enabled():
                record(self._outputs, output)

        stage.register_forward_pre_hook(before)
        stage.register_forward_hook(after)

    def clear(self) -> None:
        """Clear the sums after an update."""
        self._outputs.clear()
        self._gradients.clear()

    def find_loss_origins(self, own_loss: float) -> tuple[int, ...]:
        """Return the ranks where the forward pass first was nonfinite; `own_loss` is this rank's loss. Collective."""
        stage = self._mesh.pp_rank if _has_nonfinite(self._outputs) else self._mesh.pp_size - 1
        is_origin = _has_nonfinite(self._outputs) or not math.isfinite(own_loss)
        return self._agree(1 + stage if is_origin else 0, min)

    def find_gradient_origins(self, *, own_are_finite: bool) -> tuple[int, ...]:
        """Return the ranks where the backward pass first was nonfinite. Collective."""
        is_origin = _has_nonfinite(self._gradients) or not own_are_finite
        return self._agree(1 + self._mesh.pp_rank if is_origin else 0, max)

    def _agree(self, mark: int, choose: Callable[[list[tuple[int, int]]], tuple[int, int]]) -> tuple[int, ...]:
        """Return the ranks whose mark (1 plus a stage, 0 for none) is the selected one of their share of samples."""
        mesh = self._mesh
        marks = torch.zeros(mesh.world_size, dtype=torch.int32)
        marks[mesh.rank] = mark
        if mesh.world_size > 1:
            with self._pulse.waiting_for_peers:
                dist.all_reduce(marks)
        grid = build_grid(mesh)
        by_share: dict[int, list[tuple[int, int]]] = {}
        for rank, marked in enumerate(marks.tolist()):
            if marked:
                _, part, _ = grid.find_coordinates(rank)
                by_share.setdefault(part // mesh.cp_size, []).append((marked, rank))
        chosen = {share: choose(marked)[0] for share, marked in by_share.items()}
        return tuple(
            sorted(rank for share, marked in by_share.items() for stage, rank in marked if stage == chosen[share])
        )


def _has_nonfinite(sums: list[Tensor]) -> bool:
    return bool(sums) and not bool(torch.stack(sums).isfinite().all())
