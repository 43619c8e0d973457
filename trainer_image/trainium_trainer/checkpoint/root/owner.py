"""The owner of a checkpoint folder: one job, until a user names it in takeOver of another.

`OWNER-<n>` below the root name the owners, in order; the newest counts.

Guarantees:
- Such a file is created and never replaced, so that of two jobs that start in the same moment one is the owner, on
  every store.
- A job whose folder was taken over never gets it back, so that two jobs cannot take it from each other in turns.
- A process outside of Kubernetes, which has no identity, is no owner and is refused where there is one.
"""

from __future__ import annotations

import errno
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import ValidationError

from trainium_contract.wire.checkpoint_manifest import OWNER_PREFIX, Owner
from trainium_trainer.checkpoint.errors import UnusableCheckpointError
from trainium_trainer.storage.protocol import Storage, read_small

if TYPE_CHECKING:
    from collections.abc import Callable


OWNER_NAME = re.compile(rf"^{OWNER_PREFIX}([1-9]\d{{0,5}})$")
_REMEMBERED = 256
"""Earlier owners that a record names."""


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """Identity of the job that this process belongs to; without `uid` it runs outside of Kubernetes."""

    cluster: str = ""
    """Names the cluster among all clusters; empty where it is not known."""
    namespace: str = ""
    name: str = ""
    uid: str = ""


NOBODY = JobIdentity()


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a run: what its saves are signed with."""

    generation: int
    """Generation of the membership; a later one fences this one out."""
    job: JobIdentity = NOBODY
    run: str = ""
    """The run's own name; without one the job's uid."""

    @property
    def name(self) -> str:
        """The name that distinguishes this run from others."""
        return self.run or self.job.uid


@dataclass(frozen=True, slots=True)
class Holder:
    """The newest record below a root; number 0 and no owner where there is none."""

    number: int = 0
    owner: Owner | None = None


def is_owner(owner: Owner | None, me: JobIdentity, take_over: str | None, where: str) -> bool:
    """PURE. Whether the folder is this job's already; False when it may have it.

    Raises UnusableCheckpointError when it may not. An object of the same namespace and name with another uid can only
    exist after the owner was deleted, so it goes on where that one ended.
    """
    if owner is None:
        return not me.uid
    if not me.uid:
        raise UnusableCheckpointError(
            f"{where} belongs to the job {owner.label}: choose another checkpoint.path; when that job is over, copy "
            f"the folder, or remove its files {OWNER_PREFIX}*"
        )
    if owner.uid == me.uid:
        return True
    if me.uid in owner.before:
        raise UnusableCheckpointError(
            f"{where} was taken over by the job {owner.label} while this one still ran: nothing is lost, {owner.label} "
            f"goes on from the newest checkpoint; to have it back recreate this job with {_request(owner)}"
        )
    same = (owner.cluster, owner.namespace, owner.name) == (me.cluster, me.namespace, me.name)
    if same or take_over == owner.label:
        return False
    far = " of another cluster" if owner.cluster != me.cluster else ""
    raise UnusableCheckpointError(
        f"{where} belongs to the job {owner.label}{far}: two jobs in one folder would undo each other's checkpoints: "
        f"choose another checkpoint.storage.subPath, or, when {owner.label} is over and this job is to go on with its "
        f"checkpoints, set {_request(owner)}"
    )


def _request(owner: Owner) -> str:
    return f"checkpoint.storage.takeOver: {owner.label}"


class OwnerRecords:
    """One rank's access to the records; errors of the store are OSErrors, so every call may be tried again."""

    def __init__(
        self,
        storage: Storage,
        me: JobIdentity,
        take_over: str | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._storage = storage
        self._me = me
        self._take_over = take_over
        self._clock = clock

    def is_held(self) -> bool:
        """Return whether the folder is ours already; UnusableCheckpointError when it may not become ours either."""
        return self._is_owner(self._newest())

    def take_ownership(self) -> None:
        """Become the owner unless we are; UnusableCheckpointError when another job was faster."""
        found = self._newest()
        if self._is_owner(found):
            return
        before = () if found.owner is None else (*found.owner.before, found.owner.uid)[-_REMEMBERED:]
        record = Owner(
            cluster=self._me.cluster,
            namespace=self._me.namespace,
            name=self._me.name,
            uid=self._me.uid,
            since=self._clock(),
            before=before,
        )
        name = f"{OWNER_PREFIX}{found.number + 1}"
        try:
            self._storage.create(name, record.model_dump_json(by_alias=True).encode())
        except FileExistsError:
            # Another job was faster, or our own answer was lost on its way back: what is there now decides.
            if not self._is_owner(self._newest()):
                raise OSError(errno.EAGAIN, "the owner of the folder has just changed", name) from None

    def _is_owner(self, found: Holder) -> bool:
        return is_owner(found.owner, self._me, self._take_over, self._storage.location)

    def _newest(self) -> Holder:
        entries = (OWNER_NAME.match(entry.name) for entry in self._storage.list("") if not entry.is_folder)
        number = max((int(match.group(1)) for match in entries if match), default=0)
        if not number:
            return Holder()
        name = f"{OWNER_PREFIX}{number}"
        data = read_small(self._storage, name)
        try:
            return Holder(number, Owner.model_validate_json(data or b""))
        except ValidationError:
            raise UnusableCheckpointError(
                f"{self._storage.location}/{name}, which names the owner of the folder, cannot be read: remove it "
                "when no other job uses the folder"
            ) from None
