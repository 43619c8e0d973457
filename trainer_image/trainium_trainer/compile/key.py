"""What the graphs of one size of a job depend on, and the name under which their compiled form is kept.

Invariants: `key` is a pure function of its `Graphs`; what does not change a graph (data, steps, learning rate, where
checkpoints are) is not in it, so that a run with other data finds what an earlier one compiled.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.trainer.parallelism import BackendChoice
from trainium_contract.trainer.tuning import TuningConfig
from trainium_trainer.backends.nxd.extraction import data_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainium_trainer.configuration.config import Settings

_LENGTH = 32
_NOT_COMPILED = frozenset({"learning_rate"})  # reaches the update as data


@dataclass(frozen=True, slots=True, kw_only=True)
class Graphs:
    """Everything that the graphs of one size depend on."""

    image: str
    """The trainer's image, best with its digest; it stands for compiler and libraries."""
    flags: tuple[str, ...]
    """Options of the compiler, in order."""
    model: dict[str, Any]
    """Every number of the model's shape."""
    compute: dict[str, Any]
    """Number formats, recomputation, parallelism, sequence length, masks, micro-batch, optimizer."""
    world_size: int
    """Ranks of the job at this size: groups of ranks are part of a graph."""


def graphs_of(settings: Settings, *, image: str, flags: Sequence[str]) -> Graphs:
    """The graphs of a configuration at the size of its launch."""
    config = settings.config
    optimizer = {name: value for name, value in config.optimizer if name not in _NOT_COMPILED}
    compute = {
        "backend": config.backend,
        "device": config.device,
        "precision": config.precision,
        "recompute": config.recompute,
        "torchCompile": config.torch_compile,
        "dataParallel": config.data_parallel,
        "parallelism": config.parallelism.to_wire(),
        "sequenceLength": config.data.sequence_length,
        "maskDocuments": config.data.masked,
        "microSize": config.batch.micro_size,
        "optimizer": optimizer,
        # A pipeline's schedule knows how many there are; elsewhere each is the same graph.
        "microBatches": micro_batches(settings) if config.parallelism.pipeline > 1 else 0,
    }
    # Entries of versions that compiled one kind of data-parallel rank only are not complete.
    if config.backend is not BackendChoice.NATIVE and (kinds := data_ranks(settings)) != (0,):
        compute["dataRanks"] = kinds
    if config.tuning != TuningConfig():
        compute["tuning"] = config.tuning.to_wire()
    return Graphs(
        image=image,
        flags=tuple(flags),
        model=settings.shape.to_json(),
        compute=compute,
        world_size=settings.launch.world_size,
    )


def micro_batches(settings: Settings) -> int:
    """Micro-batches of one step on one data-parallel rank."""
    return settings.passes


def key(graphs: Graphs) -> str:
    """A name of 32 hexadecimal digits: equal exactly for equal graphs."""
    text = json.dumps(asdict(graphs), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]
