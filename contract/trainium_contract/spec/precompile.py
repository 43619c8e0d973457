"""`spec.precompile`: compiling before the first start."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from trainium_contract.base import ContractModel, MessageModel


class PrecompileSizes(StrEnum):
    """For which numbers of nodes."""

    START = "Start"
    """The one that the job starts at."""
    BACKGROUND = "Background"
    """The same, and every other useful one on spares while they are idle, at the lowest priority, those first that
    the loss of 1, 2, 4, 8 and so on nodes would need; without spares (workers.spares) as Start."""
    ALL = "All"
    """Every useful one between workers.minReplicas and workers.maxReplicas, the one that it starts at first."""


class PrecompileSpec(ContractModel):
    """Compiling the graphs of a job in its workers' pods, before the trainer runs; for Neuron devices."""

    enabled: bool = False
    """Compile, or copy what another worker has compiled, before a worker joins. What is compiled is kept below
    `trainer.neuron.sharedCacheDirectory`; omitted: the folder `compiled` on the checkpoints' volume, for all jobs that
    use it."""
    sizes: PrecompileSizes = PrecompileSizes.START
    """For which numbers of nodes; other sizes compile in their first step, and are avoided until that pays."""


class CompiledSize(MessageModel):
    """The graphs of one size are there."""

    nodes: Annotated[int, Field(ge=1, le=10_000)]
    """Nodes of the size."""
    seconds: Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]
    """Time that it took to make or fetch them."""
