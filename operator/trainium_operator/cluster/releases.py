"""Divide the namespaces among the releases of the operator in a cluster: the first that registered serves.

Two releases that serve the same jobs would delete each other's pods without end. Each registers the namespaces that it
serves in one Lease in kube-system, where no tenant writes. The Lease's annotation lists the releases in the order of
their registration.

Guarantees:
- Each write carries the resourceVersion that was read, so all releases see the same order. Entries are appended and
  removed, never moved, so a release keeps what it serves as long as it renews its entry.
- Others remove an entry that they have not seen renewed for its duration, by their monotonic clocks. Its release stops
  writing before, after `renew_deadline`, and registers again behind the others.
- Of the releases that are to taint nodes only the first one does, because one would remove the taints of another.
- The entry belongs to the release and not to one process, so it outlives a rolling update.
- Without the right to write the Lease, or without kube-system, a release serves its namespaces and logs that it cannot
  notice others.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING

from trainium_contract.api_server.errors import (
    AlreadyExistsError,
    ApiError,
    ConflictError,
    NotFoundError,
    UnavailableError,
)
from trainium_contract.rfc3339 import format_micro_time
from trainium_contract.stored_json import read_json
from trainium_contract.wire.worker_env import GROUP
from trainium_operator.cluster.api.resources import LEASES
from trainium_operator.cluster.cache.parts import as_integer, as_mapping, as_mappings, as_name, as_text
from trainium_operator.cluster.lease import LeaseLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainium_operator.cluster.api.client import Api

logger = logging.getLogger(__name__)

NAMESPACE = "kube-system"
NAME = "trainium-operators"
ANNOTATION = f"{GROUP}/releases"
SECONDS = (1, 3600)
"""Shortest and longest duration of another release's entry that is believed."""
MAX_RELEASES = 1_000
REFUSED_RETRY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Registration:
    """One entry of the annotation."""

    release: str
    """`namespace/name of the Lease` of the release."""
    namespaces: tuple[str, ...]
    """The namespaces that it serves; empty for all."""
    renewed: str
    """Time of the last renewal; other releases see only that it changes."""
    seconds: int
    """Seconds after the last renewal in which the entry counts."""
    taints_nodes: bool = False
    """Whether it may taint nodes."""

    def serves(self, namespace: str) -> bool:
        """Return whether the namespace is one of those that it serves."""
        return not self.namespaces or namespace in self.namespaces


def decode_registrations(text: str) -> tuple[Registration, ...]:
    """Parse the annotation, without malformed entries and repeated releases; never raises."""
    try:
        entries = as_mappings(read_json(text.encode()))
    except ValueError:
        return ()
    found: dict[str, Registration] = {}
    for entry in entries[:MAX_RELEASES]:
        release, given = as_text(entry.get("release"))[:512], entry.get("namespaces")
        names = tuple(filter(None, map(as_name, given))) if isinstance(given, list) else ()
        if not release or not isinstance(given, list) or (given and not names):
            continue
        seconds = min(SECONDS[1], max(SECONDS[0], as_integer(entry.get("seconds")) or 0))
        renewed, taints = as_text(entry.get("renewed"))[:64], entry.get("taintsNodes") is True
        found.setdefault(release, Registration(release, names, renewed, seconds, taints))
    return tuple(found.values())


def encode_registrations(entries: Sequence[Registration]) -> str:
    """Return the annotation."""
    return json.dumps(
        [
            {
                "release": entry.release,
                "namespaces": list(entry.namespaces),
                "renewed": entry.renewed,
                "seconds": entry.seconds,
                "taintsNodes": entry.taints_nodes,
            }
            for entry in entries
        ]
    )


def find_server(entries: Sequence[Registration], release: str, namespace: str) -> str:
    """Return the release that registered for the namespace before this one; empty if this one serves it."""
    for entry in entries:
        if entry.release == release:
            return ""
        if entry.serves(namespace):
            return entry.release
    return ""


@dataclass(frozen=True, slots=True)
class RegistrationTimes:
    """Times in seconds; a release stops writing well before others may remove its entry."""

    duration: int = 60
    renew_deadline: float = 40.0
    renew: float = 10.0
    retry: float = 1.0
    renew_timeout: float = 5.0

    @classmethod
    def of(cls, lease_duration: int) -> RegistrationTimes:
        """Return times that outlast a takeover between two replicas, and a restart of the only one."""
        seconds = max(15, lease_duration)
        return cls(duration=4 * seconds, renew_deadline=8 * seconds / 3, renew=2 * seconds / 3)


@dataclass(eq=False)
class Releases:
    """The registration of this release, and those of the others. Call `run` while this process holds its Lease."""

    api: Api
    release: str
    namespaces: tuple[str, ...]
    """The namespaces that this release is to serve; empty for all."""
    _: KW_ONLY
    taints_nodes: bool = False
    """Whether this release is to taint nodes in quarantine."""
    wall_clock: Callable[[], float]
    plan_clock: Callable[[], float]
    times: RegistrationTimes = RegistrationTimes()
    on_change: Callable[[], None] = lambda: None
    """Called when this release may serve other namespaces than before."""
    known: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set once this release is registered, or knows that it cannot be."""
    _entries: tuple[Registration, ...] = field(default=(), init=False)
    _seen: dict[str, tuple[str, float]] = field(default_factory=dict, init=False)
    """By release: its last renewal that was seen, and when (loop time)."""
    _renewed_at: float | None = field(default=None, init=False)
    """When this release last renewed its entry; None while it has none."""
    _refusal: str = field(default="", init=False)
    """Why it cannot register."""
    _changed_at: float = field(default=0.0, init=False)

    def find_server(self, namespace: str) -> str:
        """Return the other release that serves a namespace; empty if this one does."""
        return find_server(self._entries, self.release, namespace)

    def may_taint(self) -> bool:
        """Return whether this release taints nodes: the first of those that are to do so."""
        first = next((entry.release for entry in self._entries if entry.taints_nodes), self.release)
        return self.taints_nodes and first == self.release

    @property
    def changed_at(self) -> float:
        """Return when this release last began to serve other namespaces (Unix seconds, the clock of plans)."""
        return self._changed_at

    def may_write(self) -> bool:
        """Return whether no other release can have removed the entry by now."""
        if self._refusal:
            return True
        now = asyncio.get_running_loop().time()
        return self._renewed_at is not None and now < self._renewed_at + self.times.renew_deadline

    async def run(self) -> None:
        """Register, and renew until cancelled. Raises LeaseLostError when the entry was removed."""
        while True:
            pause = self.times.renew
            try:
                async with asyncio.timeout(self.times.renew_timeout):
                    await self._renew()
            except (ConflictError, AlreadyExistsError):
                pause = 0.2 * self.times.retry  # another release wrote it
            except (UnavailableError, TimeoutError) as error:
                logger.warning("registering in lease %s/%s: %s", NAMESPACE, NAME, str(error) or "timed out")
                pause = self.times.retry
            except ApiError as error:
                self._record_refusal(str(error))
                pause = REFUSED_RETRY_SECONDS
            await asyncio.sleep(pause)

    async def _renew(self) -> None:
        started = asyncio.get_running_loop().time()
        try:
            lease = await self.api.get(LEASES, NAMESPACE, NAME, attempts=1)
        except NotFoundError:
            lease = {}
        metadata = as_mapping(lease.get("metadata"))
        annotations = as_mapping(metadata.get("annotations"))
        others = self._drop_expired(decode_registrations(as_text(annotations.get(ANNOTATION))), started)
        entries = self._renew_entry(others)
        annotations = {**annotations, ANNOTATION: encode_registrations(entries)}
        body = {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": {**metadata, "name": NAME, "namespace": NAMESPACE, "annotations": annotations},
            "spec": as_mapping(lease.get("spec")),
        }
        if lease:
            await self.api.replace(LEASES, NAMESPACE, NAME, body, attempts=1)
        else:
            await self.api.create(LEASES, NAMESPACE, body, attempts=1)
        self._renewed_at, self._refusal = started, ""
        self._record(entries)

    def _drop_expired(self, entries: tuple[Registration, ...], now: float) -> tuple[Registration, ...]:
        """Return the entries without those of others that were not renewed for their duration."""
        seen = {}
        for entry in entries:
            last = self._seen.get(entry.release)
            seen[entry.release] = (entry.renewed, now) if last is None or last[0] != entry.renewed else last
        self._seen = seen
        return tuple(
            entry for entry in entries if entry.release == self.release or now - seen[entry.release][1] <= entry.seconds
        )

    def _renew_entry(self, entries: tuple[Registration, ...]) -> tuple[Registration, ...]:
        """Return the entries with this release's, renewed; a new one, or one of other namespaces, is the last."""
        renewed = format_micro_time(self.wall_clock())
        own = Registration(self.release, self.namespaces, renewed, self.times.duration, self.taints_nodes)
        registered = next((entry for entry in entries if entry.release == self.release), None)
        if registered is None and self._renewed_at is not None and not self._refusal:
            raise LeaseLostError(f"the registration in lease {NAMESPACE}/{NAME} was removed")
        if registered is not None and registered.namespaces == own.namespaces:
            return tuple(own if entry is registered else entry for entry in entries)
        return (*(entry for entry in entries if entry is not registered), own)

    def _record(self, entries: tuple[Registration, ...]) -> None:
        before, self._entries = self._list_blockers(), entries
        blockers = self._list_blockers()
        if blockers != before or not self.known.is_set():
            self._changed_at = self.plan_clock()
            for entry in blockers:
                logger.warning(
                    "release %s serves %s and registered before this one, %s: this one leaves their jobs alone. "
                    "Uninstall one of the two, or set watchNamespaces so that each namespace is served by one",
                    entry.release,
                    f"the namespaces {', '.join(entry.namespaces)}" if entry.namespaces else "all namespaces",
                    self.release,
                )
            self.known.set()
            self.on_change()

    def _list_blockers(self) -> tuple[Registration, ...]:
        """Return the releases that keep this one from a namespace, without the times of their renewals."""
        served: list[Registration] = []
        for entry in self._entries:
            if entry.release == self.release:
                break
            if not (entry.namespaces and self.namespaces) or set(entry.namespaces) & set(self.namespaces):
                served.append(replace(entry, renewed=""))
        return tuple(served)

    def _record_refusal(self, refusal: str) -> None:
        if not self._refusal:
            logger.warning(
                "this operator cannot notice another release that serves the same namespaces, and serves its own "
                "without: %s",
                refusal,
            )
        self._refusal, self._renewed_at = refusal, None
        self._record(())
