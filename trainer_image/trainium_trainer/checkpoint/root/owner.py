"""The owner of a checkpoint folder: one job, until a user names that job in `takeOver` of another.

`OWNER-<n>` below the root name the owners, in order; the newest counts.

Guarantees:
- An owner file is created and never replaced, so that only one of two jobs that start at the same time becomes the
  owner, on every store.
- A job whose folder was taken over never gets it back, so that two jobs cannot alternate.
- A process outside Kubernetes has no identity: it cannot own a folder and is refused if the folder has an owner.
"""

from __future__ import annotations

import errno
import re
import time
from dataclasses import dataclass

from pydantic import ValidationError

from trainium_contract.wire.checkpoint_manifest import OWNER_PREFIX, Owner
from trainium_trainer.checkpoint.errors import UnusableCheckpointError
from trainium_trainer.storage.protocol import Storage, read_small

OWNER_NAME = re.compile(rf"^{OWNER_PREFIX}([1-9]\d{{0,5}})$")
_MAX_EARLIER_OWNERS = 256
"""The number of earlier owners in a record."""


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """The identity of the job of this process; without `uid` the process runs outside Kubernetes."""

    cluster: str = ""
    """A unique name of the cluster; empty if unknown."""
    namespace: str = ""
    name: str = ""
    uid: str = ""


NOBODY = JobIdentity()


@dataclass(frozen=True, slots=True)
class RunStart:
    """The identity of one start of a run, recorded in its saves."""

    generation: int
    """The generation of the membership; a later one fences this one out."""
    job: JobIdentity = NOBODY
    run: str = ""
    """The run's name; without one the job's uid."""

    @property
    def name(self) -> str:
        """The name that distinguishes this run from others."""
        return self.run or self.job.uid


@dataclass(frozen=True, slots=True)
class OwnerRecord:
    """The newest record below a root; number 0 and no owner where there is none."""

    number: int = 0
    owner: Owner | None = None


def is_owner(owner: Owner | None, job: JobIdentity, take_over: str | None, location: str) -> bool:
    """Return whether the folder is already this job's; False when the job may acquire it. Pure.

    Raises UnusableCheckpointError when it may not. An object of the same namespace and name with another uid can only
    exist after the owner was deleted, so it continues where that one ended.
    """
    if owner is None:
        return not job.uid
    if not job.uid:
        raise UnusableCheckpointError(
            f"{location} belongs to the job {owner.label}: choose another checkpoint.path; when that job is over, copy "
            f"the folder, or remove its files {OWNER_PREFIX}*"
        )
    if owner.uid == job.uid:
        return True
    if job.uid in owner.before:
        raise UnusableCheckpointError(
            f"{location} was taken over by the job {owner.label} while this one still ran: nothing is lost, "
            f"{owner.label} continues from the newest checkpoint; to have it back recreate this job with "
            f"{_format_request(owner)}"
        )
    is_same_job = (owner.cluster, owner.namespace, owner.name) == (job.cluster, job.namespace, job.name)
    if is_same_job or take_over == owner.label:
        return False
    origin = " of another cluster" if owner.cluster != job.cluster else ""
    raise UnusableCheckpointError(
        f"{location} belongs to the job {owner.label}{origin}: two jobs in one folder would undo each other's "
        f"checkpoints: choose another checkpoint.storage.subPath, or, when {owner.label} is over and this job is to "
        f"continue from its checkpoints, set {_format_request(owner)}"
    )


def _format_request(owner: Owner) -> str:
    return f"checkpoint.storage.takeOver: {owner.label}"


class OwnerRecords:
    """One rank's access to the records; errors of the store are OSErrors, so every call can be retried."""

    def __init__(self, storage: Storage, job: JobIdentity, take_over: str | None = None) -> None:
        self._storage = storage
        self._job = job
        self._take_over = take_over

    def is_held(self) -> bool:
        """Return whether this job owns the folder. Raises UnusableCheckpointError when it may not acquire it either."""
        return self._is_owner(self._find_newest())

    def take_ownership(self) -> None:
        """Become the owner, if this job is not already. Raises UnusableCheckpointError when another job was faster."""
        newest = self._find_newest()
        if self._is_owner(newest):
            return
        before = () if newest.owner is None else (*newest.owner.before, newest.owner.uid)[-_MAX_EARLIER_OWNERS:]
        record = Owner(
            cluster=self._job.cluster,
            namespace=self._job.namespace,
            name=self._job.name,
            uid=self._job.uid,
            since=time.time(),
            before=before,
        )
        name = f"{OWNER_PREFIX}{newest.number + 1}"
        try:
            self._storage.create(name, record.model_dump_json(by_alias=True).encode())
        except FileExistsError:
            # Another job was faster, or the response of the store was lost: the current record decides.
            if not self._is_owner(self._find_newest()):
                raise OSError(errno.EAGAIN, "the owner of the folder has just changed", name) from None

    def _is_owner(self, record: OwnerRecord) -> bool:
        return is_owner(record.owner, self._job, self._take_over, self._storage.location)

    def _find_newest(self) -> OwnerRecord:
        entries = (OWNER_NAME.match(entry.name) for entry in self._storage.list("") if not entry.is_folder)
        number = max((int(match.group(1)) for match in entries if match), default=0)
        if not number:
            return OwnerRecord()
        name = f"{OWNER_PREFIX}{number}"
        data = read_small(self._storage, name)
        try:
            return OwnerRecord(number, Owner.model_validate_json(data or b""))
        except ValidationError:
            raise UnusableCheckpointError(
                f"{self._storage.location}/{name}, which names the owner of the folder, cannot be read: remove it "
                "when no other job uses the folder"
            ) from None
