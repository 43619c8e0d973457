"""Build this rank's model, or its stage of a pipeline, divide it over the ranks, and allocate its training state.

Guarantees:
- DeviceMesh, DTensor and FSDP are imported only if the configuration uses them.
- The model has no values until the state is filled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trainium_contract.trainer.parallelism import DataParallelMode, Precision
from trainium_contract.trainer.tuning import TuningMethod
from trainium_trainer.backends.recompute import apply_recompute
from trainium_trainer.backends.replicated_store import ReplicatedStore
from trainium_trainer.backends.torch_compile import compile_layers
from trainium_trainer.models.llama import Llama
from trainium_trainer.models.stages import LlamaStage
from trainium_trainer.tuning.apply import apply_tuning

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from trainium_contract.trainer.config import TrainingConfig
    from trainium_trainer.backends.base import Mesh
    from trainium_trainer.backends.pipeline import Pipeline
    from trainium_trainer.backends.state_store import StateStore
    from trainium_trainer.configuration.config import Settings
    from trainium_trainer.data.loader import MicroBatch


def uses_autocast(config: TrainingConfig) -> bool:
    """Return whether autocast chooses the type of operations: if master weights are in float32."""
    return config.precision is Precision.BFLOAT16


def find_hidden_dtype(config: TrainingConfig) -> torch.dtype:
    """Return the type of the residual stream: autocast leaves it in float32."""
    narrow = config.precision is not Precision.FLOAT32 and not uses_autocast(config)
    return torch.bfloat16 if narrow else torch.float32


def create_model(settings: Settings, mesh: Mesh) -> Llama:
    """Create the model, or this rank's stage of a pipeline, with its adapters, on the meta device."""
    config = settings.config
    with torch.device("meta"):
        if mesh.pp is None:
            model = Llama(settings.shape)
        else:
            model = LlamaStage(
                settings.shape,
                stage=mesh.pp_rank,
                num_stages=mesh.pp_size,
                length=config.data.sequence_length,
                hidden_dtype=find_hidden_dtype(config),
            )
    if config.precision.has_bfloat16_state:
        model.to(torch.bfloat16)
    narrow = config.precision is not Precision.FLOAT32
    apply_tuning(model, settings.trainable, config.tuning.lora, frozen=torch.bfloat16 if narrow else None)
    return model


def divide_model(model: Llama, config: TrainingConfig, mesh: Mesh, device_mesh: DeviceMesh | None) -> None:
    """Divide the model by tensor and context parallelism, then set recompute and compilation of its layers."""
    if mesh.tp_size > 1:
        from trainium_trainer.models.parallel_plan import apply_tensor_parallel  # noqa: PLC0415 - imports DTensor

        assert device_mesh is not None
        apply_tensor_parallel(model, device_mesh["tp"], sequence_parallel=config.parallelism.sequence)
    if mesh.cp is not None:
        from trainium_trainer.models.context_parallel import (  # noqa: PLC0415 - functional collectives
            SequenceDivision,
            apply_context_parallel,
        )

        apply_context_parallel(
            model, SequenceDivision(mesh.cp, mesh.cp_rank, mesh.cp_size, config.data.sequence_length)
        )
    apply_recompute(model, config.recompute)
    compile_layers(model, config.torch_compile, mesh.device.type, adapters=config.tuning.method is TuningMethod.LORA)


def create_store(model: Llama, config: TrainingConfig, mesh: Mesh, device_mesh: DeviceMesh | None) -> StateStore:
    """Allocate weights, gradients and moments of the model in the configured data-parallel layout. Collective."""
    moments = config.optimizer.kind.moments
    if not mesh.dp_mode.is_sharded:
        half = config.precision.has_bfloat16_state
        return ReplicatedStore(model, mesh.device, mesh.dp, mesh.tp_rank, moments=moments, half=half)
    from trainium_trainer.backends.sharded_store import ShardedStore, apply_sharding  # noqa: PLC0415 - FSDP

    assert device_mesh is not None
    apply_sharding(model, device_mesh["dp"], config.precision, mesh.dp_mode)
    return ShardedStore(
        model,
        mesh.device,
        mesh=mesh,
        moments=moments,
        keep_gathered=mesh.dp_mode is DataParallelMode.SHARDED_OPTIMIZER,
    )


def create_pipeline(
    stage: LlamaStage,
    settings: Settings,
    mesh: Mesh,
    *,
    loss: Callable[[Tensor, Tensor], Tensor],
    keys: Callable[[MicroBatch], Tensor | None],
) -> Pipeline:
    """Create the schedule of this rank's stage; `loss` and `keys` are those of `Pipeline`."""
    from trainium_trainer.backends.pipeline import Pipeline, StageShapes  # noqa: PLC0415 - imports DTensor and more

    config, shape = settings.config, settings.shape
    length = config.data.sequence_length // mesh.cp_size
    shapes = StageShapes(
        samples=config.batch.micro_size * config.data.rows_per_sample,
        length=length,
        part=length // mesh.tp_size if config.parallelism.sequence else length,
        hidden=shape.hidden_size,
        vocabulary=shape.vocab_size // mesh.tp_size,
        hidden_dtype=find_hidden_dtype(config),
        logits=torch.float32 if config.precision is Precision.FLOAT32 else torch.bfloat16,
    )
    return Pipeline(stage, mesh, shapes, micro_batches=settings.passes, loss=loss, keys=keys)
