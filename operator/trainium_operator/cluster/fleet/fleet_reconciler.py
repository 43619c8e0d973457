"""Reconcile the fleet: record failures of all jobs and nodes in the memory of bad machines, and derive the jobs' view.

Guarantees:
- Only the leader writes. Reconciling is level-triggered, so a crash between any two writes only delays.
- The memory is written (compare and swap) before any job acts on it.
- A person's edit of it is read before each decision.
- An older view never replaces a newer one.
- While the API server is unavailable jobs use the last view.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from trainium_contract.api_server.errors import AlreadyExistsError, ApiError, ConflictError, NotFoundError
from trainium_operator.bounded_dict import BoundedDict
from trainium_operator.cluster.api.resources import CONFIG_MAPS, NODES
from trainium_operator.cluster.fleet import fleet_record
from trainium_operator.plan.fleet.memory import Machine, Memory
from trainium_operator.plan.fleet.quarantine import FleetObserved, FleetPlan, JobRecords, TaintNode, plan_fleet
from trainium_operator.plan.model.names import TAINT_QUARANTINED
from trainium_operator.plan.model.observed import FleetView, JobView, NodeView

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from trainium_contract.api_server.responses import Json
    from trainium_operator.cluster.api.client import Api
    from trainium_operator.cluster.cache.caches import Caches
    from trainium_operator.cluster.cache.store import Entry, Key
    from trainium_operator.cluster.cache.views import JobRecord

logger = logging.getLogger(__name__)

POLL_SECONDS = 15.0
"""Longest time between two reads of the memory, which a person may have changed."""
SETTLE_SECONDS = 0.2
"""Shortest time between two reconciles, because the signals of one fault arrive together."""
RETRY_SECONDS = 5.0
ATTEMPTS = 5
MAX_DELETED = 4_096
_LABELS = {"app.kubernetes.io/part-of": "trainium-operator", "app.kubernetes.io/component": "fleet-memory"}


@dataclass(eq=False)
class FleetReconciler:
    """Reconciles the fleet: call `prime()` before the first plan of a leader, then `run()`; jobs use `current()`."""

    api: Api
    caches: Caches
    leading: asyncio.Event
    _: KW_ONLY
    namespace: str
    name: str
    may_taint: Callable[[], bool]
    wall_clock: Callable[[], float]
    on_change: Callable[[], None]
    """Called when the view has changed, so that every job is planned."""
    owners: Callable[[], list[Json]] = list
    """`ownerReferences` of the ConfigMap."""
    view: FleetView = field(default_factory=FleetView, init=False)
    _woken: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _nodes_changed: bool = field(default=False, init=False)
    """Since the last reconcile."""
    _rounds: int = field(default=0, init=False)
    _deleted_provider_ids: BoundedDict[str, str] = field(init=False)
    """Provider IDs of nodes that no longer exist."""
    _memory: Memory | None = field(default=None, init=False)
    _written: bool = field(default=False, init=False)
    """The ConfigMap existed when this process last read or wrote it."""
    _tainted: BoundedDict[str, tuple[TaintNode, float]] = field(init=False)
    """The last write to each node and its time: a client that reverts it causes one write in `POLL_SECONDS`."""

    def __post_init__(self) -> None:
        self._tainted, self._deleted_provider_ids = BoundedDict(MAX_DELETED), BoundedDict(MAX_DELETED)
        if self.caches.nodes is not None:
            self.caches.nodes.store.listen(self._handle_node_change)
        self.caches.jobs.store.listen(self._handle_job_change)

    @property
    def machines(self) -> Collection[Machine]:
        """Return the recorded machines, as last read by this process."""
        return self._memory.machines.values() if self._memory is not None else ()

    def get_current_view(self) -> FleetView:
        """Return the view, with the present state of the nodes.

        If many nodes turn bad at once, none may be acted on before the number is known.
        """
        if self._nodes_changed and self._memory is not None:
            self._adopt(self._plan(self._memory))
        return self.view

    def wake(self) -> None:
        """Record that something which the fleet's plan can see has changed."""
        self._woken.set()

    async def prime(self) -> None:
        """Read the memory and compute the jobs' view, without writing. Raises ApiError."""
        self._memory, _ = await self._read()
        plan = self._plan(self._memory)
        self._memory = plan.memory
        self._adopt(plan)

    async def run(self) -> None:
        """Reconcile while this process leads, until cancelled."""
        await self.leading.wait()
        while self.leading.is_set():
            self._woken.clear()
            seconds = RETRY_SECONDS
            try:
                seconds = await self._reconcile()
            except ApiError as error:
                logger.warning("the fleet's memory: %s; again in %.0f s", error, seconds)
            except Exception:
                logger.exception("looking at the fleet failed; again in %.0f s", seconds)
            try:
                async with asyncio.timeout(seconds):
                    await self._woken.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(SETTLE_SECONDS)

    async def _reconcile(self) -> float:
        """Reconcile once; return the seconds until the next time. Raises ApiError."""
        for _ in range(ATTEMPTS):
            try:
                memory, raw = await self._read()
            except ApiError:
                self._adopt(self._plan(self._memory or Memory()))
                raise
            # Without earlier nodes, those seen when the leader started count; one that is missing later was deleted.
            plan = self._plan(memory if memory is not None or self._written else self._memory)
            poll = self._rounds
            try:
                if plan.memory != memory:
                    await self._write(plan.memory, raw)
            except (ConflictError, AlreadyExistsError):
                continue  # a person or the previous leader wrote it: their version counts
            for sentence in plan.changes:
                logger.warning("%.1000s", sentence)
            self._memory, self._written = plan.memory, True
            if self._nodes_changed or self._rounds != poll:  # other changes may have arrived during the write
                plan = self._plan(self._memory)
            self._adopt(plan)
            if plan.memory != self._memory:
                return SETTLE_SECONDS  # written before anything follows from it
            for write in plan.taints:
                await self._taint(write)
            return (
                POLL_SECONDS
                if plan.requeue_after is None
                else min(POLL_SECONDS, max(SETTLE_SECONDS, plan.requeue_after))
            )
        raise ConflictError(f"ConfigMap {self.namespace}/{self.name} keeps changing: another client writes it too")

    def _plan(self, memory: Memory | None) -> FleetPlan:
        self._nodes_changed = False
        self._rounds += 1
        carrying = frozenset(entry.view.node for entry in self.caches.pods.store.snapshot().values()) - {""}
        if self.caches.nodes is None:
            nodes = {name: NodeView(name=name) for name in carrying}
        else:
            nodes = {key[1]: entry.view for key, entry in self.caches.nodes.store.snapshot().items()}
        return plan_fleet(
            FleetObserved(
                nodes=nodes,
                worker_nodes=carrying,
                jobs=tuple(
                    _read_records(self.caches.apply_refused_status(entry.view.view))
                    for entry in self.caches.jobs.store.snapshot().values()
                    if entry.view.view is not None
                ),
                memory=memory,
                now=self.wall_clock(),
                deleted_provider_ids=self._deleted_provider_ids,
                taints_nodes=self.may_taint() and self.caches.nodes is not None,
            )
        )

    def _adopt(self, plan: FleetPlan) -> None:
        old, self.view = self.view, plan.view
        if old.frozen != plan.view.frozen:
            logger.warning("%.1000s", plan.view.frozen or "few enough nodes are bad: they are acted on again")
        if old != plan.view:
            self.on_change()

    async def _read(self) -> tuple[Memory | None, Json | None]:
        try:
            raw = await self.api.get(CONFIG_MAPS, self.namespace, self.name)
        except NotFoundError:
            return None, None
        data = raw.get("data")
        return fleet_record.decode(data if isinstance(data, dict) else {}), raw

    async def _write(self, memory: Memory, raw: Json | None) -> None:
        data = fleet_record.encode(memory)
        if raw is None:
            metadata: Json = {"name": self.name, "namespace": self.namespace, "labels": _LABELS}
            if owners := self.owners():
                metadata["ownerReferences"] = owners
            await self.api.create(CONFIG_MAPS, self.namespace, {"metadata": metadata, "data": data})
        else:
            await self.api.replace(CONFIG_MAPS, self.namespace, self.name, {**raw, "data": data})

    async def _taint(self, write: TaintNode) -> None:
        """Compare and swap the taints, because the list can only be written as a whole."""
        last, at = self._tainted.get(write.node, (None, 0.0))
        if last == write and self.wall_clock() < at + POLL_SECONDS:
            return
        try:
            raw = await self.api.get(NODES, "", write.node)
            others = [
                taint for taint in (raw.get("spec") or {}).get("taints") or () if taint.get("key") != TAINT_QUARANTINED
            ]
            ours = write.taint
            added = [] if ours is None else [{"key": ours.key, "value": ours.value, "effect": ours.effect}]
            version = {"resourceVersion": raw["metadata"]["resourceVersion"]}
            await self.api.merge(NODES, "", write.node, {"metadata": version, "spec": {"taints": [*others, *added]}})
        except (ConflictError, NotFoundError):
            return  # the next reconcile reads the current state
        self._tainted[write.node] = (write, self.wall_clock())
        done = "taint taken off" if ours is None else f"tainted ({ours.value})"
        logger.warning("node %s: %s", write.node, done, extra={"node": write.node})

    def _handle_node_change(self, key: Key, old: Entry[NodeView] | None, new: Entry[NodeView] | None) -> None:
        if new is None and old is not None and old.view.provider_id:
            self._deleted_provider_ids[key[1]] = old.view.provider_id
        if old is None or new is None or old.view != new.view:
            self._nodes_changed = True
            self.wake()

    def _handle_job_change(self, _key: Key, old: Entry[JobRecord] | None, new: Entry[JobRecord] | None) -> None:
        before = old.view.view.status.all_failures if old is not None and old.view.view is not None else ()
        after = new.view.view.status.all_failures if new is not None and new.view.view is not None else ()
        if before != after:
            self.wake()


def _read_records(job: JobView) -> JobRecords:
    quarantine = job.spec.health.quarantine
    return JobRecords(
        uid=job.uid,
        name=f"{job.namespace}/{job.name}",
        failures=job.status.all_failures,
        takes_part=quarantine.enabled,
        debounce_seconds=float(quarantine.debounce_seconds),
    )
