"""Decide the next state and actions of a pod through its generations, in the same form as `generation.py`.

Guarantees:
- At most one generation runs, and a newer membership always wins.
- No generation starts before the node's checks and the compiler for other sizes have ended, because they hold the
  devices.
- The pod ends once. With a verdict that ends the job it ends only after the coordinator acknowledged the verdict and if
  no newer generation has arrived.
- The pod ends with code 0 only after a generation whose ranks all ended with code 0 by themselves, on every member.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from trainium_agent.lifecycle.events import GenerationOutcome, Order
from trainium_contract.exit_codes import ExitCode

_ACKNOWLEDGE_SECONDS = 10.0
_PEERS_SECONDS = 3.0
"""Time for the other agents to read in this agent's store that the generation has stopped."""


@dataclass(frozen=True, slots=True)
class MembershipReceived:
    """A newer generation was received."""

    generation: int
    immediate: bool = False
    member: bool = False
    """Whether this pod is a member."""


class SimpleEvent(StrEnum):
    """Events without arguments."""

    NODE_UNFIT = "NodeUnfit"
    """This pod cannot take part in any generation, because of its environment or its node."""
    NODE_CHECKED = "NodeChecked"
    """The node's checks have ended, or were never started."""
    COMPILER_ENDED = "CompilerEnded"
    """The compilation for other sizes has ended."""
    TERMINATE = "Terminate"
    """The pod was asked to end."""
    JOB_DELETED = "JobDeleted"
    """The job no longer exists, so nobody needs what the ranks would save."""
    TICK = "Tick"
    """A time of `wake_at` has come."""


@dataclass(frozen=True, slots=True)
class GenerationEnded:
    """The generation ended on this pod; no rank is alive."""

    outcome: GenerationOutcome


@dataclass(frozen=True, slots=True)
class FinishAcknowledged:
    """The coordinator acknowledged that this pod has finished the generation."""

    generation: int


@dataclass(frozen=True, slots=True)
class VerdictAcknowledged:
    """The coordinator acknowledged the verdict of this pod in that generation, which ends the job; no rank is alive."""

    generation: int


Event = SimpleEvent | MembershipReceived | GenerationEnded | FinishAcknowledged | VerdictAcknowledged


@dataclass(frozen=True, slots=True)
class StartGeneration:
    """Start this pod's part of the newest generation."""

    generation: int


@dataclass(frozen=True, slots=True)
class BecomeSpare:
    """Wait as a spare of the newest generation, and compile for other sizes."""

    generation: int


@dataclass(frozen=True, slots=True)
class StopCompiler:
    """Stop the compiler, because ranks need the devices."""


@dataclass(frozen=True, slots=True)
class LeaveGeneration:
    """Order the running generation to end."""

    order: Order
    superseded_by: int = 0


@dataclass(frozen=True, slots=True)
class ReportGeneration:
    """Report that the generation was received, although this pod cannot take part."""

    generation: int


@dataclass(frozen=True, slots=True)
class ExitPod:
    """End the pod with this code; None for the code of its verdict, else 75, because it was asked to end."""

    code: int | None


Action = StartGeneration | BecomeSpare | StopCompiler | LeaveGeneration | ReportGeneration | ExitPod


@dataclass(frozen=True, slots=True)
class Pod:
    """The state of a pod."""

    check_seconds: float
    """Longest time that a generation waits for the node's checks."""
    newest: MembershipReceived = MembershipReceived(0)
    last_handled: int = 0
    """Newest generation that is over for this pod or that was skipped."""
    running: int = 0
    """The generation that runs."""
    checked: bool = False
    unfit: bool = False
    compiling: bool = False
    stopping: bool = False
    finished: int = 0
    """Finished generation that the coordinator has not acknowledged yet."""
    acknowledged_finish: int = 0
    terminating: bool = False
    deadline: float | None = None
    """End of the current wait; monotonic seconds."""
    ends_at: float | None = None
    """When the pod ends with its verdict, late enough for its log to be kept; monotonic seconds."""
    has_exited: bool = False

    @property
    def wake_at(self) -> float | None:
        """When a TICK is needed; None while only other events matter."""
        return min((at for at in (self.deadline, self.ends_at) if at is not None), default=None)


_StepResult = tuple[Pod, tuple[Action, ...]]


def step(pod: Pod, event: Event, now: float) -> _StepResult:
    """Record the event and make all decisions that are possible now."""
    if pod.has_exited:
        return pod, ()
    pod, actions = _record(pod, event, now)
    while not pod.has_exited:
        decided = _decide(pod, now)
        if decided is None:
            break
        pod, more = decided
        actions = (*actions, *more)
    return pod, actions


def _record(pod: Pod, event: Event, now: float) -> _StepResult:
    match event:
        case MembershipReceived():
            return _receive_membership(pod, event)
        case SimpleEvent.NODE_UNFIT:
            return replace(pod, unfit=True, checked=True), ()
        case SimpleEvent.NODE_CHECKED:
            return replace(pod, checked=True), ()
        case SimpleEvent.COMPILER_ENDED:
            return replace(pod, compiling=False, stopping=False), ()
        case GenerationEnded():
            ended = replace(pod, running=0)
            if event.outcome is GenerationOutcome.FINISHED:
                return replace(ended, finished=pod.running, deadline=now + _ACKNOWLEDGE_SECONDS), ()
            return ended, ()
        case FinishAcknowledged():
            return replace(pod, acknowledged_finish=max(pod.acknowledged_finish, event.generation)), ()
        case VerdictAcknowledged(generation):
            is_late = pod.ends_at is not None or generation < pod.newest.generation
            return (pod if is_late else replace(pod, ends_at=now + _PEERS_SECONDS)), ()
        case SimpleEvent.TERMINATE | SimpleEvent.JOB_DELETED:
            terminated = replace(pod, terminating=True)
            if not pod.running:
                return terminated, ()
            order = Order.TERMINATE if event is SimpleEvent.TERMINATE else Order.IMMEDIATE
            return terminated, (LeaveGeneration(order),)
        case SimpleEvent.TICK:
            return pod, ()


def _receive_membership(pod: Pod, received: MembershipReceived) -> _StepResult:
    if received.generation <= pod.newest.generation:
        return pod, ()
    reports = (ReportGeneration(received.generation),) if pod.unfit else ()
    pod = replace(pod, newest=received, ends_at=None)
    if not pod.running:
        return pod, reports
    order = Order.IMMEDIATE if received.immediate else Order.GRACEFUL
    return pod, (*reports, LeaveGeneration(order, received.generation))


def _decide(pod: Pod, now: float) -> _StepResult | None:
    newest = pod.newest.generation
    if pod.ends_at is not None and now >= pod.ends_at:
        return replace(pod, has_exited=True), (ExitPod(None),)
    if pod.running:
        return None
    if pod.finished and newest <= pod.finished:
        can_exit = (
            pod.acknowledged_finish >= pod.finished
            or pod.terminating
            or (pod.deadline is not None and now >= pod.deadline)
        )
        return (replace(pod, has_exited=True), (ExitPod(ExitCode.FINISHED),)) if can_exit else None
    if pod.finished:
        return replace(pod, finished=0, deadline=None), ()
    if pod.terminating:
        return replace(pod, has_exited=True), (ExitPod(None),)
    if newest <= pod.last_handled:
        return None
    if not pod.checked:
        if pod.deadline is None:
            return replace(pod, deadline=now + pod.check_seconds), ()
        if now < pod.deadline:
            return None
    return _next_generation(replace(pod, checked=True, deadline=None))


def _next_generation(pod: Pod) -> _StepResult | None:
    newest = pod.newest.generation
    if pod.unfit:
        return replace(pod, last_handled=newest), ()
    if pod.stopping:
        return None
    if not pod.newest.member:
        return replace(pod, last_handled=newest, compiling=True), (BecomeSpare(newest),)
    if pod.compiling:
        return replace(pod, stopping=True), (StopCompiler(),)
    return replace(pod, last_handled=newest, running=newest), (StartGeneration(newest),)
