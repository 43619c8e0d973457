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
from trainium_simulator.virtual.workers import MEAN_HEARTBEAT_AGE_SECONDS, Agent, Pod, RankReports, WorkerPods

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from trainium_contract.job import TrainingJobSpec
    from trainium_contract.wire.messages import Membership
    from trainium_simulator.stages import StageTimes
    from trainium_simulator.virtual.clock import EventClock
    from trainium_simulator.virtual.nodes import Slot

_MAX_REPORTED = 8
"""Newest failures and restarts that a heartbeat contains."""
_UNCORRECTABLE_ERROR_STATUS = 1202
"""Status of the Neuron runtime: an uncorrectable error of a core."""
_SIGSEGV = 139
_TIMED_STEPS = 50
"""Newest steps that the timings of a heartbeat cover."""


class RequeueAt(Protocol):
    """Schedules reconciles that measure step times. Without `always`, one is skipped if no measurement is missing."""

    def __call__(self, times: tuple[float, ...], *, always: bool = False) -> None:
        """Reconcile at these times (Unix seconds)."""


class TrainingRanks:
    """The ranks of one job."""

    def __init__(
        self,
        clock: EventClock,
        workers: WorkerPods,
        spec: TrainingJobSpec,
        stages: StageTimes,
        *,
        on_change: Callable[[], None],
        requeue_at: RequeueAt,
    ) -> None:
        """Start without a generation; call `on_change()` after new reports, `requeue_at()` to measure step times."""
        self.training = Training(spec, stages)
        self.membership: Membership | None = None
        """The generation in which the agents are."""
        self._clock = clock
        self._workers = workers
        self._spec = spec
        self._stages = stages
        self._on_change = on_change
        self._requeue_at = requeue_at
        self._epoch = 0
        """Number of attempts and interruptions: an event of an older epoch has no effect."""
        self._attempt = 0
        self._timings_by_slowness: dict[float, StepTiming] = {}
        self._timings_key: tuple[object, ...] | None = None
        sizes = {*spec.sizes_to_compile(), *spec.sizes_for_spares()}
        self._compiled_sizes = sizes if spec.workload.compile_command else set()

    # --- members ----------------------------------------------------------------------------------------------------

    def list_members(self) -> Iterator[tuple[int, Pod | None]]:
        """Yield the node rank and the pod of each member; None for a deleted pod."""
        by_uid = {pod.view.uid: pod for pod in self._workers.pods.values()}
        for member in self.membership.members if self.membership else ():
            yield member.node_rank, by_uid.get(member.pod_uid)

    def _list_reachable_agents(self) -> list[Agent]:
        """Return the agents of the members whose nodes have power."""
        return [
            pod.agent
            for _, pod in self.list_members()
            if pod is not None and _is_reachable(pod) and pod.agent is not None
        ]

    def _list_missing_ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank, pod in self.list_members() if pod is None or not _is_reachable(pod))

    def find_member_on_slot(self, slot: Slot) -> tuple[int, Agent] | None:
        """Return the node rank and the agent of the reachable member on this slot; None without one."""
        for rank, pod in self.list_members():
            if pod is not None and pod.slot is slot and _is_reachable(pod) and pod.agent is not None:
                return rank, pod.agent
        return None

    # --- generations ------------------------------------------------------------------------------------------------

    def publish(self, membership: Membership) -> None:
        """Publish a generation, as the coordinator does; all agents receive it at the same time."""
        delay = self._stages.estimate_publication_seconds(len(membership.members))
        self._clock.call_later(delay, lambda: self._receive_membership(membership))

    def _receive_membership(self, membership: Membership) -> None:
        if self.membership is not None and membership.generation <= self.membership.generation:
            return
        graceful = membership.transition is Transition.GRACEFUL and self.training.state is State.RUNNING
        if not graceful:
            self._enter(membership)
            return
        leave_at = self.training.stop_after_current_step(self._clock.now) + self._stages.leave_seconds
        self._epoch += 1
        epoch = self._epoch
        self._clock.call_at(leave_at, lambda: self._enter(membership, saved=True) if epoch == self._epoch else None)
        # A fault meanwhile begins another epoch, and the generation is entered at once.
        self._clock.call_at(leave_at + self._stages.leave_seconds, lambda: self._enter(membership))

    def _enter(self, membership: Membership, *, saved: bool = False) -> None:
        """Enter a generation; `saved`: all ranks left after the same step, and have it in memory."""
        if self.membership is not None and membership.generation <= self.membership.generation:
            return
        training, now = self.training, self._clock.now
        training.interrupt(now, State.JOINING)
        old_uids = {pod.view.uid for _, pod in self.list_members() if pod is not None}
        missing = self._list_missing_ranks()
        resume_step = training.step if saved and not missing else training.choose_resume_step(missing)
        old_agents = self._list_reachable_agents()
        self.membership, self._attempt = membership, 0
        new_agents = self._list_reachable_agents()
        for agent in old_agents:
            agent.generation, agent.attempt, agent.verdict, agent.waiting_for = membership.generation, 0, None, ()
            agent.set_phase(WorkerPhase.STANDBY, now)
        for agent in new_agents:
            agent.generation, agent.attempt, agent.verdict = membership.generation, 0, None
        training.size = len(membership.members)
        newcomers = any(member.pod_uid not in old_uids for member in membership.members)
        self._start_attempt(resume_step, newcomers=newcomers)
        self._on_change()

    def _start_attempt(self, resume_step: int, *, newcomers: bool) -> None:
        """Join; once all members are present their processes start, load and train."""
        training, now = self.training, self._clock.now
        self._epoch += 1
        training.state, training.started_at, training.loaded_at = State.JOINING, 0.0, 0.0
        missing = self._list_missing_ranks()
        for agent in self._list_reachable_agents():
            agent.waiting_for, agent.attempt = missing[:64], self._attempt
            agent.set_phase(WorkerPhase.JOINING, now)
        if missing:
            self._on_change()
            return
        epoch = self._epoch

        def start_loading() -> None:
            if epoch != self._epoch:
                return
            training.state, training.started_at = State.LOADING, self._clock.now
            for agent in self._list_reachable_agents():
                agent.set_phase(WorkerPhase.LOADING, self._clock.now)
            seconds = training.estimate_loading_seconds(resume_step, newcomers=newcomers)
            self._clock.call_later(seconds, lambda: self._start_training(epoch, resume_step, newcomers=newcomers))

        self._clock.call_later(self._stages.restart_seconds, start_loading)

    def _start_training(self, epoch: int, resume_step: int, *, newcomers: bool) -> None:
        if epoch != self._epoch:
            return
        training, now, stages = self.training, self._clock.now, self._stages
        compile_seconds = stages.compile_seconds if training.size not in self._compiled_sizes else 0.0
        self._compiled_sizes.add(training.size)
        newcomer_seconds = stages.newcomer_step_seconds if newcomers else 0.0
        delay = stages.first_step_seconds + newcomer_seconds + compile_seconds
        training.start_steps(now, resume_step, first_step_delay=delay)
        for agent in self._list_reachable_agents():
            agent.set_phase(WorkerPhase.TRAINING, now)
        self.apply_slowest_node()
        self._clock.call_at(
            training.find_step_end(training.newest_step + 1), lambda: self._report_first_new_step(epoch)
        )

    def _report_first_new_step(self, epoch: int) -> None:
        if epoch != self._epoch or self.training.state is not State.RUNNING:
            return
        training, now = self.training, self._clock.now
        if training.find_completed_step(now) <= training.newest_step:
            self._clock.call_at(
                training.find_step_end(training.newest_step + 1), lambda: self._report_first_new_step(epoch)
            )
            return
        for agent in self._list_reachable_agents():
            agent.restarts = tuple(
                record
                if record.resumed_at is not None or record.generation != agent.generation
                else record.replaced(resumed_at=now, resume_step=training.resume_step)
                for record in agent.restarts
            )
        step_seconds = training.compute_undisturbed_step_seconds(training.size)
        self._requeue_at(tuple(now + number * 2.0 * step_seconds for number in range(1, 20)))
        self._on_change()

    def apply_slowest_node(self) -> None:
        """Let all ranks step as slowly as the slowest node, and schedule measurements of their steps."""
        slowest = max(
            (pod.slot.slowness for _, pod in self.list_members() if pod is not None and pod.slot), default=1.0
        )
        training, now = self.training, self._clock.now
        previous = training.slowness
        training.set_slowness(now, slowest)
        if slowest > 1.0 and training.state is State.RUNNING:
            persists = self._spec.recovery.stragglers.persist_steps
            seconds = training.current_step_seconds
            self._requeue_at(tuple(now + (steps + 0.5) * seconds for steps in (1, 20, 20 + persists, 30 + persists)))
        elif previous != slowest:
            # The steps may be faster than when the reference was measured.
            step_seconds = training.compute_undisturbed_step_seconds(training.size) if training.size else 1.0
            self._requeue_at(tuple(now + number * 2.0 * step_seconds for number in range(1, 20)), always=True)
            self._on_change()

    # --- faults ---------------------------------------------------------------------------------------------------

    def crash_process(self, slot: Slot) -> None:
        """End a process of the member on this slot; all ranks restart in place."""
        if self.find_member_on_slot(slot) is None or self.training.state is State.IDLE:
            return
        self._interrupt(State.STALLED)
        self._call_later_unless_interrupted(
            self._stages.detect_exit_seconds, lambda at: self._restart_in_place(slot, at, Cause.CRASH, _SIGSEGV)
        )

    def hang_process(self, slot: Slot, undetected_seconds: float) -> None:
        """Stall all ranks until the agent detects the hang, or for `undetected_seconds` without hang detection."""
        if self.find_member_on_slot(slot) is None or self.training.state is not State.RUNNING:
            return
        hang, step_seconds = self._spec.recovery.hang, self.training.current_step_seconds
        timeout = max(hang.step_floor_seconds, hang.step_factor * step_seconds) if hang.enabled else undetected_seconds
        self._interrupt(State.STALLED)
        self._call_later_unless_interrupted(
            timeout, lambda at: self._restart_in_place(slot, at, Cause.HANG, int(ExitCode.HUNG))
        )

    def fail_device(self, slot: Slot) -> None:
        """Break the device of the member on this slot: its agent reports a verdict, its peers wait."""
        if self.find_member_on_slot(slot) is None or self.training.state is State.IDLE:
            return
        self._interrupt(State.STALLED)
        code, runtime_status = int(ExitCode.DEVICE_FAULT), _UNCORRECTABLE_ERROR_STATUS
        self._call_later_unless_interrupted(
            self._stages.detect_exit_seconds, lambda at: self._report_verdict(slot, at, code, runtime_status)
        )

    def produce_nonfinite_loss(self, slot: Slot) -> None:
        """Produce a loss that is not finite: skipped where the job tolerates it, else the ranks exit with its code."""
        if self.find_member_on_slot(slot) is None or self.training.state is not State.RUNNING:
            return
        if self._spec.workload.skips_nonfinite_steps:
            return
        self._interrupt(State.STALLED)
        code = int(ExitCode.NUMERICAL)
        self._call_later_unless_interrupted(0.0, lambda at: self._report_verdict(slot, at, code, None))

    def power_off(self, slots: list[Slot]) -> None:
        """Cut the power of nodes: their peers wait in a collective and report nothing."""
        members_are_hit = any(self.find_member_on_slot(slot) is not None for slot in slots)
        for slot in slots:
            self._workers.power_off(slot)
        if members_are_hit and self.training.state is State.RUNNING:
            self._interrupt(State.STALLED)
        elif members_are_hit and self.training.state in (State.JOINING, State.LOADING):
            self._interrupt(State.JOINING)
            for agent in self._list_reachable_agents():
                agent.waiting_for = self._list_missing_ranks()[:64]
                agent.set_phase(WorkerPhase.JOINING, self._clock.now)
        if any(True for slot in slots for _ in self._workers.list_pods_on(slot)):
            self._clock.call_later(SILENCE_REPORTED_SECONDS - MEAN_HEARTBEAT_AGE_SECONDS, self._on_change)

    def _interrupt(self, state: State) -> None:
        self._epoch += 1
        self.training.interrupt(self._clock.now, state)

    def _call_later_unless_interrupted(self, seconds: float, callback: Callable[[float], None]) -> None:
        """Call `callback(at)` after a delay in seconds, where `at` is now, unless another event comes first."""
        epoch, at = self._epoch, self._clock.now
        self._clock.call_later(seconds, lambda: callback(at) if epoch == self._epoch else None)

    def _add_failure(self, agent: Agent, rank: int, at: float, code: int, runtime_status: int | None) -> ProcessFailure:
        failure = ProcessFailure(
            sequence=agent.failures[-1].sequence + 1 if agent.failures else 0,
            generation=agent.generation,
            attempt=agent.attempt,
            rank=rank,
            exit_code=code,
            step=self.training.step,
            message="simulated",
            runtime_status=runtime_status,
            at=at,
        )
        agent.failures = (*agent.failures, failure)[-_MAX_REPORTED:]
        return failure

    def _restart_in_place(self, slot: Slot, at: float, cause: Cause, code: int) -> None:
        member = self.find_member_on_slot(slot)
        if member is None:
            return
        rank, failed_agent = member
        now, step = self._clock.now, self.training.step
        self._add_failure(failed_agent, rank, at, code, None)
        self._attempt += 1
        for agent in self._list_reachable_agents():
            record = RestartRecord.model_construct(
                sequence=agent.restarts[-1].sequence + 1 if agent.restarts else 0,
                generation=agent.generation,
                attempt=self._attempt,
                cause=cause if agent is failed_agent else Cause.PEER_LOST,
                failed_at=at,
                detected_at=now,
                resumed_at=None,
                step_before=step,
                resume_step=None,
            )
            agent.restarts = (*agent.restarts, record)[-_MAX_REPORTED:]
        self._start_attempt(self.training.choose_resume_step(self._list_missing_ranks()), newcomers=False)
        self._on_change()

    def _report_verdict(self, slot: Slot, at: float, code: int, runtime_status: int | None) -> None:
        member = self.find_member_on_slot(slot)
        if member is None:
            return
        rank, failed_agent = member
        now = self._clock.now
        failed_agent.verdict = self._add_failure(failed_agent, rank, at, code, runtime_status)
        for agent in self._list_reachable_agents():
            if agent is failed_agent:
                agent.set_phase(WorkerPhase.FAILED, now)
            else:
                agent.waiting_for = (rank,)
                agent.set_phase(WorkerPhase.JOINING, now)
        self.training.state = State.JOINING
        self._on_change()

    def end_job(self) -> None:
        """Stop all ranks for good; only the durable checkpoint remains."""
        self._interrupt(State.IDLE)
        self.membership, self._attempt = None, 0
        self.training.size = 0

    # --- reports ------------------------------------------------------------------------------------------------------

    def build_reports(self) -> RankReports:
        """Return the content of the members' heartbeats."""
        training, now = self.training, self._clock.now
        if self.membership is None:
            return RankReports(progress=None, first_rank_pod="", last_step_at=None, step_seconds=None, timings={})
        training.record_progress(now)
        step, step_end = training.find_completed_step(now), training.find_completed_step_end(now)
        progress = Progress.model_construct(
            **_PROGRESS_DEFAULTS,
            step=step,
            memory_step=step,
            durable_step=training.durable_step,
            resume_step=training.resume_step,
            updated=step_end,
            started=training.started_at,
            loaded=training.loaded_at,
        )
        return RankReports(
            progress=progress,
            first_rank_pod=self.membership.members[0].pod_uid,
            last_step_at=step_end or None,
            step_seconds=training.current_step_seconds,
            timings=self._list_step_timings(step - training.resume_step),
        )

    def _list_step_timings(self, completed_steps: int) -> Mapping[float, StepTiming]:
        training = self.training
        step_seconds = training.compute_undisturbed_step_seconds(training.size)
        factors = {pod.slot.slowness for pod in self._workers.pods.values() if pod.slot is not None}
        is_running, steps = training.state is State.RUNNING, min(_TIMED_STEPS, completed_steps)
        key = (is_running, step_seconds, steps, training.slowness, frozenset(factors))
        if key != self._timings_key:
            self._timings_key = key
            self._timings_by_slowness = {
                slowness: StepTiming.model_construct(
                    steps=steps, step_seconds=step_seconds * training.slowness, own_seconds=step_seconds * slowness
                )
                for slowness in factors
                if is_running
            }
        return self._timings_by_slowness


_PROGRESS_DEFAULTS = {
    name: field.default
    for name, field in Progress.model_fields.items()
    if name not in ("step", "memory_step", "durable_step", "resume_step", "updated", "started", "loaded")
}


def _is_reachable(pod: Pod) -> bool:
    """Return whether the pod's agent runs and can be reached."""
    return pod.agent is not None and pod.agent.silent_since is None
