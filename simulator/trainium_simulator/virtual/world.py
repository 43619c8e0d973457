"""One job's month in virtual time: the operator, the cluster, the agents, and the faults that befall them.

Invariants: the same job, stages, model and faults give the same outcome; healthy hours cost nothing, so the time that a
simulation takes follows from the number of faults and the size of the job.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from trainium_contract.spec.precompile import CompiledSize
from trainium_simulator.virtual.failures import OF_MACHINES, OF_THE_CLUSTER, FailureModel, FaultClass
from trainium_simulator.virtual.nodes import Nodes, Slot
from trainium_simulator.virtual.operator import SimulatedOperator
from trainium_simulator.virtual.outcome import SimulationResult
from trainium_simulator.virtual.run import Run
from trainium_simulator.virtual.schedule import DAY, Fault, worst_hazard
from trainium_simulator.virtual.timeline import EPOCH, EventClock
from trainium_simulator.virtual.workforce import Workforce

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainium_contract.job import GoodputStatus, TrainingJobSpec, TrainingJobStatus
    from trainium_simulator.stages import StageTimes

NOT_READY_SECONDS = 50.0
"""Grace of kube-controller-manager until a silent node is marked (--node-monitor-grace-period)."""
CONDEMNED_SECONDS = 1.0
"""Time until the node monitor has written a broken device on the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Setting of one simulation."""

    spec: TrainingJobSpec
    stages: StageTimes
    model: FailureModel
    days: float
    shared: int = 0
    """Nodes beside the job's own that others use from time to time."""


class World:
    """One job on one cluster, that has a place for each worker and each spare, and perhaps some that others use too."""

    def __init__(self, setting: Setting, *, lemons: frozenset[int] = frozenset()) -> None:
        spec, compiling = setting.spec, setting.stages.compile_seconds
        if not compiling:  # then no size is dearer than another
            spec = spec.replaced(precompile=spec.precompile.replaced(enabled=False))
        compiled = tuple(CompiledSize(nodes=size, seconds=compiling) for size in spec.sizes_for_spares())
        self.timeline = EventClock()
        self.operator_away = 0
        self._wishes = 0
        """Counts the sizes that were asked for: only the newest is taken back."""
        self._setting = setting
        self._end = EPOCH + setting.days * DAY
        self.nodes = Nodes(
            spec.workers.replicas + spec.workers.spares + setting.shared,
            instance_type=spec.workers.accelerator.instance_type or "",
            model=setting.model,
            lemons=lemons,
        )
        self.operator = SimulatedOperator(
            self.timeline, self.nodes, spec, reconnect_seconds=setting.stages.reconnect_seconds
        )
        self.workforce = Workforce(self.timeline, self.nodes, setting.stages, changed=self._changed, compiled=compiled)
        self.run = Run(
            self.timeline,
            self.workforce,
            spec,
            setting.stages,
            changed=self._changed,
            ticks=self.operator.ticks,
        )
        self.operator.workforce, self.operator.run = self.workforce, self.run
        self._days: list[float] = []
        self._made = 0.0
        self._ended: GoodputStatus | None = None
        """Ledgers of jobs that had to be created again, added up."""
        self._person = 0.0
        self._stopped_at: float | None = None
        self._lost_steps = 0
        self._sizes: dict[int, float] = defaultdict(float)
        self._sized_until = EPOCH
        self.faults: dict[FaultClass, int] = defaultdict(int)

    def _changed(self) -> None:
        self.operator.wake()

    # --- life -------------------------------------------------------------------------------------------------------

    def live(self, faults: Iterable[Fault]) -> SimulationResult:
        """Live until the end; the outcome."""
        for fault in faults:
            self.timeline.at(EPOCH + fault.at, partial(self._inject, fault))
        for day in range(1, math.floor(self._setting.days) + 1):
            self.timeline.at(EPOCH + day * DAY, self._close_day)
        self.operator.wake()
        going = True
        while going:
            size = self.run.training.size
            going = self.timeline.advance(self._end)
            self._sizes[size] += self.timeline.now - self._sized_until
            self._sized_until = self.timeline.now
            if self.operator.stopped and self._stopped_at is None:
                self._stop()
        return self._outcome()

    def _close_day(self) -> None:
        made = self._productive()
        self._days.append(made - self._made)
        self._made = made

    def _productive(self) -> float:
        """Return seconds that an undisturbed run of the full size would have taken for the steps that are kept."""
        training = self.run.training
        training.account(self.timeline.now)
        return training.work()

    def _stop(self) -> None:
        """Take note of the verdict that ended the job; a person looks at it, and creates it again."""
        self._stopped_at = self.timeline.now
        self.run.abandon()
        self.timeline.after(self._setting.model.person_seconds, self._create_again)

    def _create_again(self) -> None:
        self._close_ledger()
        self.run.training.rollback()
        self.workforce.clear()
        self.operator.create_again()

    def _close_ledger(self) -> None:
        if self._stopped_at is not None:
            self._person += self.timeline.now - self._stopped_at
            self._stopped_at = None
        self._ended = _added(self._ended, self.operator.status)

    # --- faults -----------------------------------------------------------------------------------------------------

    def _inject(self, fault: Fault) -> None:
        if fault.kind in OF_THE_CLUSTER:
            self._lose_operator(fault)
            return
        if fault.kind is FaultClass.RESIZE:
            self._resize(fault)
            return
        if fault.slot >= len(self.nodes.slots):
            return
        slot = self.nodes.slots[fault.slot]
        if not slot.up:
            return
        if fault.kind in OF_MACHINES and fault.mark:
            hazard = self.nodes.hazard(slot, self.timeline.now) / worst_hazard(self._setting.model)
            if fault.mark > hazard:
                return
        self.faults[fault.kind] += 1
        match fault.kind:
            case FaultClass.PROCESS_CRASH:
                self.run.crash(slot)
            case FaultClass.HANG:
                self.run.hang(slot, self._setting.model.person_seconds)
            case FaultClass.CORRUPTION:
                self.run.diverge(slot)
            case FaultClass.DEVICE_ERROR:
                self._break_device(slot, fault)
            case FaultClass.NODE_LOST:
                self._lose([slot], fault)
            case FaultClass.RACK:
                self._lose([each for each in self.nodes.rack_of(slot.number) if each.up], fault)
            case FaultClass.MAINTENANCE:
                self._give_notice(slot, fault)
            case FaultClass.STRAGGLER:
                self._slow_down(slot, fault)
            case FaultClass.TAKEN:
                self._take(slot, fault)
            case _:
                raise AssertionError(fault.kind)

    def _break_device(self, slot: Slot, fault: Fault) -> None:
        self.run.lose_device(slot)
        repair = self._begin_repair(slot)

        def condemn() -> None:
            if slot.repair == repair and slot.up:
                self.nodes.condemn(slot, self.timeline.now)
                self.operator.nodes_changed()

        self.timeline.after(CONDEMNED_SECONDS, condemn)
        self._repair_after(slot, fault, repair)

    def _lose(self, slots: list[Slot], fault: Fault) -> None:
        repairs = [self._begin_repair(slot) for slot in slots]
        for slot in slots:
            slot.up = False
        self._lose_power(slots)
        for slot, repair in zip(slots, repairs, strict=True):
            self.timeline.after(NOT_READY_SECONDS, partial(self._darken, slot, repair))
            self._repair_after(slot, fault, repair)

    def _lose_power(self, slots: list[Slot]) -> None:
        self.operator.observe()
        self.run.lose_power(slots)

    def _darken(self, slot: Slot, repair: int) -> None:
        if slot.repair == repair and not slot.up:
            self.nodes.darken(slot, self.timeline.now)
            self.operator.nodes_changed()

    def _give_notice(self, slot: Slot, fault: Fault) -> None:
        repair = self._begin_repair(slot)
        self.nodes.give_notice(slot)
        self.operator.nodes_changed()

        def leave() -> None:
            if slot.repair == repair and slot.up:
                self._lose([slot], fault)

        self.timeline.after(self._setting.model.notice_seconds, leave)

    def _slow_down(self, slot: Slot, fault: Fault) -> None:
        machine = slot.serial
        slot.slowness = self._setting.model.straggler_factor
        self.run.pace_changed()

        def recover() -> None:
            if slot.serial == machine:
                slot.slowness = 1.0
                self.run.pace_changed()

        self.timeline.after(fault.lasts, recover)

    def _take(self, slot: Slot, fault: Fault) -> None:
        """Others come and go; where the job has a worker that it asked for they go elsewhere."""
        if any(not pod.view.extra for pod in self.workforce.on(slot)):
            return
        slot.taken = True
        self.workforce.preempt(slot)

        def leave() -> None:
            slot.taken = False
            self.workforce.schedule()

        self.timeline.after(fault.lasts, leave)

    def _lose_operator(self, fault: Fault) -> None:
        self.faults[fault.kind] += 1
        self.operator_away += 1
        self.operator.go_away()

        def come_back() -> None:
            self.operator_away -= 1
            if not self.operator_away:
                self.operator.come_back()

        self.timeline.after(fault.lasts, come_back)

    def _resize(self, fault: Fault) -> None:
        self.faults[fault.kind] += 1
        self._wishes += 1
        wish = self._wishes
        self.operator.ask_for(fault.slot)

        def ask_again() -> None:
            if wish == self._wishes:
                self.operator.ask_for(self._setting.spec.workers.replicas)

        self.timeline.after(fault.lasts, ask_again)

    def _begin_repair(self, slot: Slot) -> int:
        slot.repair += 1
        return slot.repair

    def _repair_after(self, slot: Slot, fault: Fault, repair: int) -> None:
        lemon = fault.lemon < self._setting.model.lemon_share

        def restore() -> None:
            if slot.repair != repair:
                return
            was_up = slot.up
            old_name = self.nodes.restore(slot, self.timeline.now, same_machine=fault.same_machine, lemon=lemon)
            if old_name is not None:
                if was_up:
                    self._lose_power([slot])
                self.workforce.node_deleted(slot, old_name)
            elif not was_up:
                self.workforce.power_returns(slot)
            self.operator.nodes_changed()
            self.workforce.schedule()

        self.timeline.after(fault.lasts, restore)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _outcome(self) -> SimulationResult:
        if self.operator.up:
            self.operator.settle_accounts()
        productive = self._productive()
        self._close_ledger()
        assert self._ended is not None
        return SimulationResult(
            days=self._setting.days,
            ledger=self._ended,
            person_seconds=self._person,
            work_seconds=productive,
            by_day=tuple(self._days),
            sizes={size: seconds for size, seconds in sorted(self._sizes.items()) if size and seconds},
            recoveries=tuple(self.operator.entries.values()),
            faults=dict(sorted(self.faults.items())),
            verdicts=self.operator.incarnation,
            rollbacks=self.run.training.rollbacks,
        )


def _added(before: GoodputStatus | None, status: TrainingJobStatus) -> GoodputStatus:
    """Two ledgers one after the other."""
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
