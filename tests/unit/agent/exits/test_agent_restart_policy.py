"""Decisions of an agent when its ranks end: restart, give up, or withdraw the pod."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainium_agent.exits.restart_policy import GenerationState, RestartAction, after_yield, decide_restart
from trainium_contract.faults.causes import Cause
from trainium_contract.faults.classify import Classification, classify_exit, classify_sign
from trainium_contract.faults.signs import RUNTIME_STATUSES, Sign

exit_codes = st.sampled_from([1, 64, 65, 66, 76, 80, 81, 134, 137, 139])
states = st.builds(
    GenerationState,
    attempt=st.integers(0, 5),
    cause=st.sampled_from([Cause.RESIZE, Cause.CRASH, Cause.PEER_LOST, Cause.NETWORK]),
    previous_cause=st.sampled_from([Cause.CRASH, Cause.OUT_OF_MEMORY]),
    restarts_without_progress=st.integers(0, 5),
    storage_failures=st.integers(0, 9),
    best_progress=st.integers(-1, 100),
    early_crash=st.sampled_from([None, 1, 137]),
)


def action_after(code: int, state: GenerationState, best: int = 5) -> RestartAction:
    return decide_restart(code, state.attempt, best, state, 3).action


def test_user_numerical_and_memory_errors_are_never_restarted() -> None:
    for code in (64, 65, 66):
        decision = decide_restart(code, 0, 50, GenerationState(), 3)
        assert decision.action is RestartAction.GIVE_UP
        assert decision.state.stopped == code


def test_a_crash_starts_the_next_attempt() -> None:
    decision = decide_restart(137, 0, 7, GenerationState(), 3)
    assert decision.action is RestartAction.RESTART
    assert (decision.state.attempt, decision.state.cause, decision.state.best_progress) == (1, Cause.CRASH, 7)


def test_a_failure_that_another_agent_counted_is_not_counted_again() -> None:
    counted = decide_restart(137, 0, 7, GenerationState(), 3).state
    assert decide_restart(76, 0, 7, counted, 3).state == counted


def test_the_failed_rank_replaces_the_cause_that_its_peer_recorded() -> None:
    by_victim = decide_restart(76, 0, -1, GenerationState(), 3).state
    assert by_victim.cause is Cause.PEER_LOST
    corrected = decide_restart(1, 0, -1, by_victim, 3).state
    assert (corrected.attempt, corrected.cause, corrected.early_crash) == (1, Cause.CRASH, 1)


def test_the_same_crash_twice_before_the_first_step_is_a_verdict() -> None:
    first = decide_restart(1, 0, -1, GenerationState(), 3)
    assert first.action is RestartAction.RESTART
    second = decide_restart(1, 1, -1, first.state, 3)
    assert second.action is RestartAction.GIVE_UP
    assert second.state.stopped == 1


@pytest.mark.parametrize("code", [137, 143])
def test_processes_killed_before_the_first_step_are_not_yet_a_verdict(code: int) -> None:
    """The memory killer of a host sends SIGKILL, to different ranks."""
    state = decide_restart(code, 0, -1, GenerationState(), 3).state
    assert action_after(code, state, best=-1) is RestartAction.RESTART


def test_a_job_that_has_completed_a_step_is_not_judged_by_two_crashes() -> None:
    first = decide_restart(1, 0, 4, GenerationState(), 3)
    assert action_after(1, first.state, best=4) is RestartAction.RESTART


def test_a_step_before_the_generation_counts_as_progress_of_the_job() -> None:
    state = decide_restart(1, 0, -1, GenerationState(best_progress=100), 3).state
    assert action_after(1, state, best=-1) is RestartAction.RESTART


def test_different_crashes_before_the_first_step_are_not_yet_a_verdict() -> None:
    state = decide_restart(1, 0, -1, GenerationState(), 3).state
    assert action_after(139, state, best=-1) is RestartAction.RESTART


def test_restarts_without_a_new_step_are_limited_and_recomputed_steps_are_not_new() -> None:
    state = GenerationState(best_progress=10)
    for _ in range(3):
        decision = decide_restart(137, state.attempt, 10, state, 3)
        assert decision.action is RestartAction.RESTART
        state = decision.state
    assert action_after(137, state, best=10) is RestartAction.GIVE_UP
    assert action_after(137, state, best=11) is RestartAction.RESTART


def test_unavailable_storage_backs_off_without_a_limit() -> None:
    state, pauses = GenerationState(best_progress=10), []
    for _ in range(8):
        decision = decide_restart(81, state.attempt, 10, state, 0)
        assert decision.action is RestartAction.RESTART
        pauses.append(decision.backoff_seconds)
        state = decision.state
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]


def test_a_yield_uses_no_budget() -> None:
    state = after_yield(2, 9, GenerationState(attempt=2, restarts_without_progress=1))
    assert (state.attempt, state.restarts_without_progress, state.cause) == (3, 1, Cause.YIELDED)
    assert after_yield(2, 9, state) == state


@given(exit_codes, states, st.integers(-1, 100), st.integers(0, 5), st.integers(0, 5))
def test_every_exit_raises_the_attempt_by_one_gives_a_verdict_or_changes_nothing(
    code: int, state: GenerationState, best: int, limit: int, attempt: int
) -> None:
    attempt = min(attempt, state.attempt)
    decision = decide_restart(code, attempt, best, state, limit)
    after = decision.state
    assert after.best_progress >= state.best_progress
    if decision.action is RestartAction.GIVE_UP:
        assert after.stopped == code
        assert after.attempt == state.attempt
    else:
        assert after.stopped is None
        assert after.attempt == max(state.attempt, attempt + 1)
    assert decide_restart(code, attempt, best, after, limit).state.attempt == after.attempt or after.stopped is not None


@given(states)
def test_the_shared_state_is_decoded_as_encoded_and_ignores_unknown_fields(state: GenerationState) -> None:
    assert GenerationState.decode(state.encode()) == state
    assert GenerationState.decode(state.encode()[:-1] + ', "later": 1}') == state


def status_verdict(status: int) -> Classification:
    return classify_exit(1, runtime_status=status)


def test_a_user_error_known_by_its_text_is_restarted_once() -> None:
    first = decide_restart(1, 0, 7, GenerationState(), 3, verdict=status_verdict(1003))
    assert (first.action, first.state.cause) == (RestartAction.RESTART, Cause.NUMERICAL)
    again = decide_restart(1, 1, 7, first.state, 3, verdict=status_verdict(1003))
    assert (again.action, again.state.stopped) == (RestartAction.GIVE_UP, 1)
    after_a_step = decide_restart(1, 1, 8, first.state, 3, verdict=status_verdict(1003))
    assert after_a_step.action is RestartAction.RESTART


def test_a_repeated_user_error_is_recognised_after_a_peer_started_the_attempt() -> None:
    first = decide_restart(1, 0, 7, GenerationState(), 3, verdict=status_verdict(1003)).state
    by_victim = decide_restart(76, 1, 7, first, 3).state
    assert decide_restart(1, 1, 7, by_victim, 3, verdict=status_verdict(1003)).action is RestartAction.GIVE_UP
    progressed = decide_restart(76, 1, 8, first, 3).state
    assert decide_restart(1, 1, 8, progressed, 3, verdict=status_verdict(1003)).action is RestartAction.RESTART


@pytest.mark.parametrize(
    ("code", "verdict"), [(80, None), (1, status_verdict(1202))], ids=["by its code", "by its status"]
)
def test_a_device_fault_withdraws_the_pod_and_restarts_the_others(code: int, verdict: Classification | None) -> None:
    decision = decide_restart(code, 0, 5, GenerationState(), 3, verdict=verdict)
    assert decision.action is RestartAction.WITHDRAW
    assert (decision.state.attempt, decision.state.stopped) == (1, None)


def test_a_repairable_device_gets_one_restart_and_then_another_node() -> None:
    assert decide_restart(1, 0, 7, GenerationState(), 3, verdict=status_verdict(1205)).action is RestartAction.RESTART
    again = decide_restart(1, 1, 9, GenerationState(attempt=1), 3, verdict=status_verdict(1205), seen_before=True)
    assert again.action is RestartAction.WITHDRAW


@given(states, st.sampled_from([sign for sign in RUNTIME_STATUSES if classify_sign(sign).indirect]))
def test_a_rank_that_lost_a_peer_never_withdraws_its_pod(state: GenerationState, sign: Sign) -> None:
    decision = decide_restart(1, state.attempt, 5, state, 3, verdict=classify_sign(sign), seen_before=False)
    assert decision.action is not RestartAction.WITHDRAW
