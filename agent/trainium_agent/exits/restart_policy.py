"""Decide what a pod does about an exit: a pure function of the exit, the shared state and the limits.

Guarantees:
- All agents of a generation share the state through its store, so each of them decides alike and failures at the same
  moment count once.
- A step is new only when no rank had completed it before, so re-computed steps never refill the budget. Stages after
  the last step count as progress (`Report.reached`).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

from trainium_contract.faults.causes import Blame, Cause
from trainium_contract.faults.classify import Verdict, classify_exit_code
from trainium_contract.faults.responses import Response

_FIRST_BACKOFF_SECONDS = 1.0
_LONGEST_BACKOFF_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class GenerationState:
    """The shared state of the agents of one generation; one value in the store, changed by compare-and-set."""

    attempt: int = 0
    """Restarts in place so far."""
    cause: Cause = Cause.RESIZE
    """Why the present attempt began."""
    previous: Cause = Cause.RESIZE
    """Why the attempt before it began."""
    fruitless: int = 0
    """Restarts in a row without a new completed step, or new progress in a stage after the last, between them."""
    storage_failures: int = 0
    """The same for unavailable storage, which has its own limit: none."""
    best_step: float = -1
    """How far the job is known to have come, as `Report.reached`: the highest step completed, -1 for none."""
    early_crash: int | None = None
    """Exit code of the crash that began the present attempt, while the job has not completed any step."""
    stopped: int | None = None
    """Exit code that ended the generation with a verdict."""
    broken: bool = False
    """A rank died while the ranks were asked to save and leave, so the others need not wait for it."""
    leaving: bool = False
    """A member's pod is ending, so only a newer generation can go on."""
    superseded: int = 0
    """A newer generation that some member knows."""
    inquiry: int = 0
    """Counts the times that an agent asked all others about stalled ranks."""
    asked_in: int = -1
    """Attempt that the newest inquiry is about."""
    asked_by: int = -1
    """Node rank that collects its answers."""
    unexplained: int = 0
    """Collective failures and hangs without a culprit since the last pairwise test."""

    def encode(self) -> str:
        """Return the value as text."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def decode(text: bytes | str) -> GenerationState:
        """Decode a text; fields that a newer agent added are ignored."""
        body = json.loads(text)
        known = {name: body[name] for name in GenerationState.__dataclass_fields__ if name in body}
        causes = {name: Cause(known.get(name, Cause.RESIZE)) for name in ("cause", "previous")}
        return GenerationState(**{**known, **causes})


class Decision(StrEnum):
    """The decision about an unrequested exit."""

    RESTART = "Restart"
    """All ranks of the generation restart in place."""
    GIVE_UP = "GiveUp"
    """The generation stops with this exit as its verdict."""
    WITHDRAW = "Withdraw"
    """This pod leaves with a verdict; the others wait for its replacement."""


@dataclass(frozen=True, slots=True)
class RestartJudgement:
    """A decision and the shared state that it leads to."""

    decision: Decision
    state: GenerationState
    backoff_seconds: float = 0.0
    """How long this pod waits before it joins again."""


def judge(
    code: int,
    attempt: int,
    best_step: float,
    state: GenerationState,
    limit: int,
    *,
    verdict: Verdict | None = None,
    seen_before: bool = False,
) -> RestartJudgement:
    """Decide about a rank that ended with `code` (neither 0 nor 75) during `attempt`.

    `best_step` is the progress that this pod has observed (`Report.reached`), `limit` how many restarts in a row may
    pass without progress. When the state is already at a later attempt, the failure has been counted by someone else.
    `verdict` is what all signs of the exit together mean (default: what its code means), `seen_before` whether this
    node has failed for the same cause before.
    """
    verdict = verdict or classify_exit_code(code)
    response = verdict.repeated if seen_before or _repeats(verdict, attempt, best_step, state) else verdict.response
    if response is Response.STOP:
        return RestartJudgement(Decision.GIVE_UP, replace(state, stopped=code))
    best = max(best_step, state.best_step)
    counted = state.attempt > attempt
    progressed = best > state.best_step
    if response in (Response.REPLACE_NODE, Response.REPLACE_WORKER):
        return RestartJudgement(Decision.WITHDRAW, state if counted else _next(state, verdict.cause, best, 0, None))
    if response is Response.RETRY_WITH_BACKOFF:
        failures = 1 if progressed else state.storage_failures + 1
        backoff = min(_FIRST_BACKOFF_SECONDS * 2.0 ** (failures - 1), _LONGEST_BACKOFF_SECONDS)
        after = (
            state
            if counted
            else replace(_next(state, verdict.cause, best, state.fruitless, None), storage_failures=failures)
        )
        return RestartJudgement(Decision.RESTART, after, backoff)
    early = code if verdict.cause is Cause.CRASH and best < 0 else None
    if counted:
        return RestartJudgement(Decision.RESTART, _with_culprit(state, attempt, verdict.cause, early))
    if early is not None and state.attempt > 0 and state.early_crash == code:
        return RestartJudgement(Decision.GIVE_UP, replace(state, stopped=code))
    fruitless = 1 if progressed else state.fruitless + 1
    if fruitless > limit:
        return RestartJudgement(Decision.GIVE_UP, replace(state, stopped=code))
    return RestartJudgement(Decision.RESTART, _next(state, verdict.cause, best, fruitless, early))


def _repeats(verdict: Verdict, attempt: int, best_step: float, state: GenerationState) -> bool:
    """Return whether a user's error started this attempt too, without a new step since: a restart does not help.

    A victim may have started the next attempt already; then the state reports the one before.
    """
    if verdict.blame is not Blame.USER or attempt == 0:
        return False
    if state.attempt == attempt:
        return state.cause is verdict.cause and best_step <= state.best_step
    return state.attempt == attempt + 1 and state.previous is verdict.cause and state.fruitless > 1


def after_yield(attempt: int, best_step: float, state: GenerationState) -> GenerationState:
    """Return the state after all ranks left with 75 and nobody sent a newer generation: the next attempt, uncounted."""
    if state.attempt > attempt:
        return state
    return _next(state, Cause.YIELDED, max(best_step, state.best_step), state.fruitless, state.early_crash)


def _with_culprit(state: GenerationState, attempt: int, cause: Cause, early: int | None) -> GenerationState:
    """Return the state with the real cause, should a victim of this very failure have counted it first."""
    if state.attempt != attempt + 1 or state.cause is not Cause.PEER_LOST or cause is Cause.PEER_LOST:
        return state
    return replace(state, cause=cause, early_crash=early)


def _next(state: GenerationState, cause: Cause, best: float, fruitless: int, early: int | None) -> GenerationState:
    return replace(
        state,
        attempt=state.attempt + 1,
        cause=cause,
        previous=state.cause,
        best_step=best,
        fruitless=fruitless,
        early_crash=early,
    )
