"""Jobs that run a program: sizes, conditions, and recoveries with and without reported steps."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW
from tests.unit.plan.plan_cluster import FakeCluster
from tests.unit.plan.plan_results import check_ledger, get_condition, make_plan, with_written_status
from trainium_contract.faults.causes import Cause
from trainium_contract.status.conditions import ConditionStatus, ConditionType, Phase
from trainium_contract.status.interruptions import RecoveryResponse
from trainium_contract.status.public import MembershipStatus, ProgressStatus
from trainium_contract.wire.messages import Progress, WorkerPhase
from trainium_operator.plan.model.conditions import find_condition, is_true
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.view.size import decide_size

# --- sizes ------------------------------------------------------------------------------------------------------------


def test_without_a_batch_every_size_of_whole_groups_is_legal() -> None:
    decision = decide_size(build.program_spec(workers={"replicas": 7, "minReplicas": 1}))
    assert (decision.desired, decision.floor, decision.reserve) == (7, 1, 0)
    assert [decision.find_legal_size(nodes) for nodes in (1, 4, 5, 6)] == [1, 4, 5, 6]
    assert decision.message == (
        "7 nodes: program.batch is not given, so the batch changes with the size unless the trainer is elastic"
    )
    grouped = decide_size(build.program_spec(workers={"replicas": 7, "minReplicas": 1}, parallelism={"tensor": 2}))
    assert (grouped.desired, grouped.reason) == (6, Reason.FLOORED)
    assert decision.compute_speed(3) == pytest.approx(3 / 7)


def test_with_a_batch_only_sizes_that_divide_it_are_legal() -> None:
    spec = build.program_spec(workers={"replicas": 7, "minReplicas": 1}, program={"batch": {"globalSize": 24}})
    decision = decide_size(spec)
    assert (decision.desired, decision.reason) == (6, Reason.FLOORED)
    assert [decision.find_legal_size(nodes) for nodes in (1, 2, 3, 4, 5)] == [1, 2, 3, 4, 4]
    assert [decision.count_micro_batches(nodes) for nodes in (1, 4, 6)] == [24, 6, 4]


def test_a_process_with_all_cores_counts_as_all_of_them() -> None:
    workers = {"replicas": 2, "accelerator": {"instanceType": "trn2.48xlarge"}}
    single = build.program_spec(workers=workers, program={"processesPerNode": 1}, parallelism={"tensor": 64})
    assert (decide_size(single).compute_data_parallel(2), single.workload.processes_per_node) == (2, 1)
    several = build.program_spec(workers={"replicas": 2}, program={"processesPerNode": 4}, parallelism={"tensor": 4})
    assert decide_size(several).compute_data_parallel(2) == 2


def test_a_program_that_cannot_be_resized_waits_at_its_size() -> None:
    spec = build.program_spec(
        workers={"minReplicas": 1}, program={"resize": "Never"}, recovery={"rescaleAfterSeconds": 1}
    )
    assert decide_size(spec).floor == 4
    observed = build.without_pods(build.running_job(4, job_spec=spec), 1)
    observed = with_written_status(observed)
    later = replace(observed, now=NOW + 600, agents={})
    assert make_plan(later).published_membership is None


def test_a_generation_of_a_program_has_its_processes_and_its_accumulation() -> None:
    changes: dict[str, Any] = {"processesPerNode": 2, "batch": {"globalSize": 48, "microSize": 2}}
    ready = build.agents(range(4))
    membership = make_plan(
        build.observation(build.job(build.program_spec(program=changes)), tuple(map(build.pod, range(4))), ready)
    ).published_membership
    assert membership is not None
    assert (membership.processes_per_node, membership.accumulation) == (2, 3)
    membership = make_plan(
        build.observation(build.job(build.program_spec()), tuple(map(build.pod, range(4))), ready)
    ).published_membership
    assert membership is not None
    assert (membership.processes_per_node, membership.accumulation) == (1, 0)


# --- status -----------------------------------------------------------------------------------------------------------


def agent_without_steps(ordinal: int, *, started: float = NOW - 5, **changes: Any) -> Any:
    """Return the agent of a member whose program reports no steps."""
    progress = Progress(step=0, started=started, hang_detection="Output", **changes)
    return build.training_agent(ordinal, progress=progress)


def test_the_status_shows_hang_detection_and_step_parsing() -> None:
    spec = build.program_spec()
    result = make_plan(
        build.running_job(4, job_spec=spec, agents={ordinal: agent_without_steps(ordinal) for ordinal in range(4)})
    )
    condition = result.condition(ConditionType.PROGRESS_REPORTED)
    assert (result.status.hang_detection, condition.status) == ("Output", ConditionStatus.UNKNOWN)
    assert condition.message.startswith("no step was reported yet: give program.progress.pattern")
    problem = "the pattern matches no line of the last minute; the last line is: loss 2.1"
    observed = build.running_job(4, job_spec=spec, agents={0: agent_without_steps(0, problem=problem)})
    result = make_plan(observed)
    condition = result.condition(ConditionType.PROGRESS_REPORTED)
    assert (condition.status, condition.message) == (ConditionStatus.FALSE, problem)
    assert result.event_notes(Reason.PROGRESS_UNREADABLE) == [problem]
    again = make_plan(build.with_status(observed, result.status))
    assert again.event_notes(Reason.PROGRESS_UNREADABLE) == [], "once"
    stepped = make_plan(build.running_job(4, job_spec=spec))
    assert is_true(stepped.status, ConditionType.PROGRESS_REPORTED)
    assert find_condition(make_plan(build.running_job(4)).status, ConditionType.PROGRESS_REPORTED) is None, (
        "of a program only"
    )


def test_a_program_without_steps_has_started_after_a_minute() -> None:
    spec = build.program_spec()
    young = make_plan(
        build.running_job(4, job_spec=spec, agents={ordinal: agent_without_steps(ordinal) for ordinal in range(4)})
    )
    assert young.status.start_time == ""
    old = make_plan(
        build.running_job(
            4, job_spec=spec, agents={ordinal: agent_without_steps(ordinal, started=NOW - 61) for ordinal in range(4)}
        )
    )
    assert old.status.start_time != ""


@pytest.mark.parametrize("checkpoints", [None, {"path": "/checkpoints/run", "committed": "{step}/done"}])
def test_checkpoints_of_a_program_count_where_they_are_known(checkpoints: Any) -> None:
    spec = build.program_spec(program={"checkpoints": checkpoints} if checkpoints else {})
    none = build.training_agents(range(4), progress=Progress(step=900, updated=NOW - 0.5))
    result = make_plan(build.running_job(4, job_spec=spec, agents=none, status={"start_time": "2027-01-15T06:00:00Z"}))
    allowed = result.condition(ConditionType.DISRUPTION_ALLOWED)
    health = result.condition(ConditionType.CHECKPOINT_HEALTHY)
    if checkpoints:
        assert "the newest durable checkpoint (none since" in allowed.message
        assert health.message == "no durable checkpoint is known yet"
    else:
        assert allowed.message == "the program's checkpoints are not known (spec.program.checkpoints is not set)"
        assert health.message == "the job has no spec.program.checkpoints"


def test_a_program_is_complete_when_it_ended_with_code_0_on_all_workers() -> None:
    done = build.agents(range(4), WorkerPhase.FINISHED, generation=1)
    result = make_plan(build.running_job(4, job_spec=build.program_spec(), agents=done))
    complete = result.condition(ConditionType.COMPLETE)
    assert complete.message == "the program ended with code 0 on all workers, after step 100"


# --- recoveries in virtual time ---------------------------------------------------------------------------------------


def start_job(*, steps: bool, nodes: int = 6, total: int = 100_000, **changes: Any) -> FakeCluster:
    cluster = FakeCluster(build.program_spec(**{"workers": {"spares": 1}, **changes}), nodes)
    cluster.total, cluster.reports_steps = total, steps
    cluster.run(15)
    assert cluster.status.phase is Phase.RUNNING
    return cluster


@pytest.mark.parametrize("steps", [True, False], ids=["steps", "no steps"])
def test_a_program_goes_through_a_crash_and_a_lost_node_and_completes(steps: bool) -> None:
    cluster = start_job(steps=steps, total=400)
    cluster.crash_process(2)
    cluster.run(20)
    assert cluster.membership is not None
    assert cluster.lose_node(cluster.membership.members[1].node_name)
    cluster.run(60)
    responses = [(entry.response, entry.recovered_seconds is not None) for entry in cluster.status.history]
    assert responses == [(RecoveryResponse.IN_PLACE, True), (RecoveryResponse.SPARE, True)]
    assert [entry.cause for entry in cluster.status.history] == [Cause.CRASH, Cause.NODE_LOST]
    assert cluster.status.phase is Phase.RUNNING
    check_ledger(cluster.status.goodput)
    cluster.run(300)
    assert cluster.status.phase is Phase.COMPLETED
    assert cluster.status.progress.step == (400 if steps else 0)
    check_ledger(cluster.status.goodput)
    ratio = cluster.status.goodput.ratio
    assert ratio > 0.8 if steps else ratio is None, "it is not known how much of its time was training"


def test_steps_after_an_ignored_request_to_stop_are_lost_and_explained() -> None:
    entry = build.interruption(RecoveryResponse.RESIZE, ago=70, took=None, cause=Cause.RESIZE, step_before=79)
    status = {"membership": MembershipStatus(generation=2, size=2), "history": (entry,)}
    observed = build.running_job(2, job_spec=build.program_spec(workers={"replicas": 2}), status=status)
    observed = replace(observed, membership=build.membership(0, 1, generation=2), published=2)
    left = Progress(step=279, updated=NOW - 20)
    fields = {"generation": 2, "killed_generation": 1}
    loading = build.agents(range(2), WorkerPhase.JOINING, progress=left, **fields)
    during = make_plan(build.with_agents(observed, loading))
    assert during.newest_entry.step_before == 279
    resumed = Progress(step=280, resume_step=270, updated=NOW - 1, started=NOW - 9, loaded=NOW - 6)
    training = build.agents(range(2), WorkerPhase.TRAINING, progress=resumed, **fields)
    after = make_plan(build.with_status(build.with_agents(observed, training), during.status)).newest_entry
    assert (after.step_before, after.resume_step, after.steps_lost) == (279, 270, 9)
    assert after.message.count("did not end in the grace period after SIGTERM and were killed") == 1


def test_steps_that_a_program_makes_after_an_ignored_suspension_are_lost_and_explained() -> None:
    killed = build.agents(
        range(2), WorkerPhase.TRAINING, progress=Progress(step=279, updated=NOW - 20), generation=1, killed_generation=1
    )
    spec = build.program_spec(workers={"replicas": 2}, suspend=True)
    observed = build.running_job(2, job_spec=spec, status={"progress": ProgressStatus(step=79)}, agents=killed)
    asked = build.agents(range(2), WorkerPhase.TRAINING, progress=Progress(step=79, updated=NOW - 20), generation=1)
    requested = make_plan(build.with_agents(observed, asked)).status
    assert (requested.membership.size, requested.history) == (0, ())
    observed = build.with_status(observed, requested)
    released = make_plan(observed)
    assert (released.newest_entry.response, released.newest_entry.step_before) == (RecoveryResponse.SUSPEND, 279)
    assert "did not end in the grace period after SIGTERM and were killed" in released.newest_entry.message
    again = make_plan(build.with_status(observed, released.status))
    assert (len(again.status.history), again.status.restarts.total) == (1, 0)
    assert [event.reason for event in again.events] == []

    resumed = Progress(step=280, resume_step=270, updated=NOW - 1, started=NOW - 9, loaded=NOW - 6)
    training = build.agents(range(2), WorkerPhase.TRAINING, progress=resumed, generation=2)
    spec = build.program_spec(workers={"replicas": 2})
    status = again.status.replaced(membership=MembershipStatus(generation=2, size=2))
    observed = build.with_agents(build.running_job(2, job_spec=spec, status={}), training)
    observed = replace(observed, membership=build.membership(0, 1, generation=2), published=2)
    after = make_plan(build.with_status(observed, status))
    assert (after.newest_entry.step_before, after.newest_entry.resume_step, after.newest_entry.steps_lost) == (
        279,
        270,
        9,
    )
    assert after.newest_entry.stages.total == 0, "no time of the suspension is charged"


def test_a_program_that_reports_its_first_step_late_has_started_then() -> None:
    cluster = start_job(steps=False)
    cluster.run(90)
    before = cluster.status.goodput
    assert before.lost_seconds.get("Startup", 0.0) < 20
    cluster.reports_steps = True
    cluster.run(60)
    ledger = cluster.status.goodput
    check_ledger(ledger)
    assert ledger.lost_seconds["Startup"] > 30, "what came before the first step, as a compilation, was start-up"


def test_a_program_shrinks_and_grows_where_it_can_restart_at_another_size() -> None:
    cluster = start_job(
        steps=True,
        nodes=4,
        workers={"minReplicas": 2},
        recovery={"rescaleAfterSeconds": 20},
        program={"batch": {"globalSize": 12}},
    )
    assert cluster.membership is not None
    lost = cluster.membership.members[0].node_name
    assert cluster.lose_node(lost)
    cluster.run(120)
    assert (len(cluster.membership.members), cluster.membership.accumulation) == (3, 4)
    cluster.restore_node(lost)
    cluster.run(300)
    assert (len(cluster.membership.members), cluster.membership.accumulation) == (4, 3)


def test_members_without_printed_steps_train_with_the_one_that_prints() -> None:
    quiet = build.agents(
        (0, 1, 2), WorkerPhase.LOADING, generation=1, progress=Progress(step=0, hang_detection="Steps")
    )
    result = make_plan(build.running_job(4, job_spec=build.program_spec(), agents=quiet))
    assert (result.status.phase, result.status.ready_replicas) == (Phase.RUNNING, 4)
    assert (result.status.progress.step, result.status.progress.loss) == (20, 2.0), "the last member reports the steps"
    silenced = build.running_job(
        4, job_spec=build.program_spec(), agents={**quiet, 3: quiet[2]}, status={"progress": result.status.progress}
    )
    assert make_plan(silenced).status.progress == result.status.progress, "started again, and no step yet"
    late = {**quiet, 3: build.training_agent(3, attempt=1)}
    assert make_plan(build.running_job(4, job_spec=build.program_spec(), agents=late)).status.ready_replicas == 1, (
        "of another attempt"
    )


def test_a_restart_ends_with_a_new_step_of_the_rank_that_prints_steps() -> None:
    silent_record = build.restart_record(1, resumed_at=NOW - 2.8)
    crashed = {"failures": (build.failure(137, rank=1),), "restarts": (silent_record,)}

    def observe(record: Any, step: int, phase: WorkerPhase) -> Any:
        first = build.agent(
            0, phase, generation=1, attempt=1, progress=Progress(step=step, resume_step=20), restarts=(record,)
        )
        quiet = {
            ordinal: build.agent(
                ordinal, WorkerPhase.TRAINING, generation=1, attempt=1, progress=Progress(step=0), **fields
            )
            for ordinal, fields in {1: crashed, 2: {"restarts": (silent_record,)}}.items()
        }
        progress = {"progress": ProgressStatus(step=25)}
        return build.running_job(
            3, job_spec=build.program_spec(workers={"replicas": 3}), agents={0: first, **quiet}, status=progress
        )

    first = make_plan(observe(build.restart_record(1, step_before=25), 25, WorkerPhase.LOADING))
    pending = first.newest_entry
    assert (pending.response, pending.recovered_seconds) == (RecoveryResponse.IN_PLACE, None), "node 0 still loads"
    resumed = build.restart_record(1, step_before=25, resume_step=20, resumed_at=NOW - 1)
    entry = make_plan(build.with_status(observe(resumed, 26, WorkerPhase.TRAINING), first.status)).newest_entry
    assert (entry.step_before, entry.resume_step, entry.steps_lost) == (25, 20, 5)
    assert entry.recovered_seconds == pytest.approx(2.0)


def test_a_crash_before_the_first_step_is_not_over_while_the_rank_with_the_steps_loads() -> None:
    crashed = {"failures": (build.failure(1, rank=1),), "restarts": (build.restart_record(1, resumed_at=NOW - 1),)}

    def observe(phase: WorkerPhase, record: Any) -> Any:
        of_attempt = {"generation": 1, "attempt": 1, "progress": Progress(step=0, started=NOW - 2)}
        first = build.agent(0, phase, restarts=(record,), **of_attempt)
        return build.running_job(
            2,
            job_spec=build.program_spec(workers={"replicas": 2}),
            agents={0: first, 1: build.agent(1, WorkerPhase.TRAINING, **of_attempt, **crashed)},
        )

    loading = make_plan(observe(WorkerPhase.LOADING, build.restart_record(1)))
    assert loading.newest_entry.recovered_seconds is None
    entry = make_plan(
        build.with_status(observe(WorkerPhase.TRAINING, build.restart_record(1, resumed_at=NOW)), loading.status)
    ).newest_entry
    assert entry.recovered_seconds is not None


def test_a_resize_is_over_when_the_rank_with_the_steps_makes_a_new_one() -> None:
    """Its agent shows the last step of the generation before until then, and silent members train at once."""

    def observe(phase: WorkerPhase, **progress: Any) -> Any:
        beats = {
            0: build.agent(0, phase, generation=2, progress=Progress(updated=NOW - 0.5, **progress)),
            1: build.agent(1, WorkerPhase.TRAINING, generation=2, progress=Progress(step=0)),
        }
        resize = build.interruption(RecoveryResponse.RESIZE, ago=5, took=None, cause=Cause.RESIZE, step_before=65)
        status = {
            "history": (resize,),
            "progress": ProgressStatus(step=68),
            "membership": MembershipStatus(generation=2, size=2, data_parallel=2),
        }
        return build.running_job(
            2,
            job_spec=build.program_spec(workers={"replicas": 2}),
            agents=beats,
            status=status,
            membership=build.membership(0, 1, generation=2),
            published=2,
        )

    first = make_plan(observe(WorkerPhase.LOADING, step=69))
    assert (first.newest_entry.recovered_seconds, first.newest_entry.step_before) == (None, 69), "it trained on"
    again = build.with_status(observe(WorkerPhase.TRAINING, step=69, resume_step=60), first.status)
    assert make_plan(again).newest_entry.recovered_seconds is None, "steps that are repeated are no new ones"
    entry = make_plan(
        build.with_status(observe(WorkerPhase.TRAINING, step=70, resume_step=60), first.status)
    ).newest_entry
    assert (entry.resume_step, entry.steps_lost, entry.recovered_seconds) == (60, 9, pytest.approx(4.5))


# --- torn checkpoints -------------------------------------------------------------------------------------------------


def run_until_loaded(cluster: FakeCluster) -> None:
    """Run until the ranks of the next generation train and have made no step yet."""
    assert cluster.membership is not None
    before = cluster.membership.generation
    for _ in range(200):
        cluster.run(1)
        agents = [pod.agent for pod in cluster.members()]
        if cluster.membership.generation > before and all(
            agent is not None and agent.phase is WorkerPhase.TRAINING for agent in agents
        ):
            return
    raise AssertionError("no new generation")


def crash_on_two_nodes(cluster: FakeCluster, codes: tuple[int, int], seconds_between: float = 0) -> None:
    """Let the first member give up and be replaced, then the second."""
    assert cluster.give_up(0, codes[0])
    run_until_loaded(cluster)
    cluster.run(seconds_between)
    assert cluster.give_up(1, codes[1])
    cluster.run(5)


@pytest.mark.parametrize("checkpoints", [None, {"path": "/checkpoints/run", "committed": "snapshot-{step}.pt"}])
def test_the_same_crash_on_two_nodes_fails_the_job_and_explains_torn_checkpoints(
    checkpoints: Any,
) -> None:
    cluster = start_job(steps=True, nodes=8, program={"checkpoints": checkpoints} if checkpoints else {})
    crash_on_two_nodes(cluster, (1, 1))
    assert cluster.status.phase is Phase.FAILED
    assert len(cluster.status.failures) == 1, "long before the budget"
    failed = get_condition(cluster.status, ConditionType.FAILED)
    assert failed.reason == Reason.USER_ERROR
    place = " in /checkpoints/run" if checkpoints else ""
    for part in (
        "crashed alike on two nodes without a new step in between: pod demo-w-",
        "boom | The program crashed",
        "exit code 1. If it cannot",
        f"If it cannot read its newest checkpoint{place}, a lost node has torn that file",
        "under a temporary name and rename it",
        "spec.program.checkpoints.committed",
    ):
        assert part in cluster.status.verdict


@pytest.mark.parametrize(
    ("codes", "seconds_between"),
    [((1, 1), 5), ((1, 2), 0), ((137, 137), 0)],
    ids=["a new step in between", "another crash", "killed by a signal"],
)
def test_different_crashes_on_two_nodes_are_recovered(codes: tuple[int, int], seconds_between: float) -> None:
    cluster = start_job(steps=True, nodes=8)
    crash_on_two_nodes(cluster, codes, seconds_between)
    cluster.run(60)
    assert cluster.status.phase is Phase.RUNNING
    assert [entry.cause for entry in cluster.status.history] == [Cause.CRASH, Cause.CRASH]


def test_a_repeated_crash_on_one_node_does_not_fail_the_job() -> None:
    """Its node may be at fault, where no other one is free."""
    spec = build.program_spec()
    entry = build.interruption(
        RecoveryResponse.REPLACE, ago=5, took=None, node="node-1", message="crashed (exit code 1); Traceback ... boom"
    )
    agents = {1: build.failed_agent(1, 1, rank=1, step=-1)}
    assert (
        make_plan(build.running_job(4, job_spec=spec, agents=agents, status={"history": (entry,)})).status.verdict == ""
    )
    other = entry.replaced(node="node-9")
    assert (
        "alike"
        in make_plan(build.running_job(4, job_spec=spec, agents=agents, status={"history": (other,)})).status.verdict
    )
