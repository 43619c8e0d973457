"""One value for what several tensor-parallel ranks hold, where each of them rounds at random.

Norms and repeated key/value heads are updated on every rank that has them. With deterministic rounding equal inputs
stay equal; with a NeuronCore's stochastic rounding they would drift apart.

Guarantees:
- After `agree` the weights are bit for bit those of the group's first rank (adding zeros changes no number).
- Moments may differ, the first rank's count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from neuronx_distributed.parallel_layers import parallel_state
from torch import distributed as dist

from trainium_trainer.backends.nxd.layout.pieces import shared_rows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from trainium_trainer.backends.nxd.stores import Held


class Sharing:
    """The rows of this rank's master weights that other ranks of its tensor-parallel group hold as well."""

    def __init__(self, held: Iterable[Held], tensor: ProcessGroup) -> None:
        everywhere: list[Tensor] = []
        repeated: list[Tensor] = []
        for entry in held:
            for start, end, all_hold in shared_rows(entry.pieces, tensor.size()):
                (everywhere if all_hold else repeated).append(entry.master.detach()[start:end])
        self._groups = [(tensor, everywhere)]
        if repeated:
            self._groups.append((parallel_state.get_kv_shared_group(), repeated))

    @torch.no_grad()
    def agree(self) -> None:
        """Take over the first rank's values. Collective."""
        for group, rows in self._groups:
            if not rows or group.size() == 1:
                continue
            joined = torch.cat([part.flatten() for part in rows]) * float(dist.get_rank(group) == 0)
            dist.all_reduce(joined, group=group)
            for part, values in zip(rows, torch.split(joined, [part.numel() for part in rows]), strict=True):
                part.copy_(values.view(part.shape))
