"""`spec.checkpoint`: where a job's checkpoints live, and their tiers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainium_contract.base import ContractModel, MatchesPattern
from trainium_contract.trainer.addresses import OBJECT_STORES
from trainium_contract.trainer.checkpoint import DurableTierConfig, JobLabel, MemoryTierConfig, Milestones

_ANY, _NO_DOT = r"[^/\s\x00-\x1f\x7f]", r"[^/.\s\x00-\x1f\x7f]"
_SEGMENT = rf"({_NO_DOT}{_ANY}*|\.{_NO_DOT}{_ANY}*|\.\.{_ANY}+)"
"""A part of a path that is neither `.` nor `..`: RE2 cannot look ahead."""
SubPath = Annotated[
    str,
    Field(max_length=512),
    MatchesPattern(
        rf"{_SEGMENT}(/+{_SEGMENT})*/*",
        "write names of folders separated by /, for instance runs/llama: no / at the start, no . or .. as a name, and "
        "no blanks",
    ),
]
"""A relative path that never leads upwards."""


class HostPathStorageSpec(ContractModel):
    """A folder on every node: one machine, or a shared mount such as FSx at the same path."""

    path: Annotated[
        str,
        Field(max_length=1024),
        MatchesPattern(r"/[^\x00]*", "write an absolute path, for instance /shared/checkpoints"),
    ]
    """Absolute path. A kubelet creates a missing one for root: make it writable for the workers' user (1000)."""


class ClaimStorageSpec(ContractModel):
    """A PersistentVolumeClaim that all workers can mount read-write."""

    claim_name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the claim, in the job's namespace."""


class StorageSpec(ContractModel):
    """Where durable checkpoints live; exactly one kind. Omitted: a folder in the pod, lost with it (for trials)."""

    @property
    def is_persistent(self) -> bool:
        """Return whether the storage outlives the pod."""
        return any(kind is not None for kind in (self.host_path, self.persistent_volume_claim, self.uri))

    @property
    def is_mounted(self) -> bool:
        """Return whether a volume that outlives the pod is mounted."""
        return self.is_persistent and self.uri is None

    host_path: HostPathStorageSpec | None = None
    """A folder on every node."""
    persistent_volume_claim: ClaimStorageSpec | None = None
    """A claim, for instance FSx for Lustre."""
    uri: (
        Annotated[
            str,
            Field(max_length=1024),
            MatchesPattern(
                rf"({'|'.join(OBJECT_STORES)})://[a-z0-9][a-z0-9._-]{{1,61}}[a-z0-9](/[^/]+)*",
                "write s3://bucket or s3://bucket/prefix: a bucket has 3 to 63 lowercase letters, digits, dots and "
                "hyphens, a prefix no / at its end",
            ),
        ]
        | None
    ) = None
    """A bucket, or a prefix of one, for instance `s3://bucket/prefix`; the job's checkpoints are in `subPath` below it.
    The workers' service account (`workers.template`) must have a role that may use it."""
    sub_path: SubPath | None = None
    """Folder below the volume's root, without `.`, `..` and spaces; omitted: the job's namespace and name."""
    take_over: JobLabel | None = None
    """`namespace/name` of the ended job whose folder this is: this job continues with its checkpoints. If that job
    still runs, it is stopped. Not needed for a job that is created again under its own name."""


class JobCheckpointSpec(ContractModel):
    """Checkpoint storage and tiers."""

    storage: StorageSpec = StorageSpec()
    """Where durable checkpoints live. Omitted: a folder in the pod, lost with it (for trials)."""
    memory: MemoryTierConfig = MemoryTierConfig()
    """Snapshots in the node's memory."""
    durable: DurableTierConfig = DurableTierConfig()
    """Sharded checkpoints on the storage."""
    milestones: Milestones = Milestones()
    """Checkpoints of the weights alone, kept forever."""
