"""Each class of fault, injected once against the operator's plan."""

import pytest

from tests.unit.simulate.simulate_builders import (
    DAY,
    HOUR,
    FaultClass,
    build_simulation,
    fault,
    only_interruption,
    simulate,
    spec,
)
from trainium_contract.faults.causes import Cause
from trainium_contract.status.interruptions import RecoveryResponse


def test_an_undisturbed_job_loses_its_start_alone() -> None:
    outcome = simulate()

    assert outcome.interruptions == ()
    assert outcome.strict_goodput > 0.9999
    assert outcome.work_done == pytest.approx(1.0, abs=0.0005)
    assert outcome.seconds_by_size[4] == pytest.approx(DAY, rel=0.001)
    assert set(outcome.lost_by_cause) <= {"Startup", "Overhead"}


def test_a_crash_is_answered_in_place_within_a_step_and_the_stages_of_a_start() -> None:
    outcome = simulate(fault(HOUR, FaultClass.PROCESS_CRASH), restart_seconds=3.0, load_memory_seconds=4.0)

    recovery = only_interruption(outcome)
    assert (recovery.cause, recovery.response) == (Cause.CRASH, RecoveryResponse.IN_PLACE)
    assert recovery.stages.restart == pytest.approx(3.0, abs=0.1)
    assert recovery.stages.load == pytest.approx(4.05, abs=0.1)
    assert recovery.recovered_seconds == pytest.approx(2.0 + 3.0 + 4.1, abs=0.2)


def test_a_hang_is_detected_at_its_limit() -> None:
    limit = {"recovery": {"hang": {"stepFloorSeconds": 60}}}
    outcome = simulate(fault(HOUR, FaultClass.HANG), job=spec(**limit))

    recovery = only_interruption(outcome)
    assert recovery.cause == Cause.HANG
    assert recovery.stages.detect == pytest.approx(60.0, abs=0.5)


def test_a_lost_node_is_replaced_by_the_spare() -> None:
    outcome = simulate(fault(HOUR, FaultClass.NODE_LOST))

    recovery = only_interruption(outcome)
    assert (recovery.cause, recovery.response) == (Cause.NODE_LOST, RecoveryResponse.SPARE)
    assert recovery.stages.detect < 10
    assert set(outcome.seconds_by_size) == {4}


def test_without_a_spare_a_rigid_job_waits_for_the_repair() -> None:
    outcome = simulate(fault(HOUR, FaultClass.NODE_LOST, duration=2 * HOUR), job=spec(spares=0))

    recovery = only_interruption(outcome)
    assert recovery.response == RecoveryResponse.REPLACE
    assert recovery.recovered_seconds == pytest.approx(2 * HOUR, rel=0.02)
    assert outcome.work_done == pytest.approx(22 / 24, abs=0.002)


def test_without_a_spare_an_elastic_job_trains_on_fewer_nodes_and_grows_back() -> None:
    elastic = spec(spares=0, workers={"minReplicas": 1}, recovery={"rescaleAfterSeconds": 60})
    outcome = simulate(fault(HOUR, FaultClass.NODE_LOST, duration=2 * HOUR), job=elastic)

    assert [entry.response for entry in outcome.interruptions] == [RecoveryResponse.SHRINK, RecoveryResponse.GROW]
    assert outcome.seconds_by_size[3] == pytest.approx(2 * HOUR, rel=0.1)
    # 24 samples in 8 passes of 3 where 4 nodes make 6: three quarters of the speed; strict goodput does not show it.
    assert outcome.work_done == pytest.approx(1 - (60 + 0.25 * 2 * HOUR) / DAY, abs=0.003)
    assert outcome.strict_goodput == pytest.approx(1 - 60 / DAY, abs=0.001)


def test_the_work_of_a_size_with_a_near_batch_is_counted_in_samples() -> None:
    near = spec(
        spares=0,
        workers={"minReplicas": 1},
        recovery={"rescaleAfterSeconds": 60},
        trainer={"batch": {"globalSize": 16, "tolerance": 0.1}},
    )
    outcome = simulate(fault(HOUR, FaultClass.NODE_LOST, duration=2 * HOUR), job=near)
    # 15 samples in 5 passes of 3 where 4 nodes make 16 in 4: three quarters; with 16 in 6 it would be two thirds.
    assert outcome.seconds_by_size[3] == pytest.approx(2 * HOUR, rel=0.1)
    assert outcome.work_done == pytest.approx(1 - (60 + 0.25 * 2 * HOUR) / DAY, abs=0.003)


def test_a_device_fault_moves_the_rank_and_avoids_the_machine() -> None:
    simulated = build_simulation()
    outcome = simulated.run([fault(HOUR, FaultClass.DEVICE_ERROR, duration=20 * HOUR)])

    recovery = only_interruption(outcome)
    assert (recovery.cause, recovery.response) == (Cause.DEVICE, RecoveryResponse.SPARE)
    members = {member.node_name for member in simulated.operator.membership.members}
    assert members == {"node-1", "node-2", "node-3", "node-4"}


def test_a_notice_costs_no_step() -> None:
    outcome = simulate(fault(HOUR, FaultClass.MAINTENANCE))

    recovery = only_interruption(outcome)
    assert (recovery.cause, recovery.steps_lost) == (Cause.PREEMPTED, 0)
    assert recovery.recovered_seconds < 10


def test_a_straggler_hands_its_rank_to_a_spare() -> None:
    outcome = simulate(fault(HOUR, FaultClass.STRAGGLER, duration=10 * HOUR))

    assert only_interruption(outcome).cause == Cause.STRAGGLER
    assert outcome.lost_by_cause["Overhead"] < 300


def test_a_straggler_without_a_spare_slows_the_job() -> None:
    outcome = simulate(fault(HOUR, FaultClass.STRAGGLER, duration=10 * HOUR), job=spec(spares=0))

    assert outcome.interruptions == ()
    # 10 hours at 1.3 times the step are 7.7 hours' work.
    assert outcome.work_done == pytest.approx(1 - (10 - 10 / 1.3) / 24, abs=0.003)


def test_a_rack_that_is_lost_is_one_interruption() -> None:
    outcome = simulate(fault(HOUR, FaultClass.RACK, same_machine=True), job=spec(nodes=8, spares=4))

    recovery = only_interruption(outcome)
    assert recovery.cause == Cause.NODE_LOST


def test_a_resize_is_followed_and_taken_back() -> None:
    outcome = simulate(fault(HOUR, FaultClass.RESIZE, replicas=3, duration=HOUR, same_machine=True))

    assert [entry.cause for entry in outcome.interruptions] == [Cause.RESIZE, Cause.RESIZE]
    assert outcome.seconds_by_size[3] == pytest.approx(HOUR, abs=5)


def test_only_the_newest_size_that_was_asked_for_is_taken_back() -> None:
    outcome = simulate(
        fault(HOUR, FaultClass.RESIZE, replicas=3, duration=HOUR),
        fault(1.5 * HOUR, FaultClass.RESIZE, replicas=2, duration=HOUR),
    )

    assert outcome.seconds_by_size[3] == pytest.approx(HOUR / 2, abs=5)
    assert outcome.seconds_by_size[2] == pytest.approx(HOUR, abs=10)


def test_a_node_that_is_lost_while_no_operator_leads_is_answered_by_the_next() -> None:
    outcome = simulate(
        fault(HOUR, FaultClass.OPERATOR_LOST, slot=-1, duration=30.0), fault(HOUR + 5, FaultClass.NODE_LOST), days=0.1
    )

    assert outcome.fault_counts[FaultClass.OPERATOR_LOST] == 1
    assert only_interruption(outcome).recovered_seconds is not None
    assert 25 < (only_interruption(outcome).recovered_seconds or 0.0) < 60


def test_the_first_step_is_longer_where_a_node_is_new() -> None:
    faults = (fault(HOUR, FaultClass.PROCESS_CRASH), fault(2 * HOUR, FaultClass.DEVICE_ERROR))
    before = simulate(*faults).interruptions
    after = simulate(*faults, newcomer_step_seconds=7.0).interruptions

    longer = [
        (new.recovered_seconds or 0.0) - (old.recovered_seconds or 0.0) for old, new in zip(before, after, strict=True)
    ]
    assert longer == pytest.approx([0.0, 7.0], abs=0.2)


def test_crashes_recover_during_an_api_server_outage() -> None:
    outcome = simulate(
        fault(HOUR, FaultClass.API_OUTAGE, slot=-1, duration=1800.0),
        fault(HOUR + 600, FaultClass.PROCESS_CRASH),
    )

    assert outcome.work_done > 0.9995
    assert [entry.cause for entry in outcome.interruptions] == [Cause.CRASH]


def test_a_node_lost_while_the_api_server_is_away_waits_for_the_operator() -> None:
    outcome = simulate(
        fault(HOUR, FaultClass.API_OUTAGE, slot=-1, duration=1800.0),
        fault(HOUR + 600, FaultClass.NODE_LOST),
    )

    assert outcome.work_done == pytest.approx(1 - 1200 / DAY, abs=0.002)


def test_a_tolerated_non_finite_loss_interrupts_nothing() -> None:
    tolerant = spec(trainer={"batch": {"globalSize": 24}, "nonFiniteTolerance": 3, "steps": 10_000_000})

    assert simulate(fault(HOUR, FaultClass.CORRUPTION), job=tolerant).interruptions == ()


def test_a_non_finite_loss_fails_the_job_until_it_is_recreated() -> None:
    outcome = simulate(fault(12 * HOUR, FaultClass.CORRUPTION))

    assert outcome.recreations == 1
    assert outcome.user_wait_seconds == pytest.approx(HOUR, rel=0.01)
    # The durable checkpoint of up to five minutes before is what is left.
    assert outcome.work_done == pytest.approx(1 - (HOUR + 150) / DAY, abs=0.003)
    assert outcome.lost_by_cause["UserWait"] == pytest.approx(HOUR, rel=0.01)


def test_a_lost_node_of_a_sharded_state_without_copies_resumes_from_the_last_commit() -> None:
    divided = {"trainer": {"batch": {"globalSize": 24}, "dataParallel": "FullySharded", "steps": 10_000_000}}
    alone = spec(**divided, checkpoint={"memory": {"buddies": 0}, "durable": {"everySeconds": 600}})
    copied = spec(**divided, checkpoint={"durable": {"everySeconds": 600}})

    assert only_interruption(simulate(fault(HOUR + 500, FaultClass.NODE_LOST), job=alone)).steps_lost > 50
    assert only_interruption(simulate(fault(HOUR + 500, FaultClass.NODE_LOST), job=copied)).steps_lost <= 1


def test_a_second_crash_during_a_restart_only_repeats_the_restart() -> None:
    outcome = simulate(
        fault(HOUR, FaultClass.PROCESS_CRASH),
        fault(HOUR + 3, FaultClass.PROCESS_CRASH, slot=1),
        restart_seconds=5.0,
    )

    assert all(entry.recovered_seconds is not None for entry in outcome.interruptions)
    assert outcome.work_done > 0.9995


def test_a_size_that_was_not_compiled_costs_its_first_step_once() -> None:
    elastic = spec(spares=0, workers={"minReplicas": 1}, recovery={"rescaleAfterSeconds": 60})
    losses = [fault(HOUR, FaultClass.NODE_LOST, duration=HOUR), fault(5 * HOUR, FaultClass.NODE_LOST, duration=HOUR)]
    outcome = simulate(*losses, job=elastic, compile_seconds=900.0)

    shrinks = [entry.recovered_seconds for entry in outcome.interruptions if entry.response == RecoveryResponse.SHRINK]
    assert shrinks[0] == pytest.approx(900 + 70, rel=0.05)
    assert shrinks[1] < 100


@pytest.mark.parametrize(("sizes", "seconds"), [("Start", 1200 + 70), ("Background", 70)])
def test_a_job_that_compiles_ahead_pays_for_the_sizes_that_its_spares_have_not_compiled(
    sizes: str, seconds: float
) -> None:
    """Two nodes of five go, of which one was a spare; none of the smaller sizes is there but in the background."""
    job = spec(
        spares=1,
        workers={"minReplicas": 1},
        recovery={"rescaleAfterSeconds": 60},
        precompile={"enabled": True, "sizes": sizes},
    )
    losses = [fault(HOUR, FaultClass.NODE_LOST, slot=0), fault(HOUR + 60, FaultClass.NODE_LOST, slot=1)]
    outcome = simulate(*losses, job=job, compile_seconds=1200.0)
    (shrink,) = [
        entry.recovered_seconds for entry in outcome.interruptions if entry.response == RecoveryResponse.SHRINK
    ]
    assert shrink == pytest.approx(seconds, rel=0.1)
