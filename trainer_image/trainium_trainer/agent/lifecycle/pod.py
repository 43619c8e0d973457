"""The life of a pod, one generation after another, as a pure function like that of a generation (`generation.py`).

Invariants: at most one generation is under way; a newer membership always wins; no generation is begun before the
node's checks and the compiler for other sizes have ended, since they hold the devices; the pod is left once, and with a
verdict that ends the job only when the coordinator knows it and no newer generation has come.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainium_contract.exit_codes import ExitCode
from trainium_trainer.agent.lifecycle.events import GenerationEnd, Order

_ACKNOWLEDGE_SECONDS = 10.0
_PEERS_SECONDS = 3.0
"""For the other agents to read in this one's store that the generation has stopped."""


@dataclass(frozen=True, slots=True)
class Came:
    """A newer generation is known."""

    generation: int
    immediate: bool = False
    member: bool = False
    """This pod is in it."""


@dataclass(frozen=True, slots=True)
class Unfit:
    """This pod can take part in none: its environment or its node."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The node's checks have ended, or never began."""


@dataclass(frozen=True, slots=True)
class CompilerEnded:
    """Nothing is compiled for other sizes."""


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
class VerdictTaken:
    """The coordinator knows why this pod gave up in that generation, and it is what ends the job; no rank is alive."""

    generation: int


@dataclass(frozen=True, slots=True)
class Terminate:
    """The pod is to end."""


@dataclass(frozen=True, slots=True)
class JobDeleted:
    """The job no longer exists, so nobody needs what the ranks would save."""


@dataclass(frozen=True, slots=True)
class Later:
    """It is later."""


Event = (
    Came | Unfit | Checked | CompilerEnded | GenerationOver | Acknowledged | VerdictTaken | Terminate | JobDeleted
    | Later
)  # fmt: skip


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
class Know:
    """Report that the generation is known, though this pod cannot take part."""

    generation: int


@dataclass(frozen=True, slots=True)
class LeavePod:
    """End the pod with this code; None for that of its verdict, if it has one."""

    code: int | None


Action = BeginGeneration | Idle | StopCompiler | LeaveGeneration | Know | LeavePod


@dataclass(frozen=True, slots=True)
class Pod:
    """All that decides what the pod does next."""

    check_seconds: float
    """How long the node's checks may keep a generation waiting."""
    newest: Came = Came(0)
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
    due: float | None = None
    """When what is waited for is no longer; monotonic seconds."""
    ends_at: float | None = None
    """When the pod ends with its verdict, so that its log stays; monotonic seconds."""
    left: bool = False

    @property
    def wake_at(self) -> float | None:
        """When it is to be told that it is later; None while only events lead on."""
        return min((at for at in (self.due, self.ends_at) if at is not None), default=None)


_Answer = tuple[Pod, tuple[Action, ...]]


def step(pod: Pod, event: Event, now: float) -> _Answer:
    """Take down the event and decide all that can be decided now."""
    if pod.left:
        return pod, ()
    pod, actions = _take(pod, event, now)
    while not pod.left:
        follows = _follows(pod, now)
        if follows is None:
            break
        pod, more = follows
        actions = (*actions, *more)
    return pod, actions


def _take(pod: Pod, event: Event, now: float) -> _Answer:
    match event:
        case Came():
            return _came(pod, event)
        case Unfit():
            return replace(pod, unfit=True, checked=True), ()
        case Checked():
            return replace(pod, checked=True), ()
        case CompilerEnded():
            return replace(pod, compiling=False, stopping=False), ()
        case GenerationOver():
            over = replace(pod, running=0, yielded=event.yielded)
            if event.outcome is GenerationEnd.FINISHED:
                return replace(over, finished=pod.running, due=now + _ACKNOWLEDGE_SECONDS), ()
            return over, ()
        case Acknowledged():
            return replace(pod, known_finished=max(pod.known_finished, event.generation)), ()
        case VerdictTaken(generation):
            late = pod.ends_at is not None or generation < pod.newest.generation
            return (pod if late else replace(pod, ends_at=now + _PEERS_SECONDS)), ()
        case Terminate() | JobDeleted():
            ending = replace(pod, terminating=True)
            if not pod.running:
                return replace(ending, left=True), (LeavePod(None),)
            order = Order.TERMINATE if isinstance(event, Terminate) else Order.IMMEDIATE
            return ending, (LeaveGeneration(order),)
        case Later():
            return pod, ()


def _came(pod: Pod, came: Came) -> _Answer:
    if came.generation <= pod.newest.generation:
        return pod, ()
    known = (Know(came.generation),) if pod.unfit else ()
    pod = replace(pod, newest=came, ends_at=None)
    if not pod.running:
        return pod, known
    order = Order.IMMEDIATE if came.immediate else Order.GRACEFUL
    return pod, (*known, LeaveGeneration(order, came.generation))


def _follows(pod: Pod, now: float) -> _Answer | None:
    newest = pod.newest.generation
    if pod.ends_at is not None and now >= pod.ends_at:
        return replace(pod, left=True), (LeavePod(None),)
    if pod.running:
        return None
    if pod.finished and newest <= pod.finished:
        told = pod.known_finished >= pod.finished or pod.terminating or (pod.due is not None and now >= pod.due)
        return (replace(pod, left=True), (LeavePod(ExitCode.FINISHED),)) if told else None
    if pod.finished:
        return replace(pod, finished=0, due=None), ()
    if pod.terminating:
        return replace(pod, left=True), (LeavePod(ExitCode.YIELDING if pod.yielded else ExitCode.FINISHED),)
    if newest <= pod.done:
        return None
    if not pod.checked:
        if pod.due is None:
            return replace(pod, due=now + pod.check_seconds), ()
        if now < pod.due:
            return None
    return _next_generation(replace(pod, checked=True, due=None))


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
