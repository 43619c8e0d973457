"""The live training state of one rank of any number, without the other ranks: collectives move nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, debug
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.unit.checkpoint.checkpoint_builders import mesh_coordinates
from trainium_contract.models.shape import ModelShape
from trainium_contract.trainer.parallelism import DataParallelMode, Precision
from trainium_trainer.backends.replicated_store import ReplicatedStore
from trainium_trainer.backends.sharded_store import ShardedStore, apply_sharding
from trainium_trainer.checkpoint.sharding import Grid
from trainium_trainer.models.llama import Llama
from trainium_trainer.models.parallel_plan import apply_tensor_parallel


@contextmanager
def create_rank_state(
    shape: ModelShape, grid: Grid, rank: int, mode: DataParallelMode, *, device: str = "cpu"
) -> Iterator[dict[str, Any]]:
    """Create the state of one rank as the native backend does."""
    dist.init_process_group("fake", rank=rank, world_size=grid.size, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (grid.data, grid.tensor), mesh_dim_names=("dp", "tp"))
        with torch.device("meta"):
            model = Llama(shape)
        if grid.tensor > 1:
            apply_tensor_parallel(model, mesh["tp"], sequence_parallel=False)
        coordinates = mesh_coordinates(grid, rank, mode)
        if mode.is_sharded:
            apply_sharding(model, mesh["dp"], Precision.FLOAT32, mode)
            store: Any = ShardedStore(
                model,
                torch.device(device),
                mesh=coordinates,
                moments=("expAvg", "expAvgSq"),
            )
        else:
            store = ReplicatedStore(
                model,
                torch.device(device),
                mesh["dp"].get_group(),
                coordinates.tp_rank,
                moments=("expAvg", "expAvgSq"),
                half=False,
            )
        yield store.state_dict()
    finally:
        dist.destroy_process_group()
        # Equal meshes have equal cache keys, so the next rank would receive this rank's coordinates.
        _clear_mesh_caches()


def _clear_mesh_caches() -> None:
    if hasattr(debug, "_clear_sharding_prop_cache"):
        for name in dir(debug):
            if name.startswith("_clear") and name.endswith("sharding_prop_cache"):
                getattr(debug, name)()
    else:  # torch 2.9
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
