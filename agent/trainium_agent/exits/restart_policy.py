"""Decide what a pod does about an exit: a pure function of the exit, the shared state and the limits.

Guarantees:
- All agents of a generation share the state through its store, so all make the same decision, and simultaneous failures
  count once.
- A step is new only if no rank had completed it before, so recomputed steps never refill the budget. Stages after the
  last step count as progress (`PodReport.best_progress`).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

from trainium_contract.exit_codes import is_killed
from trainium_contract.faults.causes import Blame, Cause
from trainium_contract.faults.classify import Classification, classify_exit_code
from trainium_contract.faults.responses import Response

_FIRST_BACKOFF_SECONDS = 1.0
_MAX_BACKOFF_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class GenerationState:
    """The state that the agents of one generation share: one value in the store, changed by compare-and-set."""

    attempt: int = 0
    """Number of restarts in place so far."""
    cause: Cause = Cause.RESIZE
    """Cause of the current attempt."""
    previous_cause: Cause = Cause.RESIZE
    """Cause of the previous attempt."""
    restarts_without_progress: int = 0
    """Consecutive restarts without a new completed step, or new progress in a stage after the last step."""
    storage_failures: int = 0
    """Consecutive restarts because of unavailable storage, which have no limit."""
    best_progress: float = -1
    """Progress of the job, as in `PodReport.best_progress`: the highest completed step, -1 for none."""
    early_crash: int | None = None
    """Exit code of the crash that started the current attempt, while the job has not completed any step."""
    stopped: int | None = None
    """Exit code that ended the generation with a verdict."""
    broken: bool = False
    """A rank died after the ranks were asked to save and exit, so the others need not wait for it."""
    leaving: bool = False
    """A member's pod is ending, so only a newer generation can continue."""
    superseded_by: int = 0
    """The newest generation that a member has received."""
    inquiry: int = 0
    """Number of inquiries: an agent asks all others about stalled ranks."""
    inquiry_attempt: int = -1
    """Attempt of the newest inquiry."""
    inquiry_node_rank: int = -1
    """Node rank that collects the answers of the newest inquiry."""
    unexplained_failures: int = 0
    """Number of collective failures and hangs without a known culprit since the last pairwise test."""

    def encode(self) -> str:
        """Return the value as text."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def decode(text: bytes | str) -> GenerationState:
        """Decode a text; fields of a newer agent are ignored."""
        body = json.loads(text)
        fields = {name: body[name] for name in GenerationState.__dataclass_fields__ if name in body}
        causes = {name: Cause(fields.get(name, Cause.RESIZE)) for name in ("cause", "previous_cause")}
        return GenerationState(**{**fields, **causes})


class RestartAction(StrEnum):
    """The decision about an unrequested exit."""

    RESTART = "Restart"
    """All ranks of the generation restart in place."""
    GIVE_UP = "GiveUp"
    """The generation stops with this exit as its verdict."""
    WITHDRAW = "Withdraw"
    """This pod leaves with a verdict; the others wait for its replacement."""


@dataclass(frozen=True, slots=True)
class RestartDecision:
    """A decision and the shared state that it leads to."""

    action: RestartAction
    state: GenerationState
    backoff_seconds: float = 0.0
    """Delay before this pod joins again."""


def decide_restart(
    code: int,
    attempt: int,
    best_progress: float,
    state: GenerationState,
    limit: int,
    *,
    verdict: Classification | None = None,
    seen_before: bool = False,
) -> RestartDecision:
    """Decide about a rank that ended with `code` (neither 0 nor 75) during `attempt`.

    `best_progress` is that of this pod (`PodReport.best_progress`), `limit` the number of consecutive restarts without
    progress that are allowed. When the state is already at a later attempt, another agent has counted the failure.
    `verdict` is the classification of all signs of the exit (default: that of its code), `seen_before` whether this
    node has failed for the same cause before.
    """
    verdict = verdict or classify_exit_code(code)
    response = verdict.repeated if seen_before or _repeats(verdict, attempt, best_progress, state) else verdict.response
    if response is Response.STOP:
        return RestartDecision(RestartAction.GIVE_UP, replace(state, stopped=code))
    best = max(best_progress, state.best_progress)
    counted = state.attempt > attempt
    progressed = best > state.best_progress
    if response in (Response.REPLACE_NODE, Response.REPLACE_WORKER):
        next_state = replace(_next_attempt(state, verdict.cause, best, None), restarts_without_progress=0)
        return RestartDecision(RestartAction.WITHDRAW, state if counted else next_state)
    if response is Response.RETRY_WITH_BACKOFF:
        failures = 1 if progressed else state.storage_failures + 1
        backoff = min(_FIRST_BACKOFF_SECONDS * 2.0 ** (failures - 1), _MAX_BACKOFF_SECONDS)
        next_state = replace(_next_attempt(state, verdict.cause, best, None), storage_failures=failures)
        return RestartDecision(RestartAction.RESTART, state if counted else next_state, backoff)
    early = code if verdict.cause is Cause.CRASH and best < 0 and not is_killed(code) else None
    if counted:
        return RestartDecision(RestartAction.RESTART, _replace_cause(state, attempt, verdict.cause, early))
    if early is not None and state.attempt > 0 and state.early_crash == code:
        return RestartDecision(RestartAction.GIVE_UP, replace(state, stopped=code))
    restarts = 1 if progressed else state.restarts_without_progress + 1
    if restarts > limit:
        return RestartDecision(RestartAction.GIVE_UP, replace(state, stopped=code))
    next_state = replace(_next_attempt(state, verdict.cause, best, early), restarts_without_progress=restarts)
    return RestartDecision(RestartAction.RESTART, next_state)


def _repeats(verdict: Classification, attempt: int, best_progress: float, state: GenerationState) -> bool:
    """Return whether a user's error also started this attempt, without a new step since: a restart does not help.

    A victim may have started the next attempt already; then the state holds the cause of the previous one.
    """
    if verdict.blame is not Blame.USER or attempt == 0:
        return False
    if state.attempt == attempt:
        return state.cause is verdict.cause and best_progress <= state.best_progress
    counted_by_victim = state.attempt == attempt + 1 and state.restarts_without_progress > 1
    return counted_by_victim and state.previous_cause is verdict.cause


def after_yield(attempt: int, best_progress: float, state: GenerationState) -> GenerationState:
    """Return the state after all ranks ended with 75 without a newer generation: the next attempt, not counted."""
    if state.attempt > attempt:
        return state
    return _next_attempt(state, Cause.YIELDED, max(best_progress, state.best_progress), state.early_crash)


def _replace_cause(state: GenerationState, attempt: int, cause: Cause, early: int | None) -> GenerationState:
    """Return the state with the real cause, if a victim of the same failure counted it first."""
    if state.attempt != attempt + 1 or state.cause is not Cause.PEER_LOST or cause is Cause.PEER_LOST:
        return state
    return replace(state, cause=cause, early_crash=early)


def _next_attempt(state: GenerationState, cause: Cause, best: float, early: int | None) -> GenerationState:
    return replace(
        state,
        attempt=state.attempt + 1,
        cause=cause,
        previous_cause=state.cause,
        best_progress=best,
        early_crash=early,
    )
