"""Simulate one job in virtual time: operator, cluster, agents and faults.

Guarantees:
- The same job, stages, model and faults give the same result.
- Healthy hours cost nothing: the time of a simulation follows from the number of faults and the size of the job.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from trainium_contract.spec.precompile import CompiledSize
from trainium_simulator.virtual.clock import EPOCH, EventClock
from trainium_simulator.virtual.failures import OF_MACHINES, OF_THE_CLUSTER, FailureModel, FaultClass
from trainium_simulator.virtual.nodes import Nodes, Slot
from trainium_simulator.virtual.operator import SimulatedOperator
from trainium_simulator.virtual.ranks import TrainingRanks
from trainium_simulator.virtual.result import SimulationResult
from trainium_simulator.virtual.schedule import DAY, Fault, worst_hazard
from trainium_simulator.virtual.workers import WorkerPods

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainium_contract.job import GoodputStatus, TrainingJobSpec, TrainingJobStatus
    from trainium_simulator.stages import StageTimes

NOT_READY_SECONDS = 50.0
"""Grace period of kube-controller-manager for a silent node (--node-monitor-grace-period)."""
DEVICE_REPORT_SECONDS = 1.0
"""Time until the node monitor has set the condition of a broken device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """Settings of one simulation."""

    spec: TrainingJobSpec
    stages: StageTimes
    model: FailureModel
    days: float
    shared: int = 0
    """Further nodes, which others use from time to time."""


class Simulation:
    """One job on a cluster with a slot for each worker and spare, and perhaps shared ones."""

    def __init__(self, setting: SimulationSettings, *, lemons: frozenset[int] = frozenset()) -> None:
        spec, compiling = setting.spec, setting.stages.compile_seconds
        if not compiling:  # all sizes cost the same
            spec = spec.replaced(precompile=spec.precompile.replaced(enabled=False))
        compiled = tuple(CompiledSize(nodes=size, seconds=compiling) for size in spec.sizes_for_spares())
        self.clock = EventClock()
        self._outages = 0
        self._resizes = 0
        """Number of resizes: only the newest is reverted."""
        self._setting = setting
        self._end = EPOCH + setting.days * DAY
        self.nodes = Nodes(
            spec.workers.replicas + spec.workers.spares + setting.shared,
            instance_type=spec.workers.accelerator.instance_type or "",
            model=setting.model,
            lemons=lemons,
        )
        self.operator = SimulatedOperator(
            self.clock, self.nodes, spec, reconnect_seconds=setting.stages.reconnect_seconds
        )
        self.workers = WorkerPods(self.clock, self.nodes, setting.stages, changed=self._changed, compiled=compiled)
        self.ranks = TrainingRanks(
            self.clock,
            self.workers,
            spec,
            setting.stages,
            changed=self._changed,
            requeue_at=self.operator.requeue_at,
        )
        self.operator.workers, self.operator.ranks = self.workers, self.ranks
        self._days: list[float] = []
        self._productive_before = 0.0
        self._earlier_ledger: GoodputStatus | None = None
        """Sum of the ledgers of jobs that were recreated."""
        self._person_seconds = 0.0
        self._stopped_at: float | None = None
        self._lost_steps = 0
        self._sizes: dict[int, float] = defaultdict(float)
        self._sized_until = EPOCH
        self.faults: dict[FaultClass, int] = defaultdict(int)

    def _changed(self) -> None:
        self.operator.enqueue()

    # --- run --------------------------------------------------------------------------------------------------------

    def run(self, faults: Iterable[Fault]) -> SimulationResult:
        """Simulate until the end and return the result."""
        for fault in faults:
            self.clock.at(EPOCH + fault.at, partial(self._inject, fault))
        for day in range(1, math.floor(self._setting.days) + 1):
            self.clock.at(EPOCH + day * DAY, self._close_day)
        self.operator.enqueue()
        is_before_end = True
        while is_before_end:
            size = self.ranks.training.size
            is_before_end = self.clock.advance(self._end)
            self._sizes[size] += self.clock.now - self._sized_until
            self._sized_until = self.clock.now
            if self.operator.job_ended and self._stopped_at is None:
                self._stop()
        return self._outcome()

    def _close_day(self) -> None:
        made = self._productive()
        self._days.append(made - self._productive_before)
        self._productive_before = made

    def _productive(self) -> float:
        """Return the seconds that an undisturbed run of the full size would have taken for the kept steps."""
        training = self.ranks.training
        training.record_progress(self.clock.now)
        return training.work_seconds()

    def _stop(self) -> None:
        """End the job after a verdict; a user recreates it after a while."""
        self._stopped_at = self.clock.now
        self.ranks.end_job()
        self.clock.after(self._setting.model.person_seconds, self._recreate_job)

    def _recreate_job(self) -> None:
        self._close_ledger()
        self.ranks.training.rollback()
        self.workers.clear()
        self.operator.recreate_job()

    def _close_ledger(self) -> None:
        if self._stopped_at is not None:
            self._person_seconds += self.clock.now - self._stopped_at
            self._stopped_at = None
        self._earlier_ledger = _added(self._earlier_ledger, self.operator.status)

    # --- faults -----------------------------------------------------------------------------------------------------

    def _inject(self, fault: Fault) -> None:
        if fault.kind in OF_THE_CLUSTER:
            self._stop_operator(fault)
            return
        if fault.kind is FaultClass.RESIZE:
            self._resize(fault)
            return
        if fault.slot >= len(self.nodes.slots):
            return
        slot = self.nodes.slots[fault.slot]
        if not slot.up:
            return
        if fault.kind in OF_MACHINES and fault.hazard_threshold:
            hazard = self.nodes.hazard(slot, self.clock.now) / worst_hazard(self._setting.model)
            if fault.hazard_threshold > hazard:
                return
        self.faults[fault.kind] += 1
        match fault.kind:
            case FaultClass.PROCESS_CRASH:
                self.ranks.crash(slot)
            case FaultClass.HANG:
                self.ranks.hang(slot, self._setting.model.person_seconds)
            case FaultClass.CORRUPTION:
                self.ranks.diverge(slot)
            case FaultClass.DEVICE_ERROR:
                self._break_device(slot, fault)
            case FaultClass.NODE_LOST:
                self._fail_nodes([slot], fault)
            case FaultClass.RACK:
                self._fail_nodes([each for each in self.nodes.rack_of(slot.number) if each.up], fault)
            case FaultClass.MAINTENANCE:
                self._announce_maintenance(slot, fault)
            case FaultClass.STRAGGLER:
                self._slow_node(slot, fault)
            case FaultClass.TAKEN:
                self._occupy(slot, fault)
            case _:
                raise AssertionError(fault.kind)

    def _break_device(self, slot: Slot, fault: Fault) -> None:
        self.ranks.fail_device(slot)
        repair = self._begin_repair(slot)

        def report_device_fault() -> None:
            if slot.repair == repair and slot.up:
                self.nodes.report_device_fault(slot, self.clock.now)
                self.operator.nodes_changed()

        self.clock.after(DEVICE_REPORT_SECONDS, report_device_fault)
        self._repair_after(slot, fault, repair)

    def _fail_nodes(self, slots: list[Slot], fault: Fault) -> None:
        repairs = [self._begin_repair(slot) for slot in slots]
        for slot in slots:
            slot.up = False
        self._power_off(slots)
        for slot, repair in zip(slots, repairs, strict=True):
            self.clock.after(NOT_READY_SECONDS, partial(self._mark_not_ready, slot, repair))
            self._repair_after(slot, fault, repair)

    def _power_off(self, slots: list[Slot]) -> None:
        self.operator.observe()
        self.ranks.power_off(slots)

    def _mark_not_ready(self, slot: Slot, repair: int) -> None:
        if slot.repair == repair and not slot.up:
            self.nodes.mark_not_ready(slot, self.clock.now)
            self.operator.nodes_changed()

    def _announce_maintenance(self, slot: Slot, fault: Fault) -> None:
        repair = self._begin_repair(slot)
        self.nodes.announce_maintenance(slot)
        self.operator.nodes_changed()

        def leave() -> None:
            if slot.repair == repair and slot.up:
                self._fail_nodes([slot], fault)

        self.clock.after(self._setting.model.notice_seconds, leave)

    def _slow_node(self, slot: Slot, fault: Fault) -> None:
        machine = slot.serial
        slot.slowness = self._setting.model.straggler_factor
        self.ranks.pace_changed()

        def recover() -> None:
            if slot.serial == machine:
                slot.slowness = 1.0
                self.ranks.pace_changed()

        self.clock.after(fault.duration, recover)

    def _occupy(self, slot: Slot, fault: Fault) -> None:
        """Occupy a node by pods of others, unless a requested worker runs there."""
        if any(not pod.view.extra for pod in self.workers.pods_on(slot)):
            return
        slot.occupied = True
        self.workers.preempt(slot)

        def leave() -> None:
            slot.occupied = False
            self.workers.schedule()

        self.clock.after(fault.duration, leave)

    def _stop_operator(self, fault: Fault) -> None:
        self.faults[fault.kind] += 1
        self._outages += 1
        self.operator.disconnect()

        def reconnect() -> None:
            self._outages -= 1
            if not self._outages:
                self.operator.reconnect()

        self.clock.after(fault.duration, reconnect)

    def _resize(self, fault: Fault) -> None:
        self.faults[fault.kind] += 1
        self._resizes += 1
        number = self._resizes
        self.operator.set_replicas(fault.slot)

        def restore_replicas() -> None:
            if number == self._resizes:
                self.operator.set_replicas(self._setting.spec.workers.replicas)

        self.clock.after(fault.duration, restore_replicas)

    def _begin_repair(self, slot: Slot) -> int:
        slot.repair += 1
        return slot.repair

    def _repair_after(self, slot: Slot, fault: Fault, repair: int) -> None:
        lemon = fault.lemon_draw < self._setting.model.lemon_share

        def restore() -> None:
            if slot.repair != repair:
                return
            was_up = slot.up
            old_name = self.nodes.restore(slot, self.clock.now, same_machine=fault.same_machine, lemon=lemon)
            if old_name is not None:
                if was_up:
                    self._power_off([slot])
                self.workers.node_deleted(slot, old_name)
            elif not was_up:
                self.workers.power_on(slot)
            self.operator.nodes_changed()
            self.workers.schedule()

        self.clock.after(fault.duration, restore)

    # --- result -----------------------------------------------------------------------------------------------------

    def _outcome(self) -> SimulationResult:
        if self.operator.up:
            self.operator.update_ledger()
        productive = self._productive()
        self._close_ledger()
        assert self._earlier_ledger is not None
        return SimulationResult(
            days=self._setting.days,
            ledger=self._earlier_ledger,
            person_seconds=self._person_seconds,
            work_seconds=productive,
            by_day=tuple(self._days),
            sizes={size: seconds for size, seconds in sorted(self._sizes.items()) if size and seconds},
            recoveries=tuple(self.operator.entries.values()),
            faults=dict(sorted(self.faults.items())),
            verdicts=self.operator.incarnation,
            rollbacks=self.ranks.training.rollbacks,
        )


def _added(before: GoodputStatus | None, status: TrainingJobStatus) -> GoodputStatus:
    """Return the sum of two ledgers."""
    new = status.goodput
    if before is None:
        return new
    return new.replaced(
        productive_seconds=before.productive_seconds + new.productive_seconds,
        wall_seconds=before.wall_seconds + new.wall_seconds,
        node_seconds=before.node_seconds + new.node_seconds,
        earlier_node_seconds=before.earlier_node_seconds + new.earlier_node_seconds,
        lost_seconds=_summed(before.lost_seconds, new.lost_seconds),
        lost_by_stage=_summed(before.lost_by_stage, new.lost_by_stage),
    )


def _summed(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {key: one.get(key, 0.0) + other.get(key, 0.0) for key in {**one, **other}}
