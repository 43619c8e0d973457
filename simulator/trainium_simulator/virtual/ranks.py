"""Simulate the ranks of a generation: leave, join, load, train, restart in place.

Guarantees:
- Ranks step only while all members are present.
- A restart in place needs no operator.
- An event that was scheduled for an older attempt has no effect (`_epoch`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from trainium_contract.exit_codes import ExitCode
from trainium_contract.faults.causes import Cause
from trainium_contract.wire.messages import ProcessFailure, Progress, RestartRecord, StepTiming, Transition, WorkerPhase
from trainium_operator.plan.model.observed import SILENCE_REPORTED_SECONDS
from trainium_simulator.virtual.training import State, Training
from trainium_simulator.virtual.workers import HALF_A_HEARTBEAT, Agent, Pod, RankReports, WorkerPods

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from trainium_contract.job import TrainingJobSpec
    from trainium_contract.wire.messages import Membership
    from trainium_simulator.stages import StageTimes
    from trainium_simulator.virtual.clock import EventClock
    from trainium_simulator.virtual.nodes import Slot

_NEWEST = 8
_UNCORRECTABLE = 1202
"""Status of the Neuron runtime: an uncorrectable error of a core."""
_CRASHED = 139
_TIMED_STEPS = 50


class RequeueAt(Protocol):
    """Schedules reconciles of an idle job, for figures that are missing, or in any case (`always`)."""

    def __call__(self, moments: tuple[float, ...], *, always: bool = False) -> None:
        """Reconcile at these moments."""


class TrainingRanks:
    """The ranks of one job."""

    def __init__(
        self,
        clock: EventClock,
        workers: WorkerPods,
        spec: TrainingJobSpec,
        stages: StageTimes,
        *,
        changed: Callable[[], None],
        requeue_at: RequeueAt,
    ) -> None:
        """Connect callbacks: `changed()` for new reports, `requeue_at(moments)` for reconciles of an idle job."""
        self.training = Training(spec, stages)
        self.membership: Membership | None = None
        """The generation that the agents are in."""
        self._clock = clock
        self._workers = workers
        self._spec = spec
        self._stages = stages
        self._changed = changed
        self._requeue_at = requeue_at
        self._epoch = 0
        self._attempt = 0
        self._timed: dict[float, StepTiming] = {}
        self._timed_of: tuple[object, ...] | None = None
        self._compiled = {*spec.sizes_to_compile(), *spec.sizes_for_spares()} if spec.precompile.enabled else set()

    # --- members ----------------------------------------------------------------------------------------------------

    def members(self) -> Iterator[tuple[int, Pod | None]]:
        """Yield rank and pod of each member; None for a deleted pod."""
        by_uid = {pod.view.uid: pod for pod in self._workers.pods.values()}
        for member in self.membership.members if self.membership else ():
            yield member.node_rank, by_uid.get(member.pod_uid)

    def _agents(self) -> list[Agent]:
        """Return the agents of the members that can be reached."""
        return [
            pod.agent for _, pod in self.members() if pod is not None and _is_reachable(pod) and pod.agent is not None
        ]

    def _missing(self) -> tuple[int, ...]:
        return tuple(rank for rank, pod in self.members() if pod is None or not _is_reachable(pod))

    def member_on(self, slot: Slot) -> tuple[int, Agent] | None:
        """Return rank and agent of the reachable member on this slot."""
        for rank, pod in self.members():
            if pod is not None and pod.slot is slot and _is_reachable(pod) and pod.agent is not None:
                return rank, pod.agent
        return None

    # --- generations ------------------------------------------------------------------------------------------------

    def publish(self, membership: Membership) -> None:
        """Publish a generation, as the coordinator does."""
        delay = self._stages.publish(len(membership.members))
        self._clock.after(delay, lambda: self._receive(membership))

    def _receive(self, membership: Membership) -> None:
        if self.membership is not None and membership.generation <= self.membership.generation:
            return
        graceful = membership.transition is Transition.GRACEFUL and self.training.state is State.RUNNING
        if not graceful:
            self._enter(membership)
            return
        left = self.training.last_step_end(self._clock.now) + self._stages.leave_seconds
        self._epoch += 1
        epoch = self._epoch
        self._clock.at(left, lambda: self._enter(membership, saved=True) if epoch == self._epoch else None)
        # A fault meanwhile begins another epoch, and the generation is entered at once.
        self._clock.at(left + self._stages.leave_seconds, lambda: self._enter(membership))

    def _enter(self, membership: Membership, *, saved: bool = False) -> None:
        """Enter a generation; `saved`: all ranks left after the same step, and have it in memory."""
        if self.membership is not None and membership.generation <= self.membership.generation:
            return
        training, now = self.training, self._clock.now
        training.halt(now, State.JOINING)
        before = {pod.view.uid for _, pod in self.members() if pod is not None}
        resume = training.step if saved and not self._missing() else training.resume_from(self._missing())
        old = self._agents()
        self.membership, self._attempt = membership, 0
        named = self._agents()
        for agent in old:
            agent.generation, agent.attempt, agent.verdict, agent.waiting_for = membership.generation, 0, None, ()
            agent.set_phase(WorkerPhase.STANDBY, now)
        for agent in named:
            agent.generation, agent.attempt, agent.verdict = membership.generation, 0, None
        training.size = len(membership.members)
        newcomers = any(member.pod_uid not in before for member in membership.members)
        self._start_attempt(resume, newcomers=newcomers)
        self._changed()

    def _start_attempt(self, resume: int, *, newcomers: bool) -> None:
        """Join; once all members are present their processes start, load and train."""
        training, now = self.training, self._clock.now
        self._epoch += 1
        training.state, training.started, training.loaded = State.JOINING, 0.0, 0.0
        missing = self._missing()
        for agent in self._agents():
            agent.waiting_for, agent.attempt = missing[:64], self._attempt
            agent.set_phase(WorkerPhase.JOINING, now)
        if missing:
            self._changed()
            return
        epoch = self._epoch

        def up() -> None:
            if epoch != self._epoch:
                return
            training.state, training.started = State.LOADING, self._clock.now
            for agent in self._agents():
                agent.set_phase(WorkerPhase.LOADING, self._clock.now)
            seconds = training.loading_seconds(resume, newcomers=newcomers)
            self._clock.after(seconds, lambda: self._loaded(epoch, resume, newcomers=newcomers))

        self._clock.after(self._stages.restart_seconds, up)

    def _loaded(self, epoch: int, resume: int, *, newcomers: bool) -> None:
        if epoch != self._epoch:
            return
        training, now = self.training, self._clock.now
        cold = self._stages.compile_seconds if training.size not in self._compiled else 0.0
        self._compiled.add(training.size)
        stages = self._stages
        fresh = stages.newcomer_step_seconds if newcomers else 0.0
        training.run(now, resume, first_step=stages.first_step_seconds + fresh + cold)
        for agent in self._agents():
            agent.set_phase(WorkerPhase.TRAINING, now)
        self.pace_changed()
        self._clock.at(training.end_of(training.newest_step + 1), lambda: self._completed_new_step(epoch))

    def _completed_new_step(self, epoch: int) -> None:
        if epoch != self._epoch or self.training.state is not State.RUNNING:
            return
        training, now = self.training, self._clock.now
        if training.step_at(now) <= training.newest_step:
            self._clock.at(training.end_of(training.newest_step + 1), lambda: self._completed_new_step(epoch))
            return
        for agent in self._agents():
            agent.restarts = tuple(
                record
                if record.resumed_at is not None or record.generation != agent.generation
                else record.replaced(resumed_at=now, resume_step=training.resume)
                for record in agent.restarts
            )
        step = training.step_seconds(training.size)
        self._requeue_at(tuple(now + number * 2.0 * step for number in range(1, 20)))
        self._changed()

    def pace_changed(self) -> None:
        """Apply the pace of the slowest node."""
        slowest = max((pod.slot.slowness for _, pod in self.members() if pod is not None and pod.slot), default=1.0)
        training, now = self.training, self._clock.now
        before = training.slowness
        training.set_slowness(now, slowest)
        if slowest > 1.0 and training.state is State.RUNNING:
            persists = self._spec.recovery.stragglers.persist_steps
            self._requeue_at(
                tuple(now + (steps + 0.5) * training.pace for steps in (1, 20, 20 + persists, 30 + persists))
            )
        elif before != slowest:
            # The steps are faster than when the reference was taken, perhaps.
            step = training.step_seconds(training.size) if training.size else 1.0
            self._requeue_at(tuple(now + number * 2.0 * step for number in range(1, 20)), always=True)
            self._changed()

    # --- faults ---------------------------------------------------------------------------------------------------

    def crash(self, slot: Slot) -> None:
        """End a process of the member in this place; all restart in place."""
        if self.member_on(slot) is None or self.training.state is State.IDLE:
            return
        self._stop(State.STALLED)
        self._after_unless_interrupted(
            self._stages.detect_exit_seconds, lambda at: self._restart_in_place(slot, at, Cause.CRASH, _CRASHED)
        )

    def hang(self, slot: Slot, forever: float) -> None:
        """Stall a rank, and the others with it, until its agent detects it, or for `forever` seconds."""
        if self.member_on(slot) is None or self.training.state is not State.RUNNING:
            return
        limits, step = self._spec.recovery.hang, self.training.pace
        limit = max(limits.step_floor_seconds, limits.step_factor * step) if limits.enabled else forever
        self._stop(State.STALLED)
        self._after_unless_interrupted(
            limit, lambda at: self._restart_in_place(slot, at, Cause.HANG, int(ExitCode.HUNG))
        )

    def fail_device(self, slot: Slot) -> None:
        """Break the device of the member on this slot: its agent reports a verdict, its peers wait."""
        if self.member_on(slot) is None or self.training.state is State.IDLE:
            return
        self._stop(State.STALLED)
        code, status = int(ExitCode.DEVICE_FAULT), _UNCORRECTABLE
        self._after_unless_interrupted(
            self._stages.detect_exit_seconds, lambda at: self._report_verdict(slot, at, code, status)
        )

    def diverge(self, slot: Slot) -> None:
        """Produce a loss that is not finite: skipped where the job tolerates it, else the ranks exit with its code."""
        if self.member_on(slot) is None or self.training.state is not State.RUNNING:
            return
        if self._spec.trainer is not None and self._spec.trainer.non_finite_tolerance > 0:
            return
        self._stop(State.STALLED)
        self._after_unless_interrupted(0.0, lambda at: self._report_verdict(slot, at, int(ExitCode.NUMERICAL), None))

    def power_off(self, slots: list[Slot]) -> None:
        """Cut the power of nodes: their peers wait in a collective and report nothing."""
        hit = any(self.member_on(slot) is not None for slot in slots)
        for slot in slots:
            self._workers.power_off(slot)
        if hit and self.training.state is State.RUNNING:
            self._stop(State.STALLED)
        elif hit and self.training.state in (State.JOINING, State.LOADING):
            self._stop(State.JOINING)
            for agent in self._agents():
                agent.waiting_for = self._missing()[:64]
                agent.set_phase(WorkerPhase.JOINING, self._clock.now)
        if any(True for slot in slots for _ in self._workers.pods_on(slot)):
            self._clock.after(SILENCE_REPORTED_SECONDS - HALF_A_HEARTBEAT, self._changed)

    def _stop(self, state: State) -> None:
        self._epoch += 1
        self.training.halt(self._clock.now, state)

    def _after_unless_interrupted(self, seconds: float, what: Callable[[float], None]) -> None:
        """Call `what(at)` with the time of the fault, unless another event comes first."""
        epoch, at = self._epoch, self._clock.now
        self._clock.after(seconds, lambda: what(at) if epoch == self._epoch else None)

    def _failure(self, agent: Agent, rank: int, at: float, code: int, status: int | None) -> ProcessFailure:
        return ProcessFailure(
            sequence=agent.failures[-1].sequence + 1 if agent.failures else 0,
            generation=agent.generation,
            attempt=agent.attempt,
            rank=rank,
            exit_code=code,
            step=self.training.step,
            message="simulated",
            runtime_status=status,
            at=at,
        )

    def _restart_in_place(self, slot: Slot, at: float, cause: Cause, code: int) -> None:
        found = self.member_on(slot)
        if found is None:
            return
        rank, victim = found
        now, step = self._clock.now, self.training.step
        victim.failures = (*victim.failures, self._failure(victim, rank, at, code, None))[-_NEWEST:]
        self._attempt += 1
        for agent in self._agents():
            record = RestartRecord.model_construct(
                sequence=agent.restarts[-1].sequence + 1 if agent.restarts else 0,
                generation=agent.generation,
                attempt=self._attempt,
                cause=cause if agent is victim else Cause.PEER_LOST,
                failed_at=at,
                detected_at=now,
                resumed_at=None,
                step_before=step,
                resume_step=None,
            )
            agent.restarts = (*agent.restarts, record)[-_NEWEST:]
        self._start_attempt(self.training.resume_from(self._missing()), newcomers=False)
        self._changed()

    def _report_verdict(self, slot: Slot, at: float, code: int, status: int | None) -> None:
        found = self.member_on(slot)
        if found is None:
            return
        rank, victim = found
        now = self._clock.now
        failure = self._failure(victim, rank, at, code, status)
        victim.failures = (*victim.failures, failure)[-_NEWEST:]
        victim.verdict = failure
        for agent in self._agents():
            if agent is victim:
                agent.set_phase(WorkerPhase.FAILED, now)
            else:
                agent.waiting_for = (rank,)
                agent.set_phase(WorkerPhase.JOINING, now)
        self.training.state = State.JOINING
        self._changed()

    def end_job(self) -> None:
        """End the job; only the durable checkpoint remains."""
        self._stop(State.IDLE)
        self.membership, self._attempt = None, 0
        self.training.size = 0

    # --- reports ------------------------------------------------------------------------------------------------------

    def report(self) -> RankReports:
        """Return the content of the members' heartbeats."""
        training, now = self.training, self._clock.now
        if self.membership is None:
            return RankReports(progress=None, leader="", last_step_at=None, step_seconds=None, timings={})
        training.record_progress(now)
        step, ended = training.step_at(now), training.ended_at(now)
        progress = Progress.model_construct(
            **_PROGRESS_DEFAULTS,
            step=step,
            memory_step=step,
            durable_step=training.durable,
            resume_step=training.resume,
            updated=ended,
            started=training.started,
            loaded=training.loaded,
        )
        return RankReports(
            progress=progress,
            leader=self.membership.members[0].pod_uid,
            last_step_at=ended or None,
            step_seconds=training.pace,
            timings=self._timings(step - training.resume),
        )

    def _timings(self, made: int) -> Mapping[float, StepTiming]:
        training = self.training
        clean = training.step_seconds(training.size)
        paces = {pod.slot.slowness for pod in self._workers.pods.values() if pod.slot is not None}
        of = (training.state is State.RUNNING, clean, min(_TIMED_STEPS, made), training.slowness, frozenset(paces))
        if of != self._timed_of:
            self._timed_of = of
            self._timed = {
                slowness: StepTiming.model_construct(
                    steps=of[2], step_seconds=clean * training.slowness, own_seconds=clean * slowness
                )
                for slowness in paces
                if of[0]
            }
        return self._timed


_PROGRESS_DEFAULTS = {
    name: field.default
    for name, field in Progress.model_fields.items()
    if name not in ("step", "memory_step", "durable_step", "resume_step", "updated", "started", "loaded")
}


def _is_reachable(pod: Pod) -> bool:
    """Return whether the pod's agent runs and can be reached."""
    return pod.agent is not None and pod.agent.silent_since is None
