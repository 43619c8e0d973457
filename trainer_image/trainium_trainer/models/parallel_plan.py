"""How a Llama is divided over the tensor-parallel ranks, as a DTensor plan applied from outside.

Invariants: attention and feed-forward are split by columns then rows (one reduction each); embedding and output
projection are split by vocabulary; the loss is computed on the divided logits, which are never gathered. With sequence
parallelism the activations between the divided regions are split along the sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from trainium_trainer.models.llama import Llama


def apply_tensor_parallel(model: Llama, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Divide the model over the one-dimensional `mesh`; parameters become DTensors where they are divided."""
    between = Shard(1) if sequence else Replicate()
    outer: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    inner: dict[str, ParallelStyle] = {
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=between),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=between),
    }
    if sequence:
        outer["model.norm"] = SequenceParallel(use_local_output=True)
        inner |= {
            "input_layernorm": SequenceParallel(use_local_output=True),
            "post_attention_layernorm": SequenceParallel(use_local_output=True),
            "self_attn": PrepareModuleInput(
                input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None), use_local_output=True
            ),
            "mlp": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
            ),
        }
    parallelize_module(model, mesh, outer)
    for layer in model.model.layers:
        parallelize_module(layer, mesh, inner)
    model.tie()
