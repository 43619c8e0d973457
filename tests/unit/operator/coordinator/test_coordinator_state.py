"""The state of the coordinator: generations, registrations and heartbeats of the agents of each job."""

from typing import Any

import pytest

from tests.testing.operator.wire_messages import heartbeat, member, membership, registration
from trainium_contract.status.results import ArtifactReport
from trainium_contract.wire import messages
from trainium_operator.coordinator.state import CoordinatorState
from trainium_operator.plan.model.names import JobId

JOB = JobId("ns", "job", "job-uid")


def build_member(pod: str) -> messages.Member:
    return member(pod, pod_uid=pod)


def step_heartbeat(pod: str, number: int) -> messages.HeartbeatRequest:
    return heartbeat(pod, pod_uid=pod, progress=messages.Progress(step=number))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def state(clock: Clock) -> CoordinatorState:
    return CoordinatorState(clock)


def test_a_published_generation_never_decreases(state: CoordinatorState) -> None:
    state.publish(JOB, membership(3, build_member("a")))
    state.publish(JOB, membership(2, build_member("a")))
    assert state.get_published_generation(JOB) == 3


def test_modules_of_a_member_are_served_to_pods_that_are_none(state: CoordinatorState) -> None:
    published = []
    state.publish(JOB, membership(1, build_member("a")))
    state.on_publish = published.append
    some, more = (messages.ImportedModules(modules=names) for names in (("wave",), ("wave", "bdb")))
    state.record_imported(JOB, "b", more)
    assert (state.get_imported_modules(JOB, "b"), published) == (None, []), "b is no member"
    for imported in (some, more, some, more):
        state.record_imported(JOB, "a", imported)
    assert (state.get_imported_modules(JOB, "a"), state.get_imported_modules(JOB, "b")) == (None, more)
    assert published == [JOB, JOB], "only more modules than before are served"


def test_state_is_kept_by_job_uid(state: CoordinatorState) -> None:
    state.publish(JobId("ns", "job", "old"), membership(7, build_member("a")))
    assert state.get_published_generation(JobId("ns", "job", "new")) == 0
    state.forget_job(JobId("ns", "job", "old"))
    assert state.get_published_generation(JobId("ns", "job", "old")) == 0


def test_seconds_per_step_come_from_the_operators_own_clock(state: CoordinatorState, clock: Clock) -> None:
    state.register(JOB, registration(build_member("a")))
    state.record_heartbeat(JOB, step_heartbeat("a", 10))
    clock.now += 4
    state.record_heartbeat(JOB, step_heartbeat("a", 12))
    view = state.list_agents(JOB)["a"]
    assert view.step_seconds == 2
    assert view.progressed_at == clock.now
    clock.now += 1
    state.record_heartbeat(JOB, step_heartbeat("a", 12))
    assert state.list_agents(JOB)["a"].progressed_at == clock.now - 1


def test_keepalives_report_steps_like_heartbeats(state: CoordinatorState, clock: Clock) -> None:
    state.register(JOB, registration(build_member("a")))
    state.record_keepalive(JOB, "a", 7)
    assert state.list_agents(JOB)["a"].progressed_at is None, "no heartbeat has reported a step"
    state.record_heartbeat(JOB, step_heartbeat("a", 10))
    clock.now += 6
    state.record_keepalive(JOB, "a", 13)
    moved = clock.now
    assert (state.list_agents(JOB)["a"].step_seconds, state.list_agents(JOB)["a"].progressed_at) == (2, moved)
    clock.now += 5
    state.record_keepalive(JOB, "a", 13)
    state.record_keepalive(JOB, "a", -1)
    state.record_heartbeat(JOB, step_heartbeat("a", 13))
    view = state.list_agents(JOB)["a"]
    assert (view.progressed_at, view.last_seen) == (moved, clock.now), "a step that is known already is no progress"


def test_downtime_before_an_attempt_does_not_count_as_step_time(state: CoordinatorState, clock: Clock) -> None:
    """A long fault would otherwise delay the detection of a hang after it."""
    state.register(JOB, registration(build_member("a")))
    for seconds, number in ((0, 10), (4, 12)):
        clock.now += seconds
        state.record_heartbeat(JOB, step_heartbeat("a", number))
    clock.now += 60
    state.record_heartbeat(JOB, step_heartbeat("a", 13).model_copy(update={"attempt": 1}))
    view = state.list_agents(JOB)["a"]
    assert (view.step_seconds, view.progressed_at) == (2, clock.now)
    clock.now += 9
    state.record_heartbeat(JOB, step_heartbeat("a", 16).model_copy(update={"attempt": 1}))
    assert state.list_agents(JOB)["a"].step_seconds == 3


def test_stages_and_results_matter_at_once_and_stage_progress_like_steps(
    state: CoordinatorState,
) -> None:
    state.register(JOB, registration(build_member("a")))

    def send_progress(**fields: Any) -> tuple[bool, bool]:
        result = state.record_heartbeat(
            JOB, step_heartbeat("a", 10).model_copy(update={"progress": messages.Progress(step=10, **fields)})
        )
        return result.is_urgent, result.has_progressed

    artifact = ArtifactReport(kind="Model", path="/out", step=10)
    send_progress()
    assert send_progress() == (False, False)
    assert send_progress(stage="Export", stage_progress=0.0) == (True, True)
    assert send_progress(stage="Export", stage_progress=0.5) == (False, True)
    assert send_progress(stage="Export", stage_progress=0.5) == (False, False)
    assert send_progress(stage="Export", stage_progress=0.5, artifacts=(artifact,)) == (True, False)
    view = state.list_agents(JOB)["a"]
    assert view.step_seconds is None, "no step was made"


def test_joining_since_is_the_first_joining_report_of_an_attempt(state: CoordinatorState, clock: Clock) -> None:
    def send_phase(attempt: int, phase: messages.WorkerPhase = messages.WorkerPhase.JOINING) -> float | None:
        clock.now += 1
        state.record_heartbeat(JOB, step_heartbeat("a", 1).model_copy(update={"phase": phase, "attempt": attempt}))
        return state.list_agents(JOB)["a"].joining_since

    state.register(JOB, registration(build_member("a")))
    first = send_phase(0)
    assert first == clock.now
    assert send_phase(0) == first
    assert send_phase(0, messages.WorkerPhase.LOADING) is None
    assert send_phase(0) == clock.now
    assert send_phase(1) == clock.now


def test_the_last_report_of_a_failed_member_is_kept_until_the_next_generation(state: CoordinatorState) -> None:
    state.publish(JOB, membership(1, build_member("a"), build_member("b")))
    for pod in ("a", "b", "spare"):
        state.register(JOB, registration(build_member(pod)))
    state.forget_pod(JOB, "b")
    state.forget_pod(JOB, "spare")
    assert set(state.list_agents(JOB)) == {"a", "b"}
    state.publish(JOB, membership(2, build_member("a")))
    assert set(state.list_agents(JOB)) == {"a"}
