"""Which numbers of nodes are legal and useful for a batch, and how a changed or impossible size is reported."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_results import make_plan
from trainium_contract.status.conditions import ConditionType, Phase
from trainium_operator.plan.model.conditions import is_true
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.view.size import decide_size

EVEN: Any = {"elasticity": {"sizes": "Even"}}


@pytest.mark.parametrize(
    ("workers", "desired", "reserve", "reason"),
    [
        ({"replicas": 4}, 4, 0, Reason.AS_REQUESTED),
        ({"replicas": 5}, 5, 0, Reason.AS_REQUESTED),
        ({"replicas": 7}, 6, 1, Reason.NODES_IN_RESERVE),
        ({"replicas": 11, "minReplicas": 9}, 9, 2, Reason.NODES_IN_RESERVE),
        ({"replicas": 23}, 12, 11, Reason.NODES_IN_RESERVE),
        ({"replicas": 40}, 24, 16, Reason.NODES_IN_RESERVE),
        ({"replicas": 20, "maxReplicas": 11}, 8, 3, Reason.FLOORED),
    ],
)
def test_only_nodes_that_save_a_pass_train(workers: Any, desired: int, reserve: int, reason: Reason) -> None:
    decision = decide_size(build.spec(workers=workers))
    assert (decision.desired, decision.reserve, decision.reason) == (desired, reserve, reason)
    assert decision.find_legal_size(decision.desired) == desired


def test_a_near_batch_is_reported_and_counts_in_the_value_of_a_size() -> None:
    batch: Any = {"trainer": {"batch": {"globalSize": 24, "tolerance": 0.1}}}
    decision = decide_size(build.spec(workers={"replicas": 11, "minReplicas": 1}, **batch))
    assert (decision.desired, decision.reserve, decision.reason) == (11, 0, Reason.AS_REQUESTED)
    assert decision.message == "11 nodes: 2 passes a step of 22 samples, 100% of their rows filled"
    assert [decision.find_legal_size(nodes) for nodes in (11, 10, 9, 8, 7, 6)] == [11, 8, 8, 8, 6, 6]
    assert (decision.compute_batch(9), decision.count_micro_batches(9), decision.compute_speed(8)) == (
        24,
        3,
        pytest.approx(8 / 11),
    )


def test_a_batch_below_the_data_parallel_degree_is_reported_with_the_share_of_speed() -> None:
    accelerator: Any = {"coresPerNode": 4}
    decision = decide_size(
        build.spec(
            workers={"replicas": 2, "accelerator": accelerator},
            trainer={"batch": {"globalSize": 3, "microSize": 1}},
            elasticity={"sizes": "Any"},
        )
    )
    assert (decision.desired, decision.reserve, decision.reason) == (1, 1, Reason.NODES_IN_RESERVE)
    assert (
        "The batch of 3 is smaller than the data-parallel degree (4): 1 of its ranks never have work"
        in decision.message
    )
    assert "75% of the speed that its nodes could give; raise trainer.batch.globalSize" in decision.message


def test_a_size_that_leaves_model_parallel_groups_incomplete_is_floored_to_whole_ones() -> None:
    decision = decide_size(build.spec(workers={"replicas": 5}, parallelism={"tensor": 2}))
    assert (decision.desired, decision.reserve, decision.reason) == (4, 0, Reason.FLOORED)
    assert decision.message.startswith("5 nodes were requested; 4 is the largest legal size. A size is legal when")


def test_nodes_in_reserve_are_reported_in_the_status_and_in_an_event_and_get_pods() -> None:
    observed = build.observation(build.job(build.spec(workers={"replicas": 7})))
    result = make_plan(observed)
    condition = result.condition(ConditionType.SIZE_LEGAL)
    assert is_true(result.status, ConditionType.SIZE_LEGAL)
    assert condition.message == (
        "7 nodes were requested; 6 of them train: 4 passes a step, 100% of their rows filled. 1 in reserve: more would "
        "save no pass."
    )
    assert [event.reason for event in result.events] == ["NodesInReserve"]
    assert make_plan(build.with_status(observed, result.status)).events == (), "once"
    assert (result.status.desired, result.status.next_pod_ordinal) == (6, 7)


@pytest.mark.parametrize(
    ("workers", "desired", "floor", "reason"),
    [
        ({"replicas": 4}, 4, 4, Reason.AS_REQUESTED),
        ({"replicas": 5}, 4, 4, Reason.FLOORED),
        ({"replicas": 4, "minReplicas": 2}, 4, 2, Reason.AS_REQUESTED),
        ({"replicas": 8, "maxReplicas": 7, "minReplicas": 1}, 6, 1, Reason.FLOORED),
        ({"replicas": 5, "minReplicas": 5}, 0, 0, Reason.NO_LEGAL_SIZE),
        ({"replicas": 24}, 24, 24, Reason.AS_REQUESTED),
        ({"replicas": 25}, 24, 24, Reason.FLOORED),
    ],
)
def test_even_sizes_floors_a_requested_size_within_the_bounds(
    workers: Any, desired: Any, floor: Any, reason: Any
) -> None:
    decision = decide_size(build.spec(workers=workers, **EVEN))
    assert decision.reserve == 0
    assert (decision.desired, decision.floor, decision.reason) == (desired, floor, reason)


def test_a_floored_size_is_explained_in_the_status_and_in_an_event() -> None:
    result = make_plan(build.observation(build.job(build.spec(workers={"replicas": 5}, **EVEN))))
    condition = result.condition(ConditionType.SIZE_LEGAL)
    assert condition.reason == "FlooredToLegalSize"
    assert condition.message.startswith("5 nodes were requested; 4 is the largest legal size.")
    assert result.status.desired == 4
    assert [event.reason for event in result.events] == ["FlooredToLegalSize"]


def test_a_job_without_a_legal_size_fails_with_advice() -> None:
    result = make_plan(build.observation(build.job(build.spec(workers={"replicas": 5, "minReplicas": 5}, **EVEN))))
    assert result.status.phase is Phase.FAILED
    assert "No size from 5 to 5 nodes is legal" in result.status.verdict
    assert "Change spec.workers.replicas" in result.status.verdict
    assert result.actions == ()


def test_a_running_job_that_is_scaled_to_an_impossible_size_keeps_its_size() -> None:
    result = make_plan(build.running_job(4, job_spec=build.spec(workers={"replicas": 5, "minReplicas": 5}, **EVEN)))
    assert result.status.desired == 4
    assert result.status.phase is Phase.RUNNING
    assert not is_true(result.status, ConditionType.SIZE_LEGAL)


def test_a_contradictory_configuration_fails_with_a_sentence() -> None:
    broken = build.spec(trainer={"steps": 5, "schedule": {"warmupSteps": 10}})
    result = make_plan(replace(build.observation(build.job()), job=build.job(broken)))
    assert result.status.phase is Phase.FAILED
    assert "warmupSteps" in result.status.verdict


TOO_LARGE: Any = {
    "workers": {"replicas": 4, "accelerator": {"instanceType": "trn1.32xlarge"}},
    "parallelism": {"tensor": 1},
    "trainer": {"model": {"preset": "Llama2-7B"}, "batch": {"globalSize": 128}},
}


def test_a_model_that_fits_no_core_is_refused_before_a_pod_is_made() -> None:
    decision = decide_size(build.spec(**TOO_LARGE))
    assert (decision.desired, decision.reason) == (0, Reason.INVALID_SPEC)
    assert decision.message.startswith("A core of trn1.32xlarge has 16.0 GiB, but on 4 nodes a process needs 100.4 GiB")
    result = make_plan(build.observation(build.job(build.spec(**TOO_LARGE)), ()))
    assert result.created_pods == []
    condition = result.condition(ConditionType.SIZE_LEGAL)
    assert condition.message == decision.message


def test_a_running_job_that_should_not_fit_continues() -> None:
    """An estimate that a later version corrects must not end what runs."""
    observed = build.running_job()
    trains = build.with_job(observed, spec=build.spec(**TOO_LARGE))
    result = make_plan(trains)
    assert result.deleted_pods == {}
    assert result.status.phase is Phase.RUNNING


def sharded_spec(**workers: Any) -> Any:
    """Return a job of 13 billion parameters whose sharded state needs three nodes."""
    return build.spec(
        workers={"accelerator": {"instanceType": "trn2.3xlarge"}, **workers},
        parallelism={"tensor": 1},
        trainer={"model": {"preset": "Llama2-13B"}, "batch": {"globalSize": 96}, "dataParallel": "FullySharded"},
    )


def test_an_elastic_job_does_not_shrink_to_where_its_divided_state_fits_no_core() -> None:
    decision = decide_size(sharded_spec(replicas=8, minReplicas=1))
    assert (decision.desired, decision.floor, decision.reason) == (8, 3, Reason.AS_REQUESTED)
    assert decision.message == (
        "8 nodes. It does not shrink below 3 nodes, although minReplicas is 1: on fewer a process needs more than a "
        "core of trn2.3xlarge has for weights, gradients and optimizer alone."
    )
    assert [decision.find_legal_size(nodes) for nodes in (4, 3, 2, 1)] == [4, 3, 0, 0]
    result = make_plan(build.observation(build.job(sharded_spec(replicas=8, minReplicas=1)), ()))
    condition = result.condition(ConditionType.SIZE_LEGAL)
    assert (is_true(result.status, ConditionType.SIZE_LEGAL), condition.message) == (True, decision.message)


@pytest.mark.parametrize(
    "workers", [{"replicas": 8, "minReplicas": 3}, {"replicas": 8}, {"replicas": 4, "minReplicas": 4}]
)
def test_memory_raises_the_floor_only_where_needed(workers: Any) -> None:
    decision = decide_size(sharded_spec(**workers))
    assert decision.floor == workers.get("minReplicas", decision.desired)
    assert "shrink" not in decision.message


def test_a_model_that_fits_no_size_is_refused() -> None:
    decision = decide_size(sharded_spec(replicas=2, minReplicas=1))
    assert (decision.desired, decision.reason) == (0, Reason.INVALID_SPEC)
