"""The goodput ledger: sums, ratios, stages, and continuation after a restart of the operator."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW
from tests.unit.plan.plan_cluster import FakeCluster
from tests.unit.plan.plan_results import check_ledger, make_plan
from trainium_contract.faults.causes import Cause
from trainium_contract.job import GoodputStatus, TrainingJobStatus
from trainium_contract.rfc3339 import format_rfc3339
from trainium_contract.sizes import BatchShape, SizeRule
from trainium_contract.status.internal import WINDOW_SAMPLES, StepWindow
from trainium_contract.status.interruptions import Interruption, RecoveryResponse
from trainium_contract.status.ledger import MAX_SIZES, OVERHEAD, STARTUP, SizeAccount
from trainium_contract.status.public import CompiledStatus, MembershipStatus
from trainium_contract.wire.messages import Progress, StepTiming, WorkerPhase
from trainium_operator.plan.model.observed import Observed, PodPhase
from trainium_operator.plan.report.step_time import find_reference_seconds


def long_job(**workers: Any) -> FakeCluster:
    return FakeCluster(
        build.spec(workers={"replicas": 4, "spares": 1, "minReplicas": 2, **workers}, trainer={"steps": 100_000}),
        nodes=7,
    )


def test_stage_decide_is_the_wait_for_a_worker() -> None:
    beside_a_spare = long_job()
    beside_a_spare.run(30)
    beside_a_spare.kill_pod(beside_a_spare.members()[1].view.name)
    beside_a_spare.run(60)
    entry = beside_a_spare.status.history[-1]
    assert (entry.response, entry.stages and entry.stages.decide) == (RecoveryResponse.SPARE, 0.0)

    alone = FakeCluster(build.spec(workers={"replicas": 4, "spares": 0}, trainer={"steps": 100_000}), nodes=4)
    alone.run(30)
    node = alone.members()[1].view.node
    alone.lose_node(node)
    alone.run(300)
    assert alone.status.history[-1].decided_at is None, "there is no place for a fourth worker"
    alone.restore_node(node)
    before_restart = alone.status.membership.generation
    seconds = 0.0
    while alone.status.membership.generation == before_restart:
        alone.run(1)
        seconds += 1
    alone.run(60)
    entry = alone.status.history[-1]
    assert entry.stages is not None
    assert entry.response is RecoveryResponse.REPLACE
    waited = 300 + seconds - (entry.detected_seconds or 0.0)
    assert entry.stages.decide == pytest.approx(waited, abs=3), "until the worker was there, and no longer"


def resumed_at(resume_step: int, entry: Interruption) -> TrainingJobStatus:
    """Return the status when ranks that have resumed from this step have made 19 steps of a second, after 5 s."""
    step = resume_step + 19
    progress = Progress(step=step, resume_step=resume_step, updated=NOW, started=NOW - 20, loaded=NOW - 19)
    observed = steady_job(step, history=(entry,), membership=MembershipStatus(generation=2, size=4))
    timing = StepTiming(steps=20, step_seconds=1.0, own_seconds=1.0)
    observed = build.with_heartbeats(observed, generation=2, progress=progress, timing=timing)
    assert observed.membership is not None
    moved = observed.membership.model_copy(update={"generation": 2})
    return plan_old_job(replace(observed, membership=moved, published=2))


def test_a_resize_is_charged_the_time_measured_by_the_ranks() -> None:
    """Decided 40 s ago; the API server stalled, so the ranks trained on, stopped for 5 s, and trained again."""
    entry = build.interruption(
        RecoveryResponse.RESIZE,
        ago=0,
        took=None,
        failed_at=NOW - 40,
        cause=Cause.RESIZE,
        detected_seconds=0.0,
        step_before=100,
    )
    # 17 more steps of a second, then 5 s until the first new step, and 18 s without writes.
    status = resumed_at(117, entry)
    closed = status.history[-1]
    assert closed.recovered_seconds == pytest.approx(5.0)
    assert status.goodput.lost_seconds[Cause.RESIZE.value] <= 5.0
    assert closed.steps_lost == 0


@pytest.mark.parametrize(("resume_step", "lost"), [(1000, 82.0), (103, 982.0)])
def test_steps_on_a_bad_node_without_a_replacement_are_not_lost(resume_step: int, lost: float) -> None:
    """The condition is 1,000 s old. Three steps may be missing in a heartbeat; 900 steps were made after it."""
    entry = build.interruption(
        RecoveryResponse.REPLACE,
        ago=0,
        took=None,
        failed_at=NOW - 1000,
        cause=Cause.DEVICE,
        detected_seconds=0.0,
        step_before=100,
    )
    closed = resumed_at(resume_step, entry).history[-1]
    assert closed.recovered_seconds == pytest.approx(lost)
    assert closed.steps_lost == 0


def test_an_undisturbed_run_loses_only_its_start() -> None:
    cluster = long_job()
    cluster.run(400)
    goodput = cluster.status.goodput
    assert set(goodput.lost_seconds) == {STARTUP}
    assert goodput.lost_seconds[STARTUP] < 10
    assert goodput.sizes == (SizeAccount(size=4, steps=goodput.counted_step, step_seconds=0.5, settled=True),)
    assert goodput.fleet_ratio == pytest.approx(goodput.ratio * 4 / 5, abs=0.02), "one node in five is a spare"


def test_a_size_without_a_sample_is_taken_by_the_passes_of_its_steps() -> None:
    shape = BatchShape(cores_per_node=1, tensor=1, pipeline=1, global_batch_size=8, micro_batch_size=1)
    goodput = GoodputStatus(sizes=(SizeAccount(size=4, steps=10, step_seconds=2.0, settled=True),))

    assert [find_reference_seconds(goodput, size, shape) for size in (2, 3, 4, 5)] == [4.0, 3.0, 2.0, 2.0]
    # Trained at with another batch than that of today: by the nodes.
    even = replace(shape, rule=SizeRule.EVEN)
    assert find_reference_seconds(goodput, 3, even) == pytest.approx(2.0 * 4 / 3)


def test_a_restarted_operator_continues_the_ledger() -> None:
    def run_to_goodput(cluster: FakeCluster, *, restarts: bool) -> GoodputStatus:
        cluster.run(60)
        cluster.crash_process(1)
        cluster.run(30)
        if restarts:
            cluster.crash_operator(20)
        cluster.run(60)
        return cluster.status.goodput

    undisturbed, restarted = run_to_goodput(long_job(), restarts=False), run_to_goodput(long_job(), restarts=True)
    assert restarted.lost_seconds == pytest.approx(undisturbed.lost_seconds)
    assert restarted.lost_by_stage == pytest.approx(undisturbed.lost_by_stage)
    assert restarted.productive_seconds == pytest.approx(undisturbed.productive_seconds, abs=15)


def test_steps_without_an_operator_are_counted() -> None:
    cluster = long_job()
    cluster.run(60)
    cluster.crash_operator(1800)
    cluster.run(1900)
    goodput = cluster.status.goodput
    assert goodput.wall_seconds > 1900
    assert goodput.ratio > 0.99


def test_a_suspension_is_not_counted() -> None:
    cluster = long_job()
    cluster.run(100)
    cluster.suspend(value=True)
    cluster.run(20)
    before = cluster.status.goodput
    cluster.run(600)
    assert cluster.status.goodput == before
    assert before.accounted_until is None
    cluster.suspend(value=False)
    cluster.run(60)
    after = cluster.status.goodput
    assert after.wall_seconds < before.wall_seconds + 61
    assert after.lost_seconds[STARTUP] > before.lost_seconds[STARTUP]


STEADY = GoodputStatus(
    wall_seconds=100.0,
    node_seconds=400.0,
    accounted_until=NOW - 10,
    starting=False,
    counted_step=100,
    sizes=(SizeAccount(size=4, steps=100, step_seconds=1.0, settled=True),),
    window=StepWindow(size=4, step=100, at=NOW - 10.5, samples=(1.0,) * 3),
)


def steady_job(step: int, goodput: GoodputStatus = STEADY, **status: Any) -> Observed:
    progress = Progress(step=step, resume_step=0, updated=NOW - 0.5)
    agents = build.training_agents(range(4), progress=progress)
    return build.running_job(
        4, agents=agents, status={"start_time": format_rfc3339(NOW - 100), "goodput": goodput, **status}
    )


def plan_old_job(observed: Observed) -> TrainingJobStatus:
    return make_plan(build.with_job(observed, created=NOW - 1000)).status


def test_slow_steps_are_overhead() -> None:
    goodput = plan_old_job(steady_job(105)).goodput
    assert goodput.productive_seconds == pytest.approx(105.5), "and half of the step in hand"
    assert goodput.lost_seconds == pytest.approx({OVERHEAD: 4.5})
    assert goodput.uptime_ratio == 1.0
    check_ledger(goodput)


def test_steps_that_are_computed_again_do_not_count_twice() -> None:
    goodput = plan_old_job(steady_job(97)).goodput
    assert goodput.counted_step == 100
    assert goodput.sizes[0].steps == 100


def test_the_reference_falls_only_for_a_clearly_faster_window() -> None:
    def reference(seconds: float, samples: int) -> float | None:
        window = StepWindow(size=4, step=100, at=NOW - 0.5 - 10 * seconds, samples=(seconds,) * samples)
        observed = steady_job(110, STEADY.model_copy(update={"window": window}))
        return plan_old_job(observed).goodput.sizes[0].step_seconds

    assert reference(0.98, WINDOW_SAMPLES - 1) == 1.0, "noise"
    assert reference(0.9, WINDOW_SAMPLES - 2) == 1.0, "the window is not full"
    assert reference(0.9, WINDOW_SAMPLES - 1) == pytest.approx(0.9)
    assert reference(2.0, WINDOW_SAMPLES - 1) == 1.0, "slow times are overhead, not another reference"


def test_a_pod_without_a_node_and_one_that_ended_hold_none() -> None:
    observed = steady_job(110)
    waiting = build.pod(4, phase=PodPhase.PENDING, node="", scheduled=False)
    ended = build.pod(5, phase=PodPhase.FAILED, reason="Error", exit_code=1)
    for pods in (observed.pods, (*observed.pods, waiting), (*observed.pods, ended)):
        assert plan_old_job(replace(observed, pods=pods)).goodput.node_seconds == 440.0


def test_no_sample_spans_an_interruption() -> None:
    crash = build.interruption(
        RecoveryResponse.IN_PLACE, ago=5, took=None, decided_at=None, detected_seconds=0.0, step_before=105
    )
    observed = steady_job(110, history=(crash,), membership=MembershipStatus(generation=1, attempt=1, size=4))
    observed = build.with_heartbeats(observed, attempt=1)
    status = plan_old_job(observed)
    assert status.history[-1].recovered_seconds is not None
    assert status.goodput.window.samples == STEADY.window.samples
    assert status.goodput.window.at is None


def test_the_stages_follow_what_the_agents_report() -> None:
    entry = build.interruption(
        RecoveryResponse.SPARE,
        ago=20,
        took=None,
        cause=Cause.NODE_LOST,
        detected_seconds=4.004,
        decided_at=NOW - 15,
        step_before=100,
    )
    progress = Progress(step=101, resume_step=98, updated=NOW - 1, started=NOW - 12, loaded=NOW - 9)
    observed = steady_job(104, history=(entry,), membership=MembershipStatus(generation=2, size=4))
    observed = build.with_heartbeats(observed, generation=2, progress=progress)
    assert observed.membership is not None
    moved = observed.membership.model_copy(update={"generation": 2})
    observed = replace(observed, membership=moved, published=2)
    closed = plan_old_job(observed).history[-1]
    assert closed.stages is not None
    stages = (closed.stages.detect, closed.stages.decide, closed.stages.restart, closed.stages.load)
    assert stages == pytest.approx((4.004, 0.996, 3.0, 3.0))
    assert closed.stages.replay == pytest.approx(7.0), "eight seconds, one of them for the first new step"
    smaller = build.spec(workers={"replicas": 6, "minReplicas": 2}, precompile={"enabled": True, "sizes": "Start"})
    for compiled, seconds in (((6, 4), 0.0), ((6,), 7.0)):
        known = CompiledStatus(sizes=compiled)
        job = build.with_job(build.with_status(observed, compiled=known), spec=smaller)
        divided = plan_old_job(job).history[-1].stages
        assert divided is not None
        assert (divided.compile, divided.replay) == pytest.approx((seconds, 7.0 - seconds)), compiled


def test_overlapping_interruptions_are_charged_once() -> None:
    entries = tuple(
        build.interruption(
            RecoveryResponse.IN_PLACE,
            ago=9 - number,
            took=None,
            attempt=number,
            cause=cause,
            decided_at=None,
            detected_seconds=0.0,
            step_before=100,
        )
        for number, cause in enumerate((Cause.CRASH, Cause.DEVICE))
    )
    observed = steady_job(100, history=entries, membership=MembershipStatus(generation=1, attempt=2, size=4))
    observed = build.with_heartbeats(observed, attempt=2, phase=WorkerPhase.JOINING)
    goodput = plan_old_job(observed).goodput
    assert goodput.lost_seconds["Crash"] == pytest.approx(9.0)
    assert "Device" not in goodput.lost_seconds
    check_ledger(goodput)


def test_accounts_of_sizes_are_bounded_without_losing_time() -> None:
    sizes = tuple(
        SizeAccount(size=size, steps=10, step_seconds=1.0, settled=True) for size in range(10, 10 + MAX_SIZES)
    )
    goodput = plan_old_job(steady_job(110, STEADY.model_copy(update={"sizes": sizes, "wall_seconds": 1000.0}))).goodput
    assert len(goodput.sizes) == MAX_SIZES
    assert [account.size for account in goodput.sizes][-1] == 4
    assert goodput.earlier_seconds == pytest.approx(10.0)
    assert [a.size < b.size for a, b in pairwise(goodput.sizes[:-1])] == [True] * (MAX_SIZES - 2)
