"""Check a configuration against the limits of backend Nxd.

Guarantees:
- It imports no library and uses no device, so `trainium-trainer check` refuses the same configurations as a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.trainer.optimizer import OptimizerKind
from trainium_contract.trainer.parallelism import BackendChoice, DataParallelMode, DeviceChoice, TorchCompile
from trainium_contract.trainer.tuning import TuningMethod
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from trainium_contract.models.shape import ModelShape
    from trainium_contract.trainer.config import TrainingConfig

SCATTERED = 4
"""The tensor-parallel degree at which NxD on trn1 spreads the ranks of a group over a node."""


FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""The families whose attention NxD's layers can compute."""


def check_model(shape: ModelShape) -> None:
    """Raise UserError for a model that NxD's layers do not compute."""
    if shape.family not in FAMILIES:
        families = ", ".join(FAMILIES)
        raise UserError(
            f"backend Nxd has no models of the family {shape.family}, only {families}: set backend to Native"
        )
    for field, has in (("attention_bias of the output projection", shape.output_bias), ("mlp_bias", shape.mlp_bias)):
        if has:
            raise UserError(f"the model has {field}, which backend Nxd has not: set backend to Native")


def check_limits(config: TrainingConfig, dp_size: int) -> None:
    """Raise UserError for settings that Nxd does not support with `dp_size` data-parallel ranks."""
    if config.parallelism.pipeline > 1:
        raise UserError(
            f"parallelism.pipeline is {config.parallelism.pipeline}, but backend Nxd has no pipeline: use 1 and raise "
            "parallelism.tensor, or set backend to Native"
        )
    if config.parallelism.context > 1:
        raise UserError(
            f"parallelism.context is {config.parallelism.context}, but backend Nxd does not divide sequences: use 1 "
            "and raise parallelism.tensor, or set backend to Native"
        )
    if config.optimizer.kind is not OptimizerKind.ADAMW:
        raise UserError(
            f"optimizer.kind is {config.optimizer.kind}, but backend Nxd has AdamW only: use AdamW, or set backend to "
            "Native"
        )
    if config.tuning.objective is not None:
        raise UserError(
            f"tuning.objective is {config.tuning.objective.kind}, but backend Nxd has no loss on pairs: set backend to "
            "Native"
        )
    lora = config.tuning.lora
    if config.tuning.method is TuningMethod.LORA and (lora.dora or lora.rank_pattern):
        name = "dora" if lora.dora else "rankPattern"
        raise UserError(
            f"tuning.lora.{name} is given, but backend Nxd has plain adapters of one rank only: leave it out, or "
            "set backend to Native"
        )
    if config.torch_compile is not TorchCompile.NONE:
        raise UserError(
            f"torchCompile is {config.torch_compile}, but backend Nxd compiles whole steps by itself: leave "
            "torchCompile out, or set backend to Native"
        )
    if config.device in (DeviceChoice.CPU, DeviceChoice.CUDA) and config.backend is BackendChoice.NXD:
        raise UserError(
            f"device is {config.device}, but backend Nxd computes on NeuronCores only: leave device out, or set "
            "backend to Native"
        )
    if config.precision.has_bfloat16_state and config.data_parallel is DataParallelMode.REPLICATED and dp_size > 1:
        raise UserError(
            "precision is BFloat16Stochastic and dataParallel is Replicated: on backend Nxd the replicas' NeuronCores "
            "would round differently and drift apart; set dataParallel to ShardedOptimizer"
        )


def check_node_size(config: TrainingConfig, processes: int) -> None:
    """Raise UserError if a node's number of processes does not fit NxD's groups of ranks."""
    if config.parallelism.tensor == SCATTERED and processes % SCATTERED:
        raise UserError(
            f"parallelism.tensor is {SCATTERED} and a node has {processes} processes: backend Nxd divides a node into "
            f"groups of {SCATTERED}; start a multiple of {SCATTERED} per node (workers.accelerator.coresPerNode)"
        )
