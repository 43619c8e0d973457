"""The state machine of a pod, one generation after another, in the form of `generation.py`.

Guarantees:
- At most one generation runs, and a newer membership always wins.
- No generation starts before the node's checks and the compiler for other sizes have ended, because they hold the
  devices.
- The pod ends once, and with a verdict that ends the job only when the coordinator has acknowledged it and no newer
  generation has arrived.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from trainium_agent.lifecycle.events import GenerationEnd, Order
from trainium_contract.exit_codes import ExitCode

_ACKNOWLEDGE_SECONDS = 10.0
_PEERS_SECONDS = 3.0
"""For the other agents to read in this one's store that the generation has stopped."""


@dataclass(frozen=True, slots=True)
class MembershipReceived:
    """A newer generation is known."""

    generation: int
    immediate: bool = False
    member: bool = False
    """This pod is in it."""


class Notice(StrEnum):
    """Events without details."""

    NODE_UNFIT = "NodeUnfit"
    """This pod can take part in none: its environment or its node."""
    NODE_CHECKED = "NodeChecked"
    """The node's checks have ended, or never began."""
    COMPILER_ENDED = "CompilerEnded"
    """Nothing is compiled for other sizes."""
    TERMINATE = "Terminate"
    """The pod is to end."""
    JOB_DELETED = "JobDeleted"
    """The job no longer exists, so nobody needs what the ranks would save."""
    TICK = "Tick"
    """It is later."""


@dataclass(frozen=True, slots=True)
class GenerationOver:
    """No rank is alive."""

    outcome: GenerationEnd
    yielded: bool


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The coordinator knows that this pod has finished the generation."""

    generation: int


@dataclass(frozen=True, slots=True)
class VerdictAcknowledged:
    """The coordinator knows why this pod gave up in that generation, and it is what ends the job; no rank is alive."""

    generation: int


Event = Notice | MembershipReceived | GenerationOver | Acknowledged | VerdictAcknowledged


@dataclass(frozen=True, slots=True)
class BeginGeneration:
    """Take part in the newest generation."""

    generation: int


@dataclass(frozen=True, slots=True)
class Idle:
    """Be a spare of the newest generation, and compile."""

    generation: int


@dataclass(frozen=True, slots=True)
class StopCompiler:
    """The devices are wanted."""


@dataclass(frozen=True, slots=True)
class LeaveGeneration:
    """Have the generation that is under way end."""

    order: Order
    superseded_by: int = 0


@dataclass(frozen=True, slots=True)
class ReportGeneration:
    """Report that the generation is known, though this pod cannot take part."""

    generation: int


@dataclass(frozen=True, slots=True)
class LeavePod:
    """End the pod with this code; None for that of its verdict, if it has one."""

    code: int | None


Action = BeginGeneration | Idle | StopCompiler | LeaveGeneration | ReportGeneration | LeavePod


@dataclass(frozen=True, slots=True)
class Pod:
    """All that decides what the pod does next."""

    check_seconds: float
    """How long the node's checks may keep a generation waiting."""
    newest: MembershipReceived = MembershipReceived(0)
    done: int = 0
    """Newest generation that was taken part in, or passed by."""
    running: int = 0
    """The one that is under way."""
    checked: bool = False
    unfit: bool = False
    compiling: bool = False
    stopping: bool = False
    finished: int = 0
    """Generation whose end is still to be known to the coordinator."""
    known_finished: int = 0
    terminating: bool = False
    yielded: bool = False
    deadline: float | None = None
    """When what is waited for is no longer; monotonic seconds."""
    ends_at: float | None = None
    """When the pod ends with its verdict, so that its log stays; monotonic seconds."""
    left: bool = False

    @property
    def wake_at(self) -> float | None:
        """When it is to be acknowledged that it is later; None while only events lead on."""
        return min((at for at in (self.deadline, self.ends_at) if at is not None), default=None)


_Answer = tuple[Pod, tuple[Action, ...]]


def step(pod: Pod, event: Event, now: float) -> _Answer:
    """Record the event and decide all that can be decided now."""
    if pod.left:
        return pod, ()
    pod, actions = _record(pod, event, now)
    while not pod.left:
        decided = _decide(pod, now)
        if decided is None:
            break
        pod, more = decided
        actions = (*actions, *more)
    return pod, actions


def _record(pod: Pod, event: Event, now: float) -> _Answer:
    match event:
        case MembershipReceived():
            return _receive_membership(pod, event)
        case Notice.NODE_UNFIT:
            return replace(pod, unfit=True, checked=True), ()
        case Notice.NODE_CHECKED:
            return replace(pod, checked=True), ()
        case Notice.COMPILER_ENDED:
            return replace(pod, compiling=False, stopping=False), ()
        case GenerationOver():
            over = replace(pod, running=0, yielded=event.yielded)
            if event.outcome is GenerationEnd.FINISHED:
                return replace(over, finished=pod.running, deadline=now + _ACKNOWLEDGE_SECONDS), ()
            return over, ()
        case Acknowledged():
            return replace(pod, known_finished=max(pod.known_finished, event.generation)), ()
        case VerdictAcknowledged(generation):
            late = pod.ends_at is not None or generation < pod.newest.generation
            return (pod if late else replace(pod, ends_at=now + _PEERS_SECONDS)), ()
        case Notice.TERMINATE | Notice.JOB_DELETED:
            ending = replace(pod, terminating=True)
            if not pod.running:
                return replace(ending, left=True), (LeavePod(None),)
            order = Order.TERMINATE if event is Notice.TERMINATE else Order.IMMEDIATE
            return ending, (LeaveGeneration(order),)
        case Notice.TICK:
            return pod, ()


def _receive_membership(pod: Pod, received: MembershipReceived) -> _Answer:
    if received.generation <= pod.newest.generation:
        return pod, ()
    known = (ReportGeneration(received.generation),) if pod.unfit else ()
    pod = replace(pod, newest=received, ends_at=None)
    if not pod.running:
        return pod, known
    order = Order.IMMEDIATE if received.immediate else Order.GRACEFUL
    return pod, (*known, LeaveGeneration(order, received.generation))


def _decide(pod: Pod, now: float) -> _Answer | None:
    newest = pod.newest.generation
    if pod.ends_at is not None and now >= pod.ends_at:
        return replace(pod, left=True), (LeavePod(None),)
    if pod.running:
        return None
    if pod.finished and newest <= pod.finished:
        acknowledged = (
            pod.known_finished >= pod.finished or pod.terminating or (pod.deadline is not None and now >= pod.deadline)
        )
        return (replace(pod, left=True), (LeavePod(ExitCode.FINISHED),)) if acknowledged else None
    if pod.finished:
        return replace(pod, finished=0, deadline=None), ()
    if pod.terminating:
        return replace(pod, left=True), (LeavePod(ExitCode.YIELDING if pod.yielded else ExitCode.FINISHED),)
    if newest <= pod.done:
        return None
    if not pod.checked:
        if pod.deadline is None:
            return replace(pod, deadline=now + pod.check_seconds), ()
        if now < pod.deadline:
            return None
    return _next_generation(replace(pod, checked=True, deadline=None))


def _next_generation(pod: Pod) -> _Answer | None:
    newest = pod.newest.generation
    if pod.unfit:
        return replace(pod, done=newest), ()
    if pod.stopping:
        return None
    if not pod.newest.member:
        return replace(pod, done=newest, compiling=True), (Idle(newest),)
    if pod.compiling:
        return replace(pod, stopping=True), (StopCompiler(),)
    return replace(pod, done=newest, running=newest), (BeginGeneration(newest),)
