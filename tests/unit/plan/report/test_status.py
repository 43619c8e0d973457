"""The status, conditions and events that a plan writes, and how often."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW, SETTINGS
from tests.unit.plan.plan_results import make_plan, with_written_status
from trainium_contract.faults.causes import Cause
from trainium_contract.job import GoodputStatus, TrainingJobStatus
from trainium_contract.rfc3339 import format_rfc3339
from trainium_contract.status.conditions import ConditionStatus, ConditionType, Phase
from trainium_contract.status.interruptions import Interruption, RecoveryResponse
from trainium_contract.status.public import MembershipStatus
from trainium_contract.status.results import Alert
from trainium_contract.status.start_failures import StartFailuresStatus
from trainium_contract.wire.messages import AlertKind, Progress, WorkerPhase
from trainium_operator.plan.manifests.worker_pod import PRECOMPILE_CONTAINER
from trainium_operator.plan.model.conditions import find_condition
from trainium_operator.plan.model.observed import PodPhase
from trainium_operator.plan.model.text import SENTENCE_LIMIT, format_names, format_sentence
from trainium_operator.plan.report.events import list_events
from trainium_operator.plan.report.missing_workers import SLOW_INIT_SECONDS


def starting_job(*pods: Any, **observed_fields: Any) -> Any:
    view = build.job(build.spec(), status=TrainingJobStatus(desired=4, next_pod_ordinal=4))
    return replace(build.observation(view, pods, {}), **observed_fields)


def conditions_by_type(observed: Any) -> dict[str, Any]:
    return {condition.type: condition for condition in make_plan(observed).status.conditions}


def test_a_refused_creation_is_shown_in_both_conditions() -> None:
    conditions = conditions_by_type(starting_job(creation_refusal="exceeded quota: team.", create_after=NOW + 60))
    for kind in (ConditionType.PODS_READY, ConditionType.ADMITTED):
        assert conditions[kind].reason == "CreationRefused"
        assert "exceeded quota: team. Correct what it names" in conditions[kind].message


@pytest.mark.parametrize(
    ("name", "seconds", "reason", "words"),
    [
        ("fetch", SLOW_INIT_SECONDS - 1, "WaitingForWorkers", "init container fetch is running"),
        ("fetch", SLOW_INIT_SECONDS, "WorkerNotStarting", "kubectl logs demo-w-0 -c fetch -n"),
        (PRECOMPILE_CONTAINER, 3600.0, "WaitingForWorkers", "init container precompile is running"),
    ],
)
def test_a_blocking_init_container_is_named(name: str, seconds: float, reason: str, words: str) -> None:
    held = build.pod(0, phase=PodPhase.PENDING, reason="PodInitializing")
    observed = starting_job(replace(held, init_container=name, init_since=NOW - seconds))
    condition = conditions_by_type(observed)[ConditionType.PODS_READY]
    assert condition.reason == reason
    assert words in condition.message


def test_an_init_container_that_fails_is_reported_with_its_code_and_blames_no_node() -> None:
    message = "init container fetch ended with exit code 7: no route to the bucket"
    failed = replace(
        build.pod(0, phase=PodPhase.FAILED, reason="Error", message=message), init_container="fetch", init_exit_code=7
    )
    result = make_plan(starting_job(failed))
    assert message in find_condition(result.status, ConditionType.PODS_READY).message
    (note,) = result.event_notes("WorkerFailed")
    assert note.endswith(f"ended before it could join: {message}")
    assert not result.status.start_failures.nodes
    assert not result.status.avoided_nodes


def test_equal_failures_of_successive_workers_are_one_event_series() -> None:
    def series(ordinal: int, code: int, words: str, node: str = "node-1") -> set[str]:
        message = f"init container fetch ended with exit code {code}: {words}"
        failed = build.pod(ordinal, phase=PodPhase.FAILED, reason="Error", message=message, node=node)
        result = make_plan(starting_job(replace(failed, init_container="fetch", init_exit_code=code)))
        return {event.series for event in result.events if event.reason == "WorkerFailed"}

    first = series(0, 7, "12:30:01 no route to the bucket")
    assert len(first) == 1
    assert first == series(5, 7, "12:30:09 no route to the bucket", "node-2")
    assert first.isdisjoint(series(6, 8, "12:30:09 no route to the bucket"))
    assert first.isdisjoint(series(6, 7, "12:30:09 no such bucket"))


def test_pods_that_wait_after_failed_starts_are_not_reported_as_missing_nodes() -> None:
    observed = starting_job()
    failures = StartFailuresStatus(
        rounds=6, at=NOW, next_ordinal=4, batch=4, message="demo-w-1 ended (Error): no route\n"
    )
    conditions = conditions_by_type(
        replace(
            observed,
            job=replace(
                observed.job, status=observed.job.status.replaced(observed_generation=1, start_failures=failures)
            ),
        )
    )
    for kind in (ConditionType.PODS_READY, ConditionType.ADMITTED):
        assert conditions[kind].reason == "WorkerNotStarting"
        assert (
            "6 times in a row; the last one: demo-w-1 ended (Error): no route; the next are created"
            in conditions[kind].message
        )


def test_a_training_job_shows_its_step_its_speed_and_its_checkpoints() -> None:
    progress = Progress(
        step=20,
        loss=2.12345678,
        learning_rate=2.9999999999e-6,
        grad_norm=0.98765432,
        tokens_per_second=1000.04,
        samples_per_second=0.97654321,
        reward_margin=0.12345678,
        reward_accuracy=0.84375,
        memory_step=20,
        durable_step=10,
        updated=NOW,
    )
    behind = progress.model_copy(update={"memory_step": 18, "durable_step": 12})
    observed = build.running_job(
        4, agents={0: build.training_agent(0, progress=progress), 3: build.training_agent(3, progress=behind)}
    )
    status = make_plan(observed).status
    assert status.phase is Phase.RUNNING
    assert (status.progress.step, status.progress.total_steps, status.progress.loss) == (20, 100, 2.123457)
    assert (status.progress.tokens_per_second, status.progress.samples_per_second) == (1000.0, 0.977)
    assert (status.progress.reward_margin, status.progress.reward_accuracy) == (0.123457, 0.8438)
    assert (status.progress.learning_rate, status.progress.grad_norm) == (3e-6, 0.987654)
    assert (status.checkpoint.memory_step, status.checkpoint.durable_step) == (18, 12)
    assert (status.replicas, status.ready_replicas, status.spares, status.desired) == (4, 4, 0, 4)
    assert status.selector == "trainium.dev/job-name=demo,trainium.dev/role=worker"
    assert status.observed_generation == 1
    assert status.start_time == format_rfc3339(NOW)


def test_committed_steps_never_go_back() -> None:
    observed = with_written_status(build.running_job(4))
    agents = build.by_pod_uid(build.training_agents(range(4), progress=Progress(step=30, durable_step=-1)))
    later = make_plan(replace(observed, agents=agents, now=NOW + 60)).status
    assert later.checkpoint.durable_step == 10


def test_progress_alone_is_written_only_once_per_interval() -> None:
    observed = with_written_status(build.running_job(4))
    agents = build.by_pod_uid(build.training_agents(range(4), step=30))
    soon = make_plan(replace(observed, agents=agents, now=NOW + 2))
    assert soon.status == observed.job.status
    assert soon.requeue_after <= 13
    late = make_plan(
        replace(observed, agents={u: replace(a, last_seen=NOW + 15) for u, a in agents.items()}, now=NOW + 15.5)
    )
    assert late.status.progress.step == 30


def test_progress_of_a_large_job_is_written_in_proportion_less_often() -> None:
    large = build.spec(workers={"replicas": 512}, trainer={"batch": {"globalSize": 512}})
    observed = with_written_status(build.running_job(512, job_spec=large))

    def plan_after(seconds: float) -> Any:
        agents = {
            f"uid-{ordinal}": replace(
                build.training_agent(ordinal, step=30), last_seen=NOW + seconds, progressed_at=NOW + seconds
            )
            for ordinal in range(512)
        }
        return make_plan(replace(observed, agents=agents, now=NOW + seconds))

    assert plan_after(29).status == observed.job.status
    assert plan_after(30.5).status.progress.step == 30


@pytest.mark.parametrize(("workers", "seconds"), [(0, 5), (256, 5), (1024, 20), (5000, 30)])
def test_the_interval_grows_with_the_job_up_to_six_times(workers: int, seconds: float) -> None:
    assert replace(SETTINGS, status_interval_seconds=5).compute_status_interval(workers) == seconds


def test_other_changes_are_written_at_once_with_the_newest_progress() -> None:
    observed = with_written_status(build.running_job(4, spares=1))
    agents = build.by_pod_uid(build.training_agents(range(4), step=30))
    result = make_plan(
        replace(build.without_pods(replace(observed, agents={**observed.agents, **agents}), 1), now=NOW + 1)
    )
    assert result.status.progress.step == 30
    assert result.status.phase is Phase.RECOVERING


def test_a_condition_keeps_its_transition_time_while_its_status_stays() -> None:
    observed = with_written_status(build.running_job(4))
    agents = {
        f"uid-{ordinal}": replace(build.training_agent(ordinal, step=40), last_seen=NOW + 100) for ordinal in range(4)
    }
    later = make_plan(replace(observed, agents=agents, now=NOW + 100)).status
    before = find_condition(observed.job.status, ConditionType.RUNNING)
    assert find_condition(later, ConditionType.RUNNING) == before


def test_a_restarted_operator_keeps_the_status_until_the_members_have_reported() -> None:
    observed = with_written_status(build.running_job(4))
    result = make_plan(replace(observed, agents={}, published=0, coordinator_since=NOW - 1))
    assert result.status == observed.job.status
    assert [type(action).__name__ for action in result.actions] == ["PublishMembership"]


def test_the_phase_before_the_first_generation_is_pending() -> None:
    unschedulable = build.pod(
        0, phase=PodPhase.PENDING, node="", scheduled=False, unschedulable_message="0/3 nodes: taint"
    )
    status = make_plan(
        build.observation(build.job(status=TrainingJobStatus(next_pod_ordinal=4, desired=4)), (unschedulable,))
    ).status
    assert status.phase is Phase.PENDING
    condition = find_condition(status, ConditionType.PODS_READY)
    assert (condition.reason, "0/3 nodes: taint" in condition.message) == ("Unschedulable", True)


def test_pods_ready_counts_registered_workers() -> None:
    condition = make_plan(build.running_job(4)).condition(ConditionType.PODS_READY)
    assert (condition.status, condition.message) == (ConditionStatus.TRUE, "4 workers are registered")
    condition = make_plan(build.without_pods(build.running_job(4), 3)).condition(ConditionType.PODS_READY)
    assert condition.status is ConditionStatus.FALSE
    assert condition.message.startswith("3 of 4 workers are registered")


def test_a_job_completes_when_all_members_finished_and_deletes_its_spares() -> None:
    agents = build.agents(range(3), WorkerPhase.FINISHED, generation=1)
    observed = build.running_job(4, spares=1, agents=agents)
    assert make_plan(observed).status.phase is not Phase.COMPLETED
    done = build.with_pod(observed, build.finished_pod(3))
    result = make_plan(done)
    assert result.status.phase is Phase.COMPLETED
    held = {condition.type for condition in result.status.conditions if condition.status is ConditionStatus.TRUE}
    assert held & {"Running", "Recovering", "Resizing", "PodsReady", "Admitted", "Complete"} == {"Complete"}
    assert result.status.completion_time == format_rfc3339(NOW)
    assert result.deleted_pods == {"demo-w-4": None}
    assert "Completed" in {event.reason for event in result.events}
    again = make_plan(replace(build.without_pods(done, 4), job=replace(done.job, status=result.status)))
    assert (again.status, again.actions, again.requeue_after) == (result.status, (), None)


def test_a_loss_before_the_end_replaces_finished_members_too() -> None:
    agents = build.agents(range(3), WorkerPhase.FINISHED, generation=1)
    result = make_plan(build.without_pods(build.running_job(4, agents=agents), 3))
    assert result.status.phase is Phase.RECOVERING
    assert result.newest_entry.cause is Cause.POD_LOST
    assert set(result.deleted_pods) == {"demo-w-0", "demo-w-1", "demo-w-2"}


def test_a_suspension_deletes_all_pods_gracefully_and_is_no_loss() -> None:
    observed = build.running_job(4, spares=1)
    spec = observed.job.spec.model_copy(update={"suspend": True})
    observed = build.with_job(observed, spec=spec)
    first = make_plan(observed)
    assert first.deleted_pods == {f"demo-w-{ordinal}": None for ordinal in range(5)}
    assert first.status.phase is Phase.SUSPENDING
    assert first.status.membership.size == 0
    leaving = tuple(replace(pod, deleting=True) for pod in observed.pods)
    second = make_plan(replace(build.with_status(observed, first.status), pods=leaving))
    assert (second.actions, second.status.history) == ((), ())
    last = make_plan(replace(build.with_status(observed, first.status), pods=(), agents={}))
    assert last.status.phase is Phase.SUSPENDED
    assert last.status.replicas == 0
    assert [event.reason for event in last.events] == ["Suspended"]


OPEN = build.interruption(
    RecoveryResponse.SPARE,
    ago=8,
    took=None,
    cause=Cause.NODE_LOST,
    pod="demo-w-1",
    node="node-1",
    detected_seconds=4.0,
    decided_at=None,
    step_before=20,
    pods_replaced=1,
)


def second_generation(step: Any, phase: Any = WorkerPhase.TRAINING, restarts: Any = ()) -> Any:
    observed = build.running_job(
        4,
        status={
            "membership": MembershipStatus(generation=2, size=4, data_parallel=4),
            "history": (OPEN,),
            "start_time": format_rfc3339(NOW - 100),
            "goodput": GoodputStatus(
                wall_seconds=92.0,
                node_seconds=368.0,
                productive_seconds=92.0,
                earlier_seconds=92.0,
                earlier_node_seconds=368.0,
                accounted_until=NOW - 8,
                starting=False,
                counted_step=20,
            ),
        },
    )
    progress = Progress(step=step, updated=NOW - 1, durable_step=10)
    agents = build.agents(range(4), phase, generation=2, restarts=restarts, progress=progress)
    observed = build.with_agents(observed, agents)
    return replace(observed, membership=build.membership(0, 1, 2, 3, generation=2), published=2)


def test_an_interruption_ends_at_the_first_new_step() -> None:
    for step, phase, over in (
        (20, WorkerPhase.TRAINING, False),
        (21, WorkerPhase.LOADING, False),
        (21, WorkerPhase.TRAINING, True),
    ):
        result = make_plan(second_generation(step, phase))
        assert (result.newest_entry.recovered_seconds is not None) is over
        assert (result.status.phase is Phase.RUNNING) is over
    assert result.newest_entry.recovered_seconds == pytest.approx(7.0)
    assert result.status.goodput.lost_seconds == {"NodeLost": 7.0}
    assert result.status.goodput.wall_seconds == pytest.approx(100.0)
    assert result.status.goodput.ratio == pytest.approx(0.93)


def resumed_at_step(resume_step: int, *, step_before: int = 21) -> Any:
    """Return the second generation after its agents recorded from which step it resumed."""
    record = build.restart_record(
        0, Cause.NODE_LOST, generation=2, resumed_at=NOW - 2, step_before=step_before, resume_step=resume_step
    )
    return second_generation(22, restarts=(record,))


def test_the_agents_record_shows_from_which_step_training_resumed() -> None:
    result = make_plan(resumed_at_step(19))
    entry = result.newest_entry
    assert entry.recovered_seconds == pytest.approx(6.0)
    assert (entry.step_before, entry.resume_step, entry.steps_lost) == (21, 19, 2)
    assert "Recovered" in {event.reason for event in result.events}


def test_heartbeats_alone_show_from_which_step_a_new_generation_resumed() -> None:
    def plan_resumption(step: int, resume_step: int) -> Interruption:
        progress = Progress(step=step, resume_step=resume_step, updated=NOW - 1)
        return make_plan(build.with_heartbeats(second_generation(step), progress=progress)).newest_entry

    assert plan_resumption(22, 22).recovered_seconds is None, "a step that was made before the change is not a new one"
    assert (plan_resumption(23, 22).steps_lost, plan_resumption(23, 22).resume_step) == (0, 22)
    assert (plan_resumption(21, 18).steps_lost, plan_resumption(21, 18).resume_step) == (2, 18)


def test_records_of_an_older_generation_do_not_keep_an_interruption_open() -> None:
    stale = build.restart_record(1, Cause.PEER_LOST, generation=1)
    assert make_plan(second_generation(21, restarts=(stale,))).newest_entry.recovered_seconds is not None


def test_a_resume_below_the_newest_committed_step_is_reported() -> None:
    observed = resumed_at_step(5, step_before=20)
    observed = build.with_status(
        observed, checkpoint=observed.job.status.checkpoint.model_copy(update={"durable_step": 10})
    )
    assert "CheckpointSkipped" in {event.reason for event in make_plan(observed).events}


@pytest.mark.parametrize(
    ("observed", "reason"),
    [(build.without_pods(build.running_job(4), 1), "Interrupted"), (resumed_at_step(19), "Recovered")],
)
def test_an_interruption_and_its_end_are_reported_once(observed: Any, reason: str) -> None:
    first = make_plan(observed)
    assert {"Interrupted", "Recovered"} & {event.reason for event in first.events} == {reason}
    assert reason not in {event.reason for event in make_plan(build.with_status(observed, first.status)).events}


def test_lost_time_is_not_productive_while_it_lasts() -> None:
    result = make_plan(second_generation(20, WorkerPhase.JOINING))
    assert result.status.goodput.productive_seconds == pytest.approx(92.0)
    assert result.status.goodput.lost_seconds == {"NodeLost": 8.0}


def test_the_history_keeps_the_last_ten() -> None:
    old = tuple(
        OPEN.model_copy(update={"generation": generation, "recovered_seconds": 1.0}) for generation in range(-9, 1)
    )
    result = make_plan(build.with_status(build.without_pods(build.running_job(4), 1), history=old))
    assert len(result.status.history) == 10
    assert result.newest_entry.cause is Cause.POD_LOST


def with_alerts(observed: Any, *alerts: Alert, now: float = NOW + 2) -> Any:
    progress = Progress(step=30, alerts=alerts, durable_step=10, updated=now)
    return replace(observed, now=now, agents={**observed.agents, "uid-0": build.training_agent(0, progress=progress)})


def test_an_alert_of_the_trainer_becomes_one_event() -> None:
    spike = Alert(kind="LossSpike", step=29, message="Step 29: the gradient norm is high")
    observed = with_alerts(with_written_status(build.running_job(4)), spike)
    result = make_plan(observed)
    (event,) = [event for event in result.events if event.reason == "LossSpike"]
    assert (event.warning, event.note) == (True, "Step 29: the gradient norm is high")
    assert [(alert.kind, alert.step) for alert in result.status.alerts] == [("LossSpike", 29)]
    plan_resumption = spike.model_copy(update={"message": "Step 29 again, after a resume"})
    later = with_alerts(with_written_status(observed), plan_resumption, now=NOW + 60)
    assert make_plan(later).event_notes("LossSpike") == []
    silent = with_alerts(with_written_status(observed), now=NOW + 60)
    assert make_plan(silent).status.alerts == result.status.alerts


def test_later_and_other_alerts_are_events_and_unknown_kinds_are_not() -> None:
    first = Alert(kind="LossSpike", step=29, message="One")
    observed = with_written_status(with_alerts(with_written_status(build.running_job(4)), first))
    others = (
        first.model_copy(update={"step": 70, "message": "Two"}),
        Alert(kind="LossAlarm", step=71, message="Three"),
        Alert(kind="OfANewerTrainer", step=1, message="Four"),
        Alert(kind="StepSkipped", step=72, message="Five"),
    )
    result = make_plan(with_alerts(observed, *others, now=NOW + 60))
    assert [event.note for event in result.events if event.reason in set(AlertKind)] == ["Two", "Three", "Five"]
    assert len(result.status.alerts) == 3


@pytest.mark.parametrize(("step", "subject"), [(0, "The processes run again"), (12, "Training goes on")])
def test_an_event_reports_training_only_where_a_step_proves_it(step: int, subject: str) -> None:
    entry = Interruption(
        generation=1, time="t", cause=Cause.CRASH, response=RecoveryResponse.IN_PLACE, recovered_seconds=0.431
    )
    status = TrainingJobStatus()
    new = status.replaced(history=(entry,), progress=status.progress.replaced(step=step))
    notes = [each.note for each in list_events(status, new) if each.reason == "Recovered"]
    assert [note.partition(" after")[0] for note in notes] == [subject]


def test_lines_of_output_are_separated_in_a_message() -> None:
    output = "step 2: loss is nan: lower the rate\n\n  16:35:21 rank 0  INFO start-up: data 0.05 s\n"
    assert (
        format_sentence(output) == "step 2: loss is nan: lower the rate |   16:35:21 rank 0 INFO start-up: data 0.05 s"
    )


def test_a_long_message_is_cut_between_lines_of_output() -> None:
    lines = [f"  line {number} of the traceback" for number in range(100)]
    sentence = format_sentence("\n".join(("Error: no key", *lines, "Correct the program")), 300)
    head, tail = sentence.split(" | ...")
    assert set(head.split(" | ")[1:] + tail.split(" | ")[1:-1]) <= set(lines)
    assert (sentence[:13], sentence[-19:], len(sentence) <= 300) == ("Error: no key", "Correct the program", True)


def test_a_suspended_job_shows_its_last_save() -> None:
    before = Progress(step=20, loss=2.5, memory_step=20, durable_step=10, updated=NOW)
    after = Progress(step=26, loss=2.25, memory_step=26, durable_step=26, updated=NOW)
    rests = build.spec(workers={"replicas": 2}, suspend=True)
    observed = build.running_job(2, job_spec=rests, agents=build.training_agents(range(2), progress=before))
    leaving = with_written_status(observed)
    assert leaving.job.status.membership.size == 0
    assert leaving.job.status.checkpoint.durable_step == 10
    reported = build.by_pod_uid(build.training_agents(range(2), progress=after))
    empty = with_written_status(replace(leaving, pods=(), agents=reported))
    status = empty.job.status
    assert (status.checkpoint.durable_step, status.progress.step, status.progress.loss) == (26, 26, 2.25)
    assert status.checkpoint.memory_step == 20, "checkpoints in memory are deleted with the pods"
    silent = replace(empty, agents={})
    assert make_plan(silent).status.checkpoint.durable_step == 26


@pytest.mark.parametrize("limit", [SENTENCE_LIMIT, 101, 20])
def test_a_long_text_is_cut_in_the_middle_to_its_limit(limit: int) -> None:
    whole = "cause " + "x" * (limit - 12) + " advice"
    assert format_sentence(whole[1:], limit) == whole[1:], "as long as the limit"
    cut = format_sentence(whole, limit)
    assert len(cut) == limit
    assert cut.startswith("caus")
    assert " ... " in cut
    assert cut.endswith("advice")


def test_long_lists_name_the_first_and_count_the_rest() -> None:
    assert format_names(("a", "b", "c")) == "a, b, c"
    assert format_names(("a", "b", "c", "d", "e")) == "a, b, c and 2 more"


def test_steps_lost_are_those_that_the_agents_made_not_those_that_the_operator_received() -> None:
    entry = make_plan(resumed_at_step(13, step_before=41)).newest_entry
    assert (entry.step_before, entry.resume_step, entry.steps_lost) == (41, 13, 28)


def test_a_resumption_above_the_last_received_step_lost_none_and_shows_it() -> None:
    """All members are new, so nobody knows the last step."""
    progress = Progress(step=31, resume_step=30, updated=NOW - 1)
    entry = make_plan(build.with_heartbeats(second_generation(31), progress=progress)).newest_entry
    assert (entry.step_before, entry.resume_step, entry.steps_lost) == (30, 30, 0)


def test_a_failure_that_an_operator_learned_of_late_is_dated_to_the_last_step() -> None:
    record = build.restart_record(
        0, Cause.NODE_LOST, generation=2, resumed_at=NOW - 2, step_before=41, resume_step=30, failed_at=NOW - 90
    )
    entry = make_plan(second_generation(42, restarts=(record,))).newest_entry
    assert entry.failed_at == pytest.approx(NOW - 90)
    assert entry.recovered_seconds == pytest.approx(88.0)
    assert entry.detected_seconds == pytest.approx(86.0)


def test_an_earlier_failure_of_the_same_outage_keeps_its_time() -> None:
    """A hang is restarted in place, hangs again, and ends with the second one."""
    record = build.restart_record(0, Cause.HANG, generation=2, resumed_at=NOW - 2, step_before=20, failed_at=NOW - 9)
    observed = second_generation(21, restarts=(record,))
    first = OPEN.replaced(
        cause=Cause.HANG, response=RecoveryResponse.IN_PLACE, failed_at=NOW - 60, detected_seconds=3.5
    )
    observed = build.with_status(observed, history=(first, OPEN.replaced(attempt=1)))
    entry, _ = make_plan(observed).status.history
    assert (entry.failed_at, entry.detected_seconds) == (pytest.approx(NOW - 60), pytest.approx(3.5))
    assert entry.recovered_seconds == pytest.approx(58.0)
