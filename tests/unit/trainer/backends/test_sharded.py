"""Count the gathers of weights in the sharded layouts: once a step, or in every pass."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from trainium_contract.trainer.model import ModelConfig
from trainium_contract.trainer.parallelism import DataParallelMode, Precision
from trainium_trainer.backends.sharded_store import ShardedStore, apply_sharding
from trainium_trainer.checkpoint.interfaces import MeshCoordinates
from trainium_trainer.configuration.model_shape import resolve_shape
from trainium_trainer.models.llama import Llama
from trainium_trainer.models.loss import compute_loss_sum

LAYERS = 2


class GatherCounter(TorchDispatchMode):
    """Count gathering collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operation._schema.name.startswith(("c10d::allgather", "c10d::_allgather"))
        return operation(*args, **(kwargs or {}))


@pytest.fixture
def fake_group_of_two() -> Iterator[None]:
    """Join, as rank 0 of 2, a group whose collectives have no effect."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("mode", "passes"),
    [
        # Each layer is gathered for its forward and its backward pass, all other weights once for both.
        pytest.param(DataParallelMode.FULLY_SHARDED, [2 * LAYERS + 1] * 3, id="fully"),
        pytest.param(DataParallelMode.SHARDED_OPTIMIZER, [LAYERS + 1, 0, 0], id="optimizer"),
    ],
)
def test_weights_are_gathered_once_a_step_where_only_the_optimizer_is_sharded(
    fake_group_of_two: None, mode: DataParallelMode, passes: list[int]
) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    shape = resolve_shape(ModelConfig(num_layers=LAYERS, hidden_size=32, intermediate_size=48), 64)
    with torch.device("meta"):
        model = Llama(shape)
    apply_sharding(model, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), Precision.FLOAT32, mode)
    keep_gathered = mode is DataParallelMode.SHARDED_OPTIMIZER
    coordinates = MeshCoordinates(rank=0, world_size=2, dp_rank=0, dp_size=2, tp_rank=0, tp_size=1, dp_mode=mode)
    store = ShardedStore(
        model,
        torch.device("cpu"),
        mesh=coordinates,
        moments=("expAvg", "expAvgSq"),
        keep_gathered=keep_gathered,
    )
    for parameter in store.iterate_parameters():
        parameter.local.zero_()
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    for step in range(2):
        gathers_of_passes = []
        for number in range(3):
            store.begin_backward(int(number == 2))
            with GatherCounter() as gathers:
                compute_loss_sum(model(tokens), tokens).backward()
            store.accumulate()
            gathers_of_passes.append(gathers.count)
            reduced = all(entry.parameter.grad is not None for entry in store._entries)
            assert reduced == (not keep_gathered or number == 2)
        assert gathers_of_passes == passes, step
        store.zero_grad()
