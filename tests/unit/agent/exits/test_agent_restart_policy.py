from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainium_agent.exits.restart_policy import Decision, GenerationState, after_yield, judge
from trainium_contract.faults.causes import Cause
from trainium_contract.faults.classify import Verdict, classify_exit, classify_sign
from trainium_contract.faults.signs import RUNTIME_STATUSES, Sign

codes = st.sampled_from([1, 64, 65, 66, 76, 80, 81, 134, 137, 139])
states = st.builds(
    GenerationState,
    attempt=st.integers(0, 5),
    cause=st.sampled_from([Cause.RESIZE, Cause.CRASH, Cause.PEER_LOST]),
    fruitless=st.integers(0, 5),
    storage_failures=st.integers(0, 9),
    best_step=st.integers(-1, 100),
    early_crash=st.sampled_from([None, 1, 137]),
)


def decided(code: int, state: GenerationState, attempt: int | None = None, best: int = 5, limit: int = 3) -> Decision:
    return judge(code, state.attempt if attempt is None else attempt, best, state, limit).decision


def test_user_numerical_and_memory_errors_are_never_restarted() -> None:
    for code in (64, 65, 66):
        judgement = judge(code, 0, 50, GenerationState(), 3)
        assert judgement.decision is Decision.GIVE_UP
        assert judgement.state.stopped == code


def test_a_crash_begins_the_next_attempt() -> None:
    judgement = judge(137, 0, 7, GenerationState(), 3)
    assert judgement.decision is Decision.RESTART
    assert (judgement.state.attempt, judgement.state.cause, judgement.state.best_step) == (1, Cause.CRASH, 7)


def test_a_failure_that_another_agent_counted_is_not_counted_again() -> None:
    counted = judge(137, 0, 7, GenerationState(), 3).state
    assert judge(76, 0, 7, counted, 3).state == counted


def test_the_culprit_corrects_the_cause_that_its_victim_wrote_down_first() -> None:
    by_victim = judge(76, 0, -1, GenerationState(), 3).state
    assert by_victim.cause is Cause.PEER_LOST
    corrected = judge(1, 0, -1, by_victim, 3).state
    assert (corrected.attempt, corrected.cause, corrected.early_crash) == (1, Cause.CRASH, 1)


def test_the_same_crash_twice_before_the_first_step_is_a_verdict() -> None:
    first = judge(1, 0, -1, GenerationState(), 3)
    assert first.decision is Decision.RESTART
    second = judge(1, 1, -1, first.state, 3)
    assert second.decision is Decision.GIVE_UP
    assert second.state.stopped == 1


def test_a_job_that_has_completed_a_step_is_not_judged_by_two_crashes() -> None:
    first = judge(1, 0, 4, GenerationState(), 3)
    assert decided(1, first.state, best=4) is Decision.RESTART


def test_a_step_before_the_generation_counts_as_progress_of_the_job() -> None:
    state = judge(1, 0, -1, GenerationState(best_step=100), 3).state
    assert decided(1, state, best=-1) is Decision.RESTART


def test_different_crashes_before_the_first_step_are_not_yet_a_verdict() -> None:
    state = judge(1, 0, -1, GenerationState(), 3).state
    assert decided(139, state, best=-1) is Decision.RESTART


def test_restarts_without_a_new_step_are_limited_and_recomputed_steps_are_not_new() -> None:
    state = GenerationState(best_step=10)
    for _ in range(3):
        judgement = judge(137, state.attempt, 10, state, 3)
        assert judgement.decision is Decision.RESTART
        state = judgement.state
    assert decided(137, state, best=10) is Decision.GIVE_UP
    assert decided(137, state, best=11) is Decision.RESTART


def test_unavailable_storage_backs_off_without_a_limit() -> None:
    state, pauses = GenerationState(best_step=10), []
    for _ in range(8):
        judgement = judge(81, state.attempt, 10, state, 0)
        assert judgement.decision is Decision.RESTART
        pauses.append(judgement.backoff_seconds)
        state = judgement.state
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]


def test_a_device_fault_withdraws_the_pod_and_restarts_the_others() -> None:
    judgement = judge(80, 0, 5, GenerationState(), 0)
    assert judgement.decision is Decision.WITHDRAW
    assert (judgement.state.attempt, judgement.state.stopped) == (1, None)


def test_a_yield_uses_no_budget() -> None:
    state = after_yield(2, 9, GenerationState(attempt=2, fruitless=1))
    assert (state.attempt, state.fruitless, state.cause) == (3, 1, Cause.YIELDED)
    assert after_yield(2, 9, state) == state


@given(codes, states, st.integers(-1, 100), st.integers(0, 5), st.integers(0, 5))
def test_every_exit_ends_in_a_bump_of_one_a_verdict_or_nothing_new(
    code: int, state: GenerationState, best: int, limit: int, attempt: int
) -> None:
    attempt = min(attempt, state.attempt)
    judgement = judge(code, attempt, best, state, limit)
    after = judgement.state
    assert after.best_step >= state.best_step
    if judgement.decision is Decision.GIVE_UP:
        assert after.stopped == code
        assert after.attempt == state.attempt
    else:
        assert after.stopped is None
        assert after.attempt == max(state.attempt, attempt + 1)
    assert judge(code, attempt, best, after, limit).state.attempt == after.attempt or after.stopped is not None


@given(states)
def test_the_shared_state_survives_its_text_and_unknown_fields(state: GenerationState) -> None:
    assert GenerationState.decode(state.encode()) == state
    assert GenerationState.decode(state.encode()[:-1] + ', "later": 1}') == state


def meaning(status: int) -> Verdict:
    return classify_exit(1, runtime_status=status)


def test_a_users_error_by_text_alone_is_restarted_once_and_is_a_verdict_when_it_repeats() -> None:
    first = judge(1, 0, 7, GenerationState(), 3, verdict=meaning(1003))
    assert (first.decision, first.state.cause) == (Decision.RESTART, Cause.NUMERICAL)
    again = judge(1, 1, 7, first.state, 3, verdict=meaning(1003))
    assert (again.decision, again.state.stopped) == (Decision.GIVE_UP, 1)
    after_a_step = judge(1, 1, 8, first.state, 3, verdict=meaning(1003))
    assert after_a_step.decision is Decision.RESTART


def test_a_repetition_is_seen_even_when_a_victim_began_the_next_attempt_first() -> None:
    first = judge(1, 0, 7, GenerationState(), 3, verdict=meaning(1003)).state
    by_victim = judge(76, 1, 7, first, 3).state
    assert judge(1, 1, 7, by_victim, 3, verdict=meaning(1003)).decision is Decision.GIVE_UP
    progressed = judge(76, 1, 8, first, 3).state
    assert judge(1, 1, 8, progressed, 3, verdict=meaning(1003)).decision is Decision.RESTART


def test_a_repairable_device_gets_one_restart_and_then_another_node() -> None:
    assert judge(1, 0, 7, GenerationState(), 3, verdict=meaning(1205)).decision is Decision.RESTART
    again = judge(1, 1, 9, GenerationState(attempt=1), 3, verdict=meaning(1205), seen_before=True)
    assert again.decision is Decision.WITHDRAW


def test_a_broken_device_withdraws_at_once_and_the_others_go_on() -> None:
    judgement = judge(1, 0, 7, GenerationState(), 3, verdict=meaning(1202))
    assert judgement.decision is Decision.WITHDRAW
    assert judgement.state.stopped is None


@given(states, st.sampled_from(RUNTIME_STATUSES), st.booleans())
def test_a_victim_never_withdraws_whatever_came_before(state: GenerationState, sign: Sign, seen: bool) -> None:
    verdict = classify_sign(sign)
    judgement = judge(1, state.attempt, 5, state, 3, verdict=verdict, seen_before=False)
    if verdict.indirect:
        assert judgement.decision is not Decision.WITHDRAW


def test_the_shared_state_survives_being_written_and_read() -> None:
    state = GenerationState(attempt=2, cause=Cause.NETWORK, previous=Cause.MEMORY)
    assert GenerationState.decode(state.encode()) == state
