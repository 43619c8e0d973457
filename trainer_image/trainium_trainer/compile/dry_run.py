"""Run one rank of a world without its peers: forward, backward, update and validation, to compile their graphs.

Run as `python -m trainium_trainer.compile.dry_run`, a `DryRunRequest` as JSON on its standard input, in a separate
process for each distinct graph. Collectives have their shapes and groups but transfer nothing, so that one
process can represent a rank of 4,096.

Guarantees:
- No data are read, and only the compiler writes files: no checkpoints, metrics or progress.
- The computed values are meaningless and are discarded with the process.
"""

from __future__ import annotations

import itertools
import logging
import sys
from typing import TYPE_CHECKING, Any

from trainium_contract.base import MessageModel
from trainium_contract.trainer.config import TrainingConfig
from trainium_trainer import exits, neuron_environment
from trainium_trainer.configuration.config import Launch, Settings, resolve_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainium_trainer.data.loader import MicroBatch

_STEPS = 2
"""Two steps, because from the second step on the graphs are those of all later steps."""
_MICRO_BATCHES = 2
"""Two micro-batches, because the last one of a step is a separate graph and the others are equal."""


class DryRunRequest(MessageModel):
    """A rank whose steps are compiled."""

    config: dict[str, Any]
    """A `TrainingConfig`."""
    rank: int
    world_size: int
    local_world_size: int = 1


def list_ranks_to_compile(
    config: TrainingConfig, world_size: int, *, data_ranks: Sequence[int] = (0,), tensor_stride: int = 1
) -> tuple[int, ...]:
    """Return one rank for each distinct graph of a job of `world_size` ranks.

    Ranks are pipeline x data x context x tensor, tensor the fastest. Data-parallel ranks that are not in `data_ranks`
    have the graphs of one of them. `tensor_stride` is the distance between the ranks of a tensor-parallel group; such
    groups are interleaved.
    """
    degrees = config.parallelism
    stage_size = world_size // degrees.pipeline
    ranks: list[int] = []
    for stage, part, data, chunk in itertools.product(
        range(degrees.pipeline), range(degrees.tensor), data_ranks, range(degrees.context)
    ):
        group, offset = divmod(data * degrees.context + chunk, tensor_stride)
        ranks.append(stage * stage_size + (group * degrees.tensor + part) * tensor_stride + offset)
    return tuple(ranks)


def create_dry_run_launch(rank: int, world_size: int, local_world_size: int = 1) -> Launch:
    """Return a launch of a rank without peers on this node's first device."""
    return Launch(rank=rank, local_rank=0, world_size=world_size, local_world_size=local_world_size, is_dry_run=True)


def dry_run(settings: Settings) -> None:
    """Build the model and run steps; updates are applied even if a value happens not to be finite."""
    import torch  # noqa: PLC0415 - nobody else who imports this needs it
    from torch import distributed as dist  # noqa: PLC0415
    from torch.overrides import TorchFunctionMode  # noqa: PLC0415

    from trainium_trainer.backends.choose import create_backend, find_backend  # noqa: PLC0415

    class ZeroedBuffers(TorchFunctionMode):
        """Fill the buffers that peers would fill with zeros, because uninitialized memory may contain NaN."""

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            tensor = function(*args, **(kwargs or {}))
            if function in {torch.empty, torch.empty_strided}:
                with torch.no_grad():
                    tensor.zero_()
            return tensor

    backend = create_backend(find_backend(settings), settings)
    with ZeroedBuffers():
        backend.build()
        backend.initialize(settings.config.seed)
        batches = _create_batches(settings)
        for _ in range(_STEPS):
            for number, batch in enumerate(batches, start=1):
                backend.accumulate(batch, last=number == len(batches))
            backend.all_reduce_totals(stop=False, memory_ends=False, vote=0)
            backend.step(
                divisor=sum(batch.divisor for batch in batches),
                learning_rate=settings.config.optimizer.learning_rate,
                clip_norm=settings.config.optimizer.clip_norm,
            )
            backend.compute_parameter_norm()
        backend.evaluate(batches)
        if settings.config.tuning.objective is not None:
            backend.compute_reference_log_probs(batches)
    dist.destroy_process_group()


def _create_batches(settings: Settings) -> list[MicroBatch]:
    """Return micro-batches of arbitrary tokens; all of a step for a pipeline, whose schedule needs their number."""
    import torch  # noqa: PLC0415 - nobody else who imports this needs it

    from trainium_trainer.data.loader import MicroBatch, Pairs  # noqa: PLC0415

    config = settings.config
    rows = config.data.rows_per_sample
    shape = (config.batch.micro_size * rows, config.data.sequence_length)
    pairs = Pairs(config.batch.micro_size, torch.zeros(shape[0], dtype=torch.int64), torch.zeros(shape[0]))
    count = settings.passes
    if config.parallelism.pipeline == 1:
        count = min(count, _MICRO_BATCHES)
    generator = torch.Generator().manual_seed(0)
    return [
        MicroBatch(
            inputs=torch.randint(settings.shape.vocab_size, shape, generator=generator),
            labels=torch.randint(settings.shape.vocab_size, shape, generator=generator),
            valid_tokens=shape[0] * shape[1],
            sample_positions=torch.arange(shape[0]),
            positions=torch.arange(shape[1]).repeat(shape[0], 1) if config.data.masked else None,
            pairs=pairs if rows > 1 else None,
        )
        for _ in range(count)
    ]


def main() -> None:
    """Run the request from standard input."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s", force=True)
    try:
        request = DryRunRequest.model_validate_json(sys.stdin.read())
        config = TrainingConfig.model_validate(request.config)
        settings = resolve_settings(
            config, create_dry_run_launch(request.rank, request.world_size, request.local_world_size)
        )
        neuron_environment.apply(config)  # before a device library is imported
        dry_run(settings)
    except BaseException as error:  # noqa: BLE001 - this is where an error becomes a code
        exits.leave(exits.report(error))
    exits.leave(0)


if __name__ == "__main__":
    main()
