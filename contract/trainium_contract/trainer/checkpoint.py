"""Trainer configuration of checkpoints: their place, frequency and number.

`TrainingConfig.checkpoint` is a `CheckpointConfig`; a TrainingJob has the two tiers and its storage, from which the
operator creates one.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainium_contract.base import ContractModel, MatchesPattern

PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1)]
Path = Annotated[str, Field(min_length=1, max_length=1024)]
JobLabel = Annotated[
    str,
    Field(max_length=317),
    MatchesPattern(
        r"[a-z0-9][a-z0-9-]*/[a-z0-9][a-z0-9.-]*", "write namespace/name of a job, for instance team-a/llama"
    ),
]
"""`namespace/name` of a job."""


class MemoryTierConfig(ContractModel):
    """Snapshots in the node's memory; they survive a training process."""

    every_steps: Annotated[int, Field(ge=0, le=100_000)] = 1
    """Optimizer steps between snapshots; 0 disables the tier. This is the most that is lost with a process, and with a
    node if its shards have copies."""
    buddies: Annotated[int, Field(ge=0, le=1)] = 1
    """Copies, on another node, of a shard that a single node holds (fully sharded state, or a model wider than a node);
    they need two thirds more memory on the nodes, and a step waits if copying takes longer than a step."""


class DurableTierConfig(ContractModel):
    """Sharded checkpoints on storage; they survive everything."""

    every_seconds: Annotated[int, Field(ge=1, le=86_400)] | None = 300
    """Longest time between two saves."""
    every_steps: PositiveInt | None = None
    """Maximum number of optimizer steps between two saves."""
    keep_last: Annotated[int, Field(ge=1, le=1000)] = 3
    """Committed checkpoints that are kept; the last good one is never deleted."""
    failure_tolerance: Annotated[int, Field(ge=0, le=1000)] = 3
    """Consecutive saves that may fail, with warnings, while training continues; one more ends the run with code 81."""
    save_timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 1800
    """Longest time of one save, for instance on a store that hangs; beyond it the run ends with code 81."""


class Milestones(ContractModel):
    """Checkpoints of the weights alone, kept forever."""

    every_tokens: Annotated[int, Field(ge=1, le=10**15)] | None = None
    """Valid tokens between two milestones; omitted: none are made."""


class CheckpointConfig(ContractModel):
    """Where and how often the training state is saved."""

    path: Path = "checkpoints"
    """Root of durable checkpoints: a folder (local, FSx, NFS) or `s3://bucket/prefix`. Credentials for a bucket come
    from the environment only: variables, IRSA, the instance's role."""
    records_path: Path | None = None
    """Folder of metrics, samples and TensorBoard files; omitted: `path`. In an object store they are on the node, and
    metrics.jsonl is copied there at each commit. Where it is not `path`, metrics.jsonl is copied beside the
    checkpoints too."""
    take_over: JobLabel | None = None
    """Namespace and name of the job whose folder this is, to continue; see `checkpoint.storage.takeOver` of a job."""
    memory: MemoryTierConfig = MemoryTierConfig()
    durable: DurableTierConfig = DurableTierConfig()
    milestones: Milestones = Milestones()

    @property
    def records(self) -> str:
        """Return the folder of the run's records, or their address."""
        return self.records_path or self.path
