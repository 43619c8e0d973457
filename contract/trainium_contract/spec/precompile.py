"""`spec.precompile`: compilation before the first start."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from trainium_contract.base import ContractModel, MessageModel


class PrecompileSizes(StrEnum):
    """Numbers of nodes to compile for."""

    START = "Start"
    """The size that the job starts at."""
    BACKGROUND = "Background"
    """The same, and every other useful size on idle spares at the lowest priority; sizes after the loss of 1, 2, 4, 8
    and so on nodes come first. Without spares (workers.spares) as Start."""
    ALL = "All"
    """Every useful size between workers.minReplicas and workers.maxReplicas, the initial one first."""


class PrecompileSpec(ContractModel):
    """Compilation of a job's graphs in its workers' pods, before the trainer runs; for Neuron devices."""

    enabled: bool = False
    """Compile, or copy another worker's result, before a worker joins. Results are stored below
    `trainer.neuron.sharedCacheDirectory`; omitted: the folder `compiled` on the checkpoints' volume, for all jobs
    that use it."""
    sizes: PrecompileSizes = PrecompileSizes.START
    """Numbers of nodes to compile for. Other sizes compile in their first step, and are avoided until that pays."""


class CompiledSize(MessageModel):
    """A size whose graphs are compiled."""

    nodes: Annotated[int, Field(ge=1, le=10_000)]
    """Nodes of the size."""
    seconds: Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]
    """Time to compile or fetch them."""
