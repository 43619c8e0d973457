"""`spec.precompile`: compiling before the first start."""

from __future__ import annotations

from enum import StrEnum

from trainium_contract.base import ContractModel


class PrecompileSizes(StrEnum):
    """For which numbers of nodes."""

    START = "Start"
    """The one that the job starts at."""
    BACKGROUND = "Background"
    """The same, and every other useful one on spares while they are idle, at the lowest priority; without spares
    (workers.spares) as Start."""
    ALL = "All"
    """Every useful one between workers.minReplicas and workers.maxReplicas, the one that it starts at first."""


class PrecompileSpec(ContractModel):
    """Compiling the graphs of a job in its workers' pods, before the trainer runs; for Neuron devices."""

    enabled: bool = False
    """Compile, or copy what another worker has compiled, before a worker joins. What is compiled is kept below
    `trainer.neuron.sharedCacheDirectory`; omitted: the folder `compiled` on the checkpoints' volume, for all jobs that
    use it."""
    sizes: PrecompileSizes = PrecompileSizes.START
    """For which numbers of nodes; other sizes compile in their first step."""
