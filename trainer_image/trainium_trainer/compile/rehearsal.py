"""Run one rank of a world without its peers: forward, backward, update and validation, to compile their graphs.

Run as `python -m trainium_trainer.compile.rehearsal`, a `Request` as JSON on its standard input, in a separate process
for each place in the model. Every collective has its shape and its group, and moves nothing; so one process represents
a rank of 4,096.

Guarantees:
- No data is read, and nothing is written but by the compiler: neither checkpoints nor metrics nor progress.
- The values are without meaning and end with the process.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.base import MessageModel
from trainium_contract.trainer.config import TrainingConfig
from trainium_trainer import exits, neuron_environment
from trainium_trainer.compile.graphs import micro_batches
from trainium_trainer.configuration.config import Launch, Settings, resolve_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainium_trainer.data.batches.loader import MicroBatch

_STEPS = 2
"""The second one meets the state as every later one does."""
_MICRO_BATCHES = 2
"""The last one of a step is a separate graph; those before it are equal."""


class Request(MessageModel):
    """A rank to rehearse."""

    config: dict[str, Any]
    """A `TrainingConfig`."""
    rank: int
    world_size: int
    local_world_size: int = 1


@dataclass(frozen=True, slots=True)
class Place:
    """Ranks with separate graphs: a place in the model, and the first data-parallel rank of a kind."""

    pipeline: int
    tensor: int
    data: int = 0
    context: int = 0


def places(config: TrainingConfig, data_ranks: Sequence[int] = (0,)) -> tuple[Place, ...]:
    """All places of a configuration; ranks beside those in `data_ranks` have the graphs of one of them."""
    degrees = config.parallelism
    stages, parts, chunks = range(degrees.pipeline), range(degrees.tensor), range(degrees.context)
    return tuple(
        Place(stage, part, data, chunk) for stage in stages for part in parts for data in data_ranks for chunk in chunks
    )


def rank_of(place: Place, settings_config: TrainingConfig, world_size: int, *, apart: int = 1) -> int:
    """Return the first rank at a place; pipeline x data x context x tensor, tensor the fastest.

    `apart` is how far the ranks of a tensor-parallel group are from each other.
    """
    degrees = settings_config.parallelism
    data = world_size // (degrees.tensor * degrees.pipeline)
    replica = place.data * degrees.context + place.context
    group, beside = divmod(replica, apart)  # groups of ranks that are apart lie in each other
    return place.pipeline * data * degrees.tensor + group * apart * degrees.tensor + place.tensor * apart + beside


def launch_at(rank: int, world_size: int, local_world_size: int = 1) -> Launch:
    """Return a launch of a rank that has no peers; it takes this node's first device."""
    return Launch(
        rank=rank,
        local_rank=0,
        world_size=world_size,
        local_world_size=local_world_size,
        generation=0,
        attempt=0,
        run_id="",
        progress_file=None,
        memory_directory=None,
        alone=True,
    )


def rehearse(settings: Settings) -> None:
    """Build the model and make steps with it; updates are made also where a value is by chance not finite."""
    import torch  # noqa: PLC0415 - nobody else who imports this needs it
    from torch.overrides import TorchFunctionMode  # noqa: PLC0415

    from trainium_trainer.backends.choose import find_backend, make_backend  # noqa: PLC0415

    class ZeroedBuffers(TorchFunctionMode):
        """Fill with zeros what a peer would have filled: leftover memory may be NaN."""

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = function(*args, **(kwargs or {}))
            if function in {torch.empty, torch.empty_strided}:
                with torch.no_grad():
                    made.zero_()
            return made

    backend = make_backend(find_backend(settings), settings)
    with ZeroedBuffers():
        backend.build()
        backend.initialize(settings.config.seed)
        batches = _batches(settings)
        for _ in range(_STEPS):
            for number, batch in enumerate(batches, start=1):
                backend.accumulate(batch, last=number == len(batches))
            backend.totals(stop=False, memory_ends=False, vote=0)
            backend.step(
                divisor=sum(batch.divisor for batch in batches),
                learning_rate=settings.config.optimizer.learning_rate,
                clip_norm=settings.config.optimizer.clip_norm,
            )
            backend.parameter_norm()
        backend.evaluate(batches)
        objective = settings.config.tuning.objective
        if objective is not None and objective.compares_with_reference:
            backend.reference_log_probs(batches)
    backend.close()


def _batches(settings: Settings) -> list[MicroBatch]:
    """Micro-batches of any tokens; all of the step for a pipeline, whose schedule counts them."""
    import torch  # noqa: PLC0415 - nobody else who imports this needs it

    from trainium_trainer.data.batches.loader import MicroBatch, Pairs  # noqa: PLC0415

    config = settings.config
    rows = config.data.rows_per_sample
    shape = (config.batch.micro_size * rows, config.data.sequence_length)
    pairs = Pairs(config.batch.micro_size, torch.zeros(shape[0], dtype=torch.int64), torch.zeros(shape[0]))
    count = micro_batches(settings)
    if config.parallelism.pipeline == 1:
        count = min(count, _MICRO_BATCHES)
    made = torch.Generator().manual_seed(0)
    return [
        MicroBatch(
            inputs=torch.randint(settings.shape.vocab_size, shape, generator=made),
            labels=torch.randint(settings.shape.vocab_size, shape, generator=made),
            valid_tokens=shape[0] * shape[1],
            places=torch.arange(shape[0]),
            positions=torch.arange(shape[1]).repeat(shape[0], 1) if config.data.masked else None,
            pairs=pairs if rows > 1 else None,
        )
        for _ in range(count)
    ]


def main() -> None:
    """Rehearse the request on standard input."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s", force=True)
    try:
        request = Request.model_validate_json(sys.stdin.read())
        config = TrainingConfig.model_validate(request.config)
        settings = resolve_settings(config, launch_at(request.rank, request.world_size, request.local_world_size))
        neuron_environment.apply(config)  # before a device library is imported
        rehearse(settings)
    except BaseException as error:  # noqa: BLE001 - this is where an error becomes a code
        exits.leave(exits.report(error))
    exits.leave(0)


if __name__ == "__main__":
    main()
