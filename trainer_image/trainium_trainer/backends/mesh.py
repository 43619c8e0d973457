"""The process groups of a rank: pipeline x data x context x tensor, tensor fastest, so that its groups are in a node.

The data-parallel group of parameters is data x context: ranks with parts of the same sequences also sum their
gradients.

Guarantees:
- DeviceMesh, which is slow to import, is created only for configurations that need it.
- A dimension of size 1 has no group.
- A dimension that is the whole world uses the world's group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from trainium_contract.trainer.parallelism import DataParallelMode
from trainium_trainer.backends.base import Mesh
from trainium_trainer.checkpoint.sharding import Grid
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from trainium_trainer.configuration.config import Settings
    from trainium_worker.pulse import Pulse


def refuse_another_mesh(settings: Settings, group: ProcessGroup | None = None) -> None:
    """Raise UserError on every rank if one has other degrees than rank 0. Collective.

    It runs before smaller groups exist, because groups that differ between ranks would deadlock. `group`: all ranks, on
    the host.
    """
    config, launch = settings.config, settings.launch
    if launch.is_dry_run or launch.world_size == 1:
        return
    mode = list(DataParallelMode).index(config.data_parallel)
    degrees = config.parallelism
    own_degrees = torch.tensor([degrees.tensor, degrees.pipeline, degrees.context, mode])
    first_degrees = own_degrees.clone()
    dist.broadcast(first_degrees, 0, group=group)
    # All ranks report the greatest rank that differs, with the degrees that this rank sends.
    greatest = torch.tensor([-1 if torch.equal(first_degrees, own_degrees) else launch.rank])
    dist.all_reduce(greatest, dist.ReduceOp.MAX, group=group)
    rank = int(greatest)
    if rank < 0:
        return
    other_degrees = own_degrees.clone()
    dist.broadcast(other_degrees, rank, group=group)
    raise UserError(
        f"rank {rank} has {_format_degrees(other_degrees)}, but rank 0 has {_format_degrees(first_degrees)}: start "
        "every rank with the same configuration"
    )


def _format_degrees(degrees: torch.Tensor) -> str:
    tensor, pipeline, context, mode = degrees.tolist()
    return (
        f"parallelism.tensor {tensor}, parallelism.pipeline {pipeline}, parallelism.context {context}, dataParallel "
        f"{list(DataParallelMode)[mode]}"
    )


def are_equal_on_all_ranks(values: Sequence[int], mesh: Mesh, pulse: Pulse) -> list[bool]:
    """Return for each of the 62-bit numbers whether all ranks passed the same. Collective."""
    pairs = torch.tensor([values, [-value for value in values]], dtype=torch.int64)
    with pulse.waiting_for_peers:
        dist.all_reduce(pairs, dist.ReduceOp.MAX, group=mesh.world)
    return [greatest == -smallest for greatest, smallest in zip(*pairs.tolist(), strict=True)]


def wait_for_all_ranks(mesh: Mesh, pulse: Pulse) -> None:
    """Wait for all ranks by an empty reduction, the cheapest barrier on gloo. Collective."""
    with pulse.waiting_for_peers:
        dist.all_reduce(torch.zeros(1), group=mesh.world)


def create_mesh(settings: Settings, device: torch.device) -> tuple[Mesh, DeviceMesh | None]:
    """Create this rank's mesh, and the DeviceMesh (pp, dp, tp) if the configuration needs one. Collective."""
    refuse_another_mesh(settings)
    config, launch = settings.config, settings.launch
    context = config.parallelism.context
    sizes = {"pp": config.parallelism.pipeline, "dp": settings.dp_size * context, "tp": config.parallelism.tensor}
    world = dist.group.WORLD
    assert world is not None
    device_mesh: DeviceMesh | None = None
    if sizes["tp"] > 1 or sizes["pp"] > 1 or config.data_parallel.is_sharded:
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - slow, see the module docstring

        device_mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def group(name: str) -> ProcessGroup | None:
        if sizes[name] == 1:
            return None
        if sizes[name] == launch.world_size:
            return world
        assert device_mesh is not None
        subgroup: ProcessGroup = device_mesh.get_group(name)
        return subgroup

    pp_rank, dp_rank, tp_rank = Grid(*sizes.values()).find_coordinates(launch.rank)
    mesh = Mesh(
        rank=launch.rank,
        world_size=launch.world_size,
        pp_rank=pp_rank,
        pp_size=sizes["pp"],
        dp_rank=dp_rank,
        dp_size=sizes["dp"],
        tp_rank=tp_rank,
        tp_size=sizes["tp"],
        dp_mode=config.data_parallel,
        device=device,
        world=world,
        pp=group("pp"),
        dp=group("dp"),
        tp=group("tp"),
        cp=_create_context_group(launch.world_size, context, sizes["tp"]) if context > 1 else None,
        cp_rank=dp_rank % context,
        cp_size=context,
    )
    return mesh, device_mesh


def _create_context_group(world_size: int, context: int, tensor: int) -> ProcessGroup:
    """Create this rank's context-parallel group, in which gathers do not wait for sums of gradients. Collective."""
    ranks = torch.arange(world_size).view(-1, context, tensor).transpose(1, 2).reshape(-1, context).tolist()
    subgroups: tuple[ProcessGroup, Any] = dist.new_subgroups_by_enumeration(ranks)  # type: ignore[no-untyped-call]
    return subgroups[0]
