"""Elect a leader on a coordination.k8s.io/v1 Lease: at most one operator acts at any time.

Guarantees:
- Another holder's lease expires by this process's monotonic clock, from the last observed renewal. Clocks of two
  machines are never compared.
- Every write carries the resourceVersion that was read.
- A holder that could not renew for `renew_deadline` seconds stops acting, before others may take over (`duration`).
  That also holds for a process that was frozen: each write calls `may_act`, not only the renewing task.
- A holder with the same identity is an earlier process of this container, which has ended, so the Lease is taken over
  at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from trainium_contract.api_server.errors import AlreadyExistsError, ApiError, ConflictError, NotFoundError
from trainium_contract.rfc3339 import format_micro_time
from trainium_operator.cluster.api.resources import LEASES
from trainium_operator.cluster.cache.parts import as_integer, as_mapping, as_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.api_server.responses import Json
    from trainium_operator.cluster.api.client import Api

logger = logging.getLogger(__name__)

_MAX_TRANSITIONS = 2**31 - 1


class LeaseLostError(Exception):
    """This process may no longer act and must end."""


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Times in seconds; `renew_deadline` must be well below `duration`, and `retry` below that.

    The settings check both.
    """

    duration: float = 4.0
    renew_deadline: float = 3.0
    retry: float = 1.0
    """Interval of renewals."""
    renew_timeout: float = 1.0
    """Time-out of one renewal, so that a hanging one leaves time for others."""
    acquire_timeout: float = 3.0
    """Time-out of one attempt to acquire."""
    release_timeout: float = 2.0
    """Time-out of the one attempt to release."""
    retry_pause: float = 0.5
    """Pause after a failed attempt."""
    poll: float = 0.5
    """Interval of reads by a replica that does not lead."""
    fast_poll: float = 0.2
    """The same after `read_soon`: a released Lease is acquired within this time."""

    @classmethod
    def of(cls, *, duration: float, renew_deadline: float, retry: float) -> LeaseTimes:
        """Return times with these three, and a time-out that lets three hanging renewals fit into the deadline."""
        return cls(
            duration=duration,
            renew_deadline=renew_deadline,
            retry=retry,
            renew_timeout=min(renew_deadline / 3, 10.0),
            acquire_timeout=min(renew_deadline, 10.0),
            retry_pause=min(0.5, retry),
        )


@dataclass(eq=False)
class LeaseElector:
    """Elects the leader.

    Call `await acquire()`, run `hold()` beside the work, and `await release()` when the work has stopped.
    """

    api: Api
    namespace: str
    name: str
    identity: str
    _: KW_ONLY
    wall_clock: Callable[[], float]
    times: LeaseTimes = field(default_factory=LeaseTimes)
    jitter: Callable[[], float] = random.random
    owners: Callable[[], list[Json]] = list
    """`ownerReferences` of a Lease that is created."""
    leading: bool = field(default=False, init=False)
    _lease: Json = field(default_factory=dict, init=False)
    _seen: tuple[str, str, int] = field(default=("", "", -1), init=False)
    _seen_at: float = field(default=0.0, init=False)
    _renewed_at: float = field(default=0.0, init=False)
    _nudged: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def acquire(self) -> None:
        """Return once this process holds the Lease, however long that takes."""
        waiting_for = ""
        while True:
            try:
                if await self._try_acquire():
                    logger.info("leading as %s", self.identity)
                    return
            except (ApiError, TimeoutError) as error:
                logger.warning("lease %s/%s: %s", self.namespace, self.name, str(error) or "timed out")
            holder = self._build_spec().get("holderIdentity", "")
            if holder != waiting_for:
                waiting_for = holder
                logger.info("standing by: %s leads", holder or "nobody")
            await asyncio.sleep(self.times.fast_poll)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.times.poll * (0.75 + 0.5 * self.jitter()) - self.times.fast_poll):
                    await self._nudged.wait()
            self._nudged.clear()

    def read_soon(self) -> None:
        """Read the Lease soon, because the holder seems to have ended."""
        self._nudged.set()

    def may_act(self) -> bool:
        """Return whether this process certainly holds the Lease now."""
        return self.leading and asyncio.get_running_loop().time() < self._renewed_at + self.times.renew_deadline

    def is_pending(self) -> bool:
        """Return whether this process leads or may lead soon: the holder has released, or has missed a renewal."""
        if self.leading or not self._build_spec().get("holderIdentity"):
            return True
        return asyncio.get_running_loop().time() - self._seen_at > 2 * self.times.retry

    async def hold(self) -> None:
        """Renew until cancelled. Raises LeaseLostError."""
        loop = asyncio.get_running_loop()
        pause = self.times.retry
        while True:
            await asyncio.sleep(pause)
            pause = self.times.retry_pause
            remaining = self._renewed_at + self.times.renew_deadline - loop.time()
            if remaining <= 0:
                self._lose(f"could not renew the lease for {self.times.renew_deadline:g} s")
            try:
                async with asyncio.timeout(min(remaining, self.times.renew_timeout)):
                    await self._renew()
                pause = self.times.retry
            except LeaseLostError:
                raise
            except (ApiError, TimeoutError) as error:
                logger.warning("renewing lease %s/%s: %s", self.namespace, self.name, str(error) or "timed out")

    async def release(self) -> None:
        """Release the Lease, so that another operator takes over at once; never raises."""
        if not self.leading:
            return
        self.leading = False
        try:
            async with asyncio.timeout(self.times.release_timeout):
                await self._write(holder="", duration=1)
        except (ApiError, TimeoutError) as error:
            logger.warning("the lease was not released, it will run out by itself: %s", str(error) or "timed out")
        else:
            logger.info("released the lease")

    async def _try_acquire(self) -> bool:
        loop = asyncio.get_running_loop()
        started = loop.time()
        async with asyncio.timeout(self.times.acquire_timeout):
            try:
                self._lease = await self.api.get(LEASES, self.namespace, self.name, attempts=1)
            except NotFoundError:
                try:
                    await self._create()
                except AlreadyExistsError:
                    return False
                return self._record_gain(started)
            if not self._is_free(loop.time()):
                return False
            try:
                await self._write(holder=self.identity, duration=self.times.duration)
            except ConflictError:
                return False
            return self._record_gain(started)

    def _record_gain(self, started: float) -> bool:
        self.leading = True
        self._renewed_at = started
        return True

    def _is_free(self, now: float) -> bool:
        spec = self._build_spec()
        holder = as_text(spec.get("holderIdentity"))
        seen = (holder, as_text(spec.get("renewTime")), as_integer(spec.get("leaseTransitions")) or 0)
        if seen != self._seen:
            self._seen, self._seen_at = seen, now
        if holder in ("", self.identity):
            return True
        reported = as_integer(spec.get("leaseDurationSeconds"))
        return now - self._seen_at > (self.times.duration if reported is None else reported)

    async def _renew(self) -> None:
        started = asyncio.get_running_loop().time()
        try:
            await self._write(holder=self.identity, duration=self.times.duration)
        except (ConflictError, NotFoundError):
            # Another process wrote it, perhaps only a label, or the response to our write was lost: read the holder.
            try:
                self._lease = await self.api.get(LEASES, self.namespace, self.name, attempts=1)
            except NotFoundError:
                await self._create()
            holder = self._build_spec().get("holderIdentity")
            if holder != self.identity:
                self._lose(f"{holder or 'nobody'} holds the lease now")
            await self._write(holder=self.identity, duration=self.times.duration)
        self._renewed_at = started

    async def _create(self) -> None:
        owners = self.owners()
        body = self._build_body({"ownerReferences": owners} if owners else {})
        self._lease = await self.api.create(LEASES, self.namespace, body, attempts=1)

    def _lose(self, why: str) -> None:
        self.leading = False
        raise LeaseLostError(why)

    async def _write(self, *, holder: str, duration: float) -> None:
        body = self._build_body(self._lease.get("metadata", {}))
        body["spec"]["holderIdentity"] = holder
        body["spec"]["leaseDurationSeconds"] = max(1, round(duration))
        self._lease = await self.api.replace(LEASES, self.namespace, self.name, body, attempts=1)

    def _build_body(self, metadata: Json) -> Json:
        old = self._build_spec()
        now = format_micro_time(self.wall_clock())
        ours = old.get("holderIdentity") == self.identity
        transitions = (as_integer(old.get("leaseTransitions")) or 0) + (0 if ours or not old else 1)
        spec = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": max(1, round(self.times.duration)),
            "acquireTime": (as_text(old.get("acquireTime")) or now) if ours else now,
            "renewTime": now,
            # The API server would refuse a larger number, and nobody could ever lead again.
            "leaseTransitions": max(0, min(transitions, _MAX_TRANSITIONS)),
        }
        return {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": {**metadata, "name": self.name, "namespace": self.namespace},
            "spec": spec,
        }

    def _build_spec(self) -> Json:
        return as_mapping(self._lease.get("spec"))
