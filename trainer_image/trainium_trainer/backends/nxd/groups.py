"""The process groups of the nxd backend: NxD's for the device, gloo for the host.

NxD orders ranks as pipeline x data x tensor with tensor fastest, as the mesh here does, except in two cases that follow
the wiring: 4-fold tensor parallelism on trn1 uses every eighth core of a node, and half-node groups on trn2 combine
opposite rows.

Guarantees:
- So this rank's coordinates always come from NxD and are never computed from the rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.utils import cpu_mode
from neuronx_distributed.utils.utils import hardware
from torch import distributed as dist
from torch_neuronx.utils import get_platform_target

from trainium_trainer.backends.base import Mesh
from trainium_trainer.backends.device import init_default_group
from trainium_trainer.backends.mesh import refuse_another_mesh
from trainium_trainer.backends.nxd.layout.pieces import KeyValueOrder, TensorRank

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from trainium_trainer.configuration.config import Launch, Settings


@dataclass(frozen=True, slots=True)
class Groups:
    """The coordinates of this rank and its groups on the device and on the host."""

    mesh: Mesh
    tensor_rank: TensorRank
    host: ProcessGroup
    """All ranks, over gloo: for agreements about values on the host."""
    data: ProcessGroup
    tensor: ProcessGroup


def create_groups(settings: Settings, device: torch.device) -> Groups:
    """Create the process groups. Collective."""
    launch, tensor = settings.launch, settings.config.parallelism.tensor
    host = _init_default_group(settings.launch)
    refuse_another_mesh(settings, host)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor)
    data_group: ProcessGroup = parallel_state.get_data_parallel_group()
    tensor_group: ProcessGroup = parallel_state.get_tensor_model_parallel_group()
    tp_rank, dp_size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_data_parallel_size()
    mesh = Mesh(
        rank=launch.rank,
        world_size=launch.world_size,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=dp_size,
        tp_rank=tp_rank,
        tp_size=tensor,
        dp_mode=settings.config.data_parallel,
        device=device,
        world=host,
        dp=data_group if dp_size > 1 else None,
        tp=tensor_group if tensor > 1 else None,
    )
    adjacent = hardware(get_platform_target()) is hardware.TRN2
    order = KeyValueOrder.INTERLEAVED if adjacent else KeyValueOrder.REPEATED
    return Groups(mesh, TensorRank(settings.shape, tp_rank, tensor, order), host, data_group, tensor_group)


def _init_default_group(launch: Launch) -> ProcessGroup:
    """Create the default group, which NxD uses for the device, and return the host's."""
    if cpu_mode():
        init_default_group("gloo", launch)
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    import torch_xla.distributed.xla_backend  # noqa: F401, PLC0415 - registers the process-group backend "xla"

    if launch.is_dry_run:
        # The import registers the backend `fake`, whose collectives transfer nothing.
        from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

        dist.init_process_group("xla", store=FakeStore(), rank=launch.rank, world_size=launch.world_size)
    else:
        init_default_group("xla", launch)
    host: ProcessGroup = dist.new_group(backend="fake" if launch.is_dry_run else "gloo")
    return host
