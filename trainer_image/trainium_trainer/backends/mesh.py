"""The process groups of a rank: pipeline x data x tensor, tensor fastest, so that a tensor group lies within a node.

Invariants: DeviceMesh, which is slow to import, is made only for configurations that need it; a dimension of size 1
has no group; a dimension that is the whole world uses the world's group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import distributed as dist

from trainium_trainer.backends.base import Mesh

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from trainium_trainer.config import Settings


def make_mesh(settings: Settings, device: torch.device) -> tuple[Mesh, DeviceMesh | None]:
    """This rank's place, and the DeviceMesh (dimensions pp, dp, tp) where the configuration needs one. Collective."""
    config, launch = settings.config, settings.launch
    sizes = {"pp": config.parallelism.pipeline, "dp": settings.dp_size, "tp": config.parallelism.tensor}
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
        found: ProcessGroup = device_mesh.get_group(name)
        return found

    place, tp_rank = divmod(launch.rank, sizes["tp"])
    pp_rank, dp_rank = divmod(place, sizes["dp"])
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
    )
    return mesh, device_mesh
