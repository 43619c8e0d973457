"""Simulate one job in virtual time with its operator, cluster, agents and faults.

Guarantees:
- The same job, stages, model and faults give the same result.
- The duration of a simulation depends on the number of faults and the size of the job, not on the simulated days.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from trainium_contract.spec.precompile import CompiledSize
from trainium_simulator.virtual.clock import EPOCH, EventClock
from trainium_simulator.virtual.failures import CLUSTER_FAULTS, MACHINE_FAULTS, FailureModel, FaultClass
from trainium_simulator.virtual.nodes import Nodes, Slot
from trainium_simulator.virtual.operator import SimulatedOperator
from trainium_simulator.virtual.ranks import TrainingRanks
from trainium_simulator.virtual.result import SimulationResult
from trainium_simulator.virtual.schedule import DAY, Fault, compute_worst_hazard
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
    shared_nodes: int = 0
    """Additional nodes, which other users need from time to time."""


class Simulation:
    """One job on a cluster with a slot for each worker and spare, and perhaps shared ones."""

    def __init__(self, settings: SimulationSettings, *, lemons: frozenset[int] = frozenset()) -> None:
        spec, stages = settings.spec, settings.stages
        if not stages.compile_seconds:  # all sizes cost the same
            spec = spec.replaced(precompile=spec.precompile.replaced(enabled=False))
        compiled = tuple(CompiledSize(nodes=size, seconds=stages.compile_seconds) for size in spec.sizes_for_spares())
        self.clock = EventClock()
        self._outages = 0
        self._resizes = 0
        """Number of resizes so far: only the newest one is reverted."""
        self._settings = settings
        self._end = EPOCH + settings.days * DAY
        self.nodes = Nodes(
            spec.workers.replicas + spec.workers.spares + settings.shared_nodes,
            instance_type=spec.workers.accelerator.instance_type or "",
            model=settings.model,
            lemons=lemons,
        )
        self.operator = SimulatedOperator(self.clock, self.nodes, spec, reconnect_seconds=stages.reconnect_seconds)
        on_change = self.operator.enqueue
        self.workers = WorkerPods(self.clock, self.nodes, stages, on_change=on_change, compiled=compiled)
        self.ranks = TrainingRanks(
            self.clock,
            self.workers,
            spec,
            stages,
            on_change=on_change,
            requeue_at=self.operator.requeue_at,
        )
        self.operator.workers, self.operator.ranks = self.workers, self.ranks
        self._work_seconds_by_day: list[float] = []
        self._work_seconds_before = 0.0
        self._earlier_ledger: GoodputStatus | None = None
        """Sum of the ledgers of jobs that were recreated."""
        self._user_wait_seconds = 0.0
        self._ended_at: float | None = None
        self._seconds_by_size: dict[int, float] = defaultdict(float)
        self._sizes_recorded_until = EPOCH
        self.fault_counts: dict[FaultClass, int] = defaultdict(int)

    # --- run --------------------------------------------------------------------------------------------------------

    def run(self, faults: Iterable[Fault]) -> SimulationResult:
        """Inject the faults, advance the clock to the end of the simulated days, and return the result."""
        for fault in faults:
            self.clock.call_at(EPOCH + fault.at, partial(self._inject, fault))
        for day in range(1, math.floor(self._settings.days) + 1):
            self.clock.call_at(EPOCH + day * DAY, self._record_day)
        self.operator.enqueue()
        is_before_end = True
        while is_before_end:
            size = self.ranks.training.size
            is_before_end = self.clock.advance(self._end)
            self._seconds_by_size[size] += self.clock.now - self._sizes_recorded_until
            self._sizes_recorded_until = self.clock.now
            if self.operator.job_ended and self._ended_at is None:
                self._end_job()
        return self._build_result()

    def _record_day(self) -> None:
        work_seconds = self._compute_work_seconds()
        self._work_seconds_by_day.append(work_seconds - self._work_seconds_before)
        self._work_seconds_before = work_seconds

    def _compute_work_seconds(self) -> float:
        """Return the seconds that an undisturbed run of the full size would have taken for the kept steps."""
        training = self.ranks.training
        training.record_progress(self.clock.now)
        return training.compute_work_seconds()

    def _end_job(self) -> None:
        """End the job after a verdict; a user recreates it after a while."""
        self._ended_at = self.clock.now
        self.ranks.end_job()
        self.clock.call_later(self._settings.model.user_response_seconds, self._recreate_job)

    def _recreate_job(self) -> None:
        self._add_ledger()
        self.ranks.training.rollback()
        self.workers.delete_all()
        self.operator.recreate_job()

    def _add_ledger(self) -> None:
        if self._ended_at is not None:
            self._user_wait_seconds += self.clock.now - self._ended_at
            self._ended_at = None
        self._earlier_ledger = _add_ledgers(self._earlier_ledger, self.operator.status)

    # --- faults -----------------------------------------------------------------------------------------------------

    def _inject(self, fault: Fault) -> None:
        if fault.kind in CLUSTER_FAULTS:
            self._stop_operator(fault)
            return
        if fault.kind is FaultClass.RESIZE:
            self._resize(fault)
            return
        if fault.slot >= len(self.nodes.slots):
            return
        slot = self.nodes.slots[fault.slot]
        if not slot.has_power:
            return
        if fault.kind in MACHINE_FAULTS and fault.hazard_threshold:
            hazard = self.nodes.compute_relative_hazard(slot, self.clock.now) / compute_worst_hazard(
                self._settings.model
            )
            if fault.hazard_threshold > hazard:
                return
        self.fault_counts[fault.kind] += 1
        match fault.kind:
            case FaultClass.PROCESS_CRASH:
                self.ranks.crash_process(slot)
            case FaultClass.HANG:
                self.ranks.hang_process(slot, self._settings.model.user_response_seconds)
            case FaultClass.CORRUPTION:
                self.ranks.produce_nonfinite_loss(slot)
            case FaultClass.DEVICE_ERROR:
                self._break_device(slot, fault)
            case FaultClass.NODE_LOST:
                self._fail_nodes([slot], fault)
            case FaultClass.RACK:
                self._fail_nodes(
                    [other for other in self.nodes.list_slots_in_rack(slot.number) if other.has_power], fault
                )
            case FaultClass.MAINTENANCE:
                self._announce_maintenance(slot, fault)
            case FaultClass.STRAGGLER:
                self._slow_node(slot, fault)
            case FaultClass.OCCUPIED:
                self._occupy(slot, fault)
            case _:
                raise AssertionError(fault.kind)

    def _break_device(self, slot: Slot, fault: Fault) -> None:
        if self.operator.is_connected:  # steps since its last plan would count only once the job trains again
            self.operator.update_ledger()
        self.ranks.fail_device(slot)
        repair_number = self._begin_repair(slot)

        def report_device_fault() -> None:
            if slot.repair_count == repair_number and slot.has_power:
                self.nodes.report_device_fault(slot, self.clock.now)
                self.operator.enqueue_fleet()

        self.clock.call_later(DEVICE_REPORT_SECONDS, report_device_fault)
        self._repair_after(slot, fault, repair_number)

    def _fail_nodes(self, slots: list[Slot], fault: Fault) -> None:
        repairs = [self._begin_repair(slot) for slot in slots]
        for slot in slots:
            slot.has_power = False
        self._power_off(slots)
        for slot, repair_number in zip(slots, repairs, strict=True):
            self.clock.call_later(NOT_READY_SECONDS, partial(self._mark_not_ready, slot, repair_number))
            self._repair_after(slot, fault, repair_number)

    def _power_off(self, slots: list[Slot]) -> None:
        self.operator.record_heartbeats()
        self.ranks.power_off(slots)

    def _mark_not_ready(self, slot: Slot, repair_number: int) -> None:
        if slot.repair_count == repair_number and not slot.has_power:
            self.nodes.mark_not_ready(slot, self.clock.now)
            self.operator.enqueue_fleet()

    def _announce_maintenance(self, slot: Slot, fault: Fault) -> None:
        repair_number = self._begin_repair(slot)
        self.nodes.announce_maintenance(slot)
        self.operator.enqueue_fleet()

        def leave() -> None:
            if slot.repair_count == repair_number and slot.has_power:
                self._fail_nodes([slot], fault)

        self.clock.call_later(self._settings.model.notice_seconds, leave)

    def _slow_node(self, slot: Slot, fault: Fault) -> None:
        machine = slot.machine_serial
        slot.slowness = self._settings.model.straggler_factor
        self.ranks.apply_slowest_node()

        def recover() -> None:
            if slot.machine_serial == machine:
                slot.slowness = 1.0
                self.ranks.apply_slowest_node()

        self.clock.call_later(fault.duration, recover)

    def _occupy(self, slot: Slot, fault: Fault) -> None:
        """Occupy a node by pods of others, unless a requested worker runs there."""
        if any(not pod.view.extra for pod in self.workers.list_pods_on(slot)):
            return
        slot.occupied = True
        self.workers.preempt_extra_pod(slot)

        def leave() -> None:
            slot.occupied = False
            self.workers.schedule()

        self.clock.call_later(fault.duration, leave)

    def _stop_operator(self, fault: Fault) -> None:
        self.fault_counts[fault.kind] += 1
        self._outages += 1
        if self.operator.is_connected:
            self.operator.update_ledger()
        self.operator.disconnect()

        def reconnect() -> None:
            self._outages -= 1
            if not self._outages:
                self.operator.reconnect()

        self.clock.call_later(fault.duration, reconnect)

    def _resize(self, fault: Fault) -> None:
        self.fault_counts[fault.kind] += 1
        self._resizes += 1
        number = self._resizes
        self.operator.set_replicas(fault.replicas)

        def restore_replicas() -> None:
            if number == self._resizes:
                self.operator.set_replicas(self._settings.spec.workers.replicas)

        self.clock.call_later(fault.duration, restore_replicas)

    def _begin_repair(self, slot: Slot) -> int:
        slot.repair_count += 1
        return slot.repair_count

    def _repair_after(self, slot: Slot, fault: Fault, repair_number: int) -> None:
        lemon = fault.lemon_draw < self._settings.model.lemon_share

        def restore() -> None:
            if slot.repair_count != repair_number:
                return
            was_up = slot.has_power
            old_name = self.nodes.restore(slot, self.clock.now, same_machine=fault.same_machine, lemon=lemon)
            if old_name is not None:
                if was_up:
                    self._power_off([slot])
                self.workers.delete_pods_of_node(slot, old_name)
            elif not was_up:
                self.workers.power_on(slot)
            self.operator.enqueue_fleet()
            self.workers.schedule()

        self.clock.call_later(fault.duration, restore)

    # --- result -----------------------------------------------------------------------------------------------------

    def _build_result(self) -> SimulationResult:
        if not self.operator.is_connected:
            self.operator.reconnect()
        self.operator.update_ledger()
        work_seconds = self._compute_work_seconds()
        self._add_ledger()
        assert self._earlier_ledger is not None
        return SimulationResult(
            days=self._settings.days,
            ledger=self._earlier_ledger,
            user_wait_seconds=self._user_wait_seconds,
            work_seconds=work_seconds,
            work_seconds_by_day=tuple(self._work_seconds_by_day),
            seconds_by_size={
                size: seconds for size, seconds in sorted(self._seconds_by_size.items()) if size and seconds
            },
            interruptions=tuple(self.operator.interruptions.values()),
            fault_counts=dict(sorted(self.fault_counts.items())),
            recreations=self.operator.incarnation,
            rollbacks=self.ranks.training.rollbacks,
        )


def _add_ledgers(before: GoodputStatus | None, status: TrainingJobStatus) -> GoodputStatus:
    """Return the sum of a ledger and that of a status; sizes and references are those of the status."""
    new = status.goodput
    if before is None:
        return new
    return new.replaced(
        productive_seconds=before.productive_seconds + new.productive_seconds,
        wall_seconds=before.wall_seconds + new.wall_seconds,
        node_seconds=before.node_seconds + new.node_seconds,
        earlier_node_seconds=before.earlier_node_seconds + new.earlier_node_seconds,
        lost_seconds=_sum_by_key(before.lost_seconds, new.lost_seconds),
        lost_by_stage=_sum_by_key(before.lost_by_stage, new.lost_by_stage),
    )


def _sum_by_key(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {key: one.get(key, 0.0) + other.get(key, 0.0) for key in {**one, **other}}
