"""`spec.checkpoint`: where a job's checkpoints live, and their tiers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainium_contract.base import ContractModel
from trainium_contract.trainer.checkpoint import DurableTierConfig, JobLabel, MemoryTierConfig, Milestones

_SEGMENT = r"([^/.][^/]*|\.[^/.][^/]*|\.\.[^/]+)"
"""A part of a path that is neither `.` nor `..`; neither Go's expressions nor pydantic's can look ahead."""
_BELOW = rf"^{_SEGMENT}(/+{_SEGMENT})*/*$"
"""A relative path that leads nowhere else but down."""


class HostPathStorageSpec(ContractModel):
    """A folder on every node: one machine, or a shared mount such as FSx at the same path."""

    path: Annotated[str, Field(pattern=r"^/", max_length=1024)]
    """Absolute path. A kubelet creates a missing one for root: make it writable for the workers' user (1000)."""


class ClaimStorageSpec(ContractModel):
    """A PersistentVolumeClaim that all workers can mount read-write."""

    claim_name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the claim, in the job's namespace."""


class S3StorageSpec(ContractModel):
    """A prefix of an S3 bucket; the workers' service account (`workers.template`) must have a role that may use it."""

    path: Annotated[str, Field(pattern=r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^/]+)*$", max_length=1024)]
    """`s3://bucket` or `s3://bucket/prefix`; the job's checkpoints are in `subPath` below it."""


class StorageSpec(ContractModel):
    """Where durable checkpoints live; exactly one kind. Omitted: a folder in the pod, lost with it (for trials)."""

    @property
    def kept(self) -> bool:
        """Whether what is written there outlives the pod."""
        return any(kind is not None for kind in (self.host_path, self.persistent_volume_claim, self.s3))

    host_path: HostPathStorageSpec | None = None
    """A folder on every node."""
    persistent_volume_claim: ClaimStorageSpec | None = None
    """A claim, for instance FSx for Lustre."""
    s3: S3StorageSpec | None = None
    """A bucket."""
    sub_path: Annotated[str, Field(max_length=512, pattern=_BELOW)] | None = None
    """Folder below the volume's root, without `.` and `..`; omitted: the job's namespace and name."""
    take_over: JobLabel | None = None
    """`namespace/name` of the job that the folder belongs to and that is over: this job goes on with its checkpoints.
    A job that still runs ends then. Not needed for a job that is made again under its own name."""


class JobCheckpointSpec(ContractModel):
    """Checkpoint storage and tiers."""

    storage: StorageSpec = StorageSpec()
    """Where durable checkpoints live. Omitted: a folder in the pod, lost with it (for trials)."""
    memory: MemoryTierConfig = MemoryTierConfig()
    """Snapshots in the node's memory."""
    durable: DurableTierConfig = DurableTierConfig()
    """Sharded checkpoints on the storage."""
    milestones: Milestones = Milestones()
    """Checkpoints of the weights alone, kept for ever."""
