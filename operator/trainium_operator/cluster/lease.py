"""Leader election on a coordination.k8s.io/v1 Lease: at most one operator acts at any time.

Invariants: whether another holder's time is over is judged by our own monotonic clock, from when we saw its last
renewal, never by comparing clocks of two machines; every write carries the resourceVersion that was read; a holder that
could not renew for `renew_deadline` seconds stops acting, which is before others may take over (`duration`). That holds
too for a process that was frozen meanwhile: `may_act` is asked before each write, not only by the task that renews.
A holder with our own identity is an earlier process of this same container, which is certainly dead: we take over at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from trainium_operator.cluster.api.errors import AlreadyExistsError, ApiError, ConflictError, NotFoundError
from trainium_operator.cluster.api.resources import LEASES
from trainium_operator.cluster.cache.parts import mapping_of, text_of, whole_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_operator.cluster.api.client import Api, Json

logger = logging.getLogger(__name__)

_MOST_TRANSITIONS = 2**31 - 1


class LeaseLostError(Exception):
    """We may no longer act: the process must end."""


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Seconds; `renew_deadline` must be well below `duration`, `retry` below that; the settings check both."""

    duration: float = 15.0
    renew_deadline: float = 10.0
    retry: float = 2.0
    """Between two renewals."""
    attempt: float = 3.0
    """For one try to renew: one that hangs must leave time for others."""
    take: float = 10.0
    """For one try to acquire."""
    trim_heap: float = 2.0
    """For the one try to release it."""
    again: float = 0.5
    """Between a try that failed and the next."""
    poll: float = 1.0
    """Between two reads by a replica that does not lead."""
    nudged_poll: float = 0.2
    """The same after `nudge`: a released Lease is acquired within this time."""

    @classmethod
    def of(cls, *, duration: float, renew_deadline: float, retry: float) -> LeaseTimes:
        """Return times with these three, and attempts so that three that hang fit into the renewal deadline."""
        return cls(
            duration=duration,
            renew_deadline=renew_deadline,
            retry=retry,
            attempt=min(0.3 * renew_deadline, 10.0),
            take=min(renew_deadline, 10.0),
            again=min(0.5, retry),
        )


@dataclass(eq=False)
class LeaseElector:
    """`await acquire()`, then run `hold()` beside the work, then `await release()` when the work has stopped."""

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
        """Return once we hold the Lease, however long that takes."""
        waiting_for = ""
        while True:
            try:
                if await self._try_acquire():
                    logger.info("leading as %s", self.identity)
                    return
            except (ApiError, TimeoutError) as error:
                logger.warning("lease %s/%s: %s", self.namespace, self.name, str(error) or "timed out")
            holder = self._spec().get("holderIdentity", "")
            if holder != waiting_for:
                waiting_for = holder
                logger.info("standing by: %s leads", holder or "nobody")
            await asyncio.sleep(self.times.nudged_poll)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.times.poll * (0.75 + 0.5 * self.jitter()) - self.times.nudged_poll):
                    await self._nudged.wait()
            self._nudged.clear()

    def nudge(self) -> None:
        """Read the Lease soon: there is a sign that the holder has ended."""
        self._nudged.set()

    def may_act(self) -> bool:
        """Return whether the Lease is certainly ours at this moment."""
        return self.leading and asyncio.get_running_loop().time() < self._renewed_at + self.times.renew_deadline

    def is_pending(self) -> bool:
        """Return whether we lead or may lead soon: the holder has let go, or has missed a renewal."""
        if self.leading or not self._spec().get("holderIdentity"):
            return True
        return asyncio.get_running_loop().time() - self._seen_at > 2 * self.times.retry

    async def hold(self) -> None:
        """Renew until cancelled. Raises LeaseLostError."""
        loop = asyncio.get_running_loop()
        pause = self.times.retry
        while True:
            await asyncio.sleep(pause)
            pause = self.times.again
            left = self._renewed_at + self.times.renew_deadline - loop.time()
            if left <= 0:
                self._lose(f"could not renew the lease for {self.times.renew_deadline:g} s")
            try:
                async with asyncio.timeout(min(left, self.times.attempt)):
                    await self._renew()
                pause = self.times.retry
            except LeaseLostError:
                raise
            except (ApiError, TimeoutError) as error:
                logger.warning("renewing lease %s/%s: %s", self.namespace, self.name, str(error) or "timed out")

    async def release(self) -> None:
        """Let another operator take over at once; never raises."""
        if not self.leading:
            return
        self.leading = False
        try:
            async with asyncio.timeout(self.times.trim_heap):
                await self._write(holder="", duration=1)
        except (ApiError, TimeoutError) as error:
            logger.warning("the lease was not released, it will run out by itself: %s", str(error) or "timed out")
        else:
            logger.info("released the lease")

    async def _try_acquire(self) -> bool:
        loop = asyncio.get_running_loop()
        started = loop.time()
        async with asyncio.timeout(self.times.take):
            try:
                self._lease = await self.api.get(LEASES, self.namespace, self.name, attempts=1)
            except NotFoundError:
                try:
                    await self._create()
                except AlreadyExistsError:
                    return False
                return self._gained(started)
            if not self._is_free(loop.time()):
                return False
            try:
                await self._write(holder=self.identity, duration=self.times.duration)
            except ConflictError:
                return False
            return self._gained(started)

    def _gained(self, started: float) -> bool:
        self.leading = True
        self._renewed_at = started
        return True

    def _is_free(self, now: float) -> bool:
        spec = self._spec()
        holder = text_of(spec.get("holderIdentity"))
        seen = (holder, text_of(spec.get("renewTime")), whole_of(spec.get("leaseTransitions")) or 0)
        if seen != self._seen:
            self._seen, self._seen_at = seen, now
        if holder in ("", self.identity):
            return True
        reported = whole_of(spec.get("leaseDurationSeconds"))
        return now - self._seen_at > (self.times.duration if reported is None else reported)

    async def _renew(self) -> None:
        started = asyncio.get_running_loop().time()
        try:
            await self._write(holder=self.identity, duration=self.times.duration)
        except (ConflictError, NotFoundError):
            # Another process wrote it, perhaps only a label, or the answer to our write was lost: read who holds it.
            try:
                self._lease = await self.api.get(LEASES, self.namespace, self.name, attempts=1)
            except NotFoundError:
                await self._create()
            holder = self._spec().get("holderIdentity")
            if holder != self.identity:
                self._lose(f"{holder or 'nobody'} holds the lease now")
            await self._write(holder=self.identity, duration=self.times.duration)
        self._renewed_at = started

    async def _create(self) -> None:
        owners = self.owners()
        body = self._body({"ownerReferences": owners} if owners else {})
        self._lease = await self.api.create(LEASES, self.namespace, body, attempts=1)

    def _lose(self, why: str) -> None:
        self.leading = False
        raise LeaseLostError(why)

    async def _write(self, *, holder: str, duration: float) -> None:
        body = self._body(self._lease.get("metadata", {}))
        body["spec"]["holderIdentity"] = holder
        body["spec"]["leaseDurationSeconds"] = max(1, round(duration))
        self._lease = await self.api.replace(LEASES, self.namespace, self.name, body, attempts=1)

    def _body(self, metadata: Json) -> Json:
        old = self._spec()
        now = datetime.fromtimestamp(self.wall_clock(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        ours = old.get("holderIdentity") == self.identity
        transitions = (whole_of(old.get("leaseTransitions")) or 0) + (0 if ours or not old else 1)
        spec = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": max(1, round(self.times.duration)),
            "acquireTime": (text_of(old.get("acquireTime")) or now) if ours else now,
            "renewTime": now,
            # One more than the API takes would be refused, and nobody could ever lead again.
            "leaseTransitions": max(0, min(transitions, _MOST_TRANSITIONS)),
        }
        return {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": {**metadata, "name": self.name, "namespace": self.namespace},
            "spec": spec,
        }

    def _spec(self) -> Json:
        return mapping_of(self._lease.get("spec"))
