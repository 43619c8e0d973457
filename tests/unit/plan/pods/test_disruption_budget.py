"""The disruption budget: allowed evictions, refusals, and the number of writes."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW
from tests.unit.plan.plan_cluster import FakeCluster
from tests.unit.plan.plan_results import make_plan
from trainium_contract.rfc3339 import format_rfc3339
from trainium_contract.status.conditions import Condition, ConditionStatus, ConditionType, Phase
from trainium_contract.wire.messages import Progress
from trainium_operator.plan.model import names
from trainium_operator.plan.model.actions import ApplyOptional
from trainium_operator.plan.model.conditions import find_condition, is_true
from trainium_operator.plan.pods import disruption_budget

STORAGE = {"storage": {"hostPath": {"path": "/fsx"}}}
LIMIT = 600


def job_with_age_limit(*, spares: int = 0, storage: bool = True, age: float = 0.0, **status: Any) -> Any:
    """Return a job that trains and committed a checkpoint `age` seconds ago; its limit is ten minutes."""
    job_spec = build.spec(
        workers={"replicas": 4, "spares": spares},
        checkpoint=STORAGE if storage else {},
        recovery={"disruption": {"maxDurableAgeSeconds": LIMIT}},
    )
    observed = build.running_job(
        4, spares=spares, job_spec=job_spec, status={"start_time": format_rfc3339(NOW - 5000), **status}
    )
    saved = observed.job.status.checkpoint.model_copy(
        update={"durable_step": 10, "durable_time": format_rfc3339(NOW - age)}
    )
    return build.with_status(observed, checkpoint=saved)


def min_available(result: Any) -> int | None:
    """Return the `minAvailable` that the plan writes; None without a write."""
    manifests = [action.manifest for action in result.actions_of_type(ApplyOptional)]
    budgets = [manifest for manifest in manifests if manifest["kind"] == "PodDisruptionBudget"]
    assert len(budgets) <= 1
    return budgets[0]["spec"]["minAvailable"] if budgets else None


def allows_disruptions(result: Any) -> bool:
    return is_true(result.status, ConditionType.DISRUPTION_ALLOWED)


def condition_message(result: Any) -> str:
    condition = find_condition(result.status, ConditionType.DISRUPTION_ALLOWED)
    assert condition is not None
    return condition.message


def without_budget(observed: Any) -> Any:
    """Return the observation without a disruption budget."""
    children = {key: value for key, value in observed.children.items() if not key.startswith("PodDisruption")}
    return replace(observed, children=children)


@pytest.mark.parametrize(("spares", "must_stay"), [(0, 3), (1, 4), (2, 4)])
def test_one_worker_or_as_many_as_there_are_spares_may_be_evicted(spares: int, must_stay: int) -> None:
    result = make_plan(without_budget(job_with_age_limit(spares=spares)))
    assert min_available(result) == must_stay
    assert allows_disruptions(result)


def test_an_old_checkpoint_forbids_disruptions_with_a_reason() -> None:
    result = make_plan(job_with_age_limit(age=LIMIT + 1))
    assert min_available(result) == disruption_budget.MIN_AVAILABLE_FORBIDDING_EVICTION
    assert not allows_disruptions(result)
    assert "step 10" in condition_message(result)
    assert "maxDurableAgeSeconds (600)" in condition_message(result)
    assert format_rfc3339(NOW - LIMIT - 1) in condition_message(result)


def test_the_job_is_requeued_when_the_age_passes_the_limit() -> None:
    result = make_plan(job_with_age_limit(age=LIMIT - 1))
    assert min_available(result) is None
    assert result.requeue_after is not None
    assert result.requeue_after <= 1


def test_a_new_checkpoint_allows_disruptions_again() -> None:
    old = job_with_age_limit(age=LIMIT + 1)
    written = {"PodDisruptionBudget/demo": budget_hash(old.job, disruption_budget.MIN_AVAILABLE_FORBIDDING_EVICTION)}
    old = replace(old, children={**old.children, **written})
    assert min_available(make_plan(old)) is None, "what is refused already is not written again"
    newer = replace(old, job=job_with_age_limit(age=1).job)
    assert min_available(make_plan(newer)) == 3


def budget_hash(job: Any, must_stay: int) -> str:
    metadata = disruption_budget.build_budget(job, must_stay)["metadata"]
    content_hash: str = metadata["annotations"][names.ANNOTATION_CONTENT_HASH]
    return content_hash


def test_without_any_durable_checkpoint_the_time_since_the_first_step_counts() -> None:
    observed = job_with_age_limit()
    none = observed.job.status.checkpoint.model_copy(update={"durable_step": -1, "durable_time": ""})
    status = observed.job.status.model_copy(update={"checkpoint": none, "start_time": format_rfc3339(NOW - LIMIT - 5)})
    progress = Progress(step=20, loss=2.0, memory_step=20, durable_step=-1, updated=NOW - 0.5)
    result = make_plan(build.with_heartbeats(build.with_status(observed, status), progress=progress))
    assert not allows_disruptions(result)
    assert "none since" in condition_message(result)


def test_a_suspension_resets_the_age_of_unsaved_work() -> None:
    resumed = Condition(
        type=ConditionType.SUSPENDED,
        status=ConditionStatus.FALSE,
        reason="NotSuspended",
        last_transition_time=format_rfc3339(NOW - 30),
    )
    assert allows_disruptions(make_plan(job_with_age_limit(age=90_000, conditions=(resumed,))))
    assert not allows_disruptions(make_plan(job_with_age_limit(age=90_000)))


def test_a_job_without_durable_storage_allows_disruptions() -> None:
    result = make_plan(job_with_age_limit(storage=False, age=90_000))
    assert allows_disruptions(result)
    assert "spec.checkpoint.storage" in condition_message(result)


def test_before_the_first_step_there_is_no_budget_and_nothing_is_refused() -> None:
    observed = without_budget(job_with_age_limit())
    joining = build.by_pod_uid(build.agents(range(4)))
    status = observed.job.status.model_copy(update={"start_time": ""})
    result = make_plan(replace(observed, job=replace(observed.job, status=status), agents=joining))
    assert min_available(result) is None


def test_nothing_may_be_evicted_while_the_job_recovers() -> None:
    result = make_plan(build.without_pods(job_with_age_limit(spares=1), 1))
    assert min_available(result) == disruption_budget.MIN_AVAILABLE_FORBIDDING_EVICTION
    assert not allows_disruptions(result)
    assert "recovers" in condition_message(result)


def test_a_smaller_membership_needs_fewer_workers() -> None:
    observed = job_with_age_limit()
    size = observed.job.status.membership.model_copy(update={"size": 3})
    status = observed.job.status.model_copy(update={"membership": size, "waiting_since": NOW})
    small = replace(
        build.without_pods(observed, 3), membership=build.membership(0, 1, 2), job=replace(observed.job, status=status)
    )
    assert min_available(make_plan(small)) == 2


def test_the_budget_selects_the_workers_and_allows_eviction_of_unhealthy_pods() -> None:
    observed = job_with_age_limit()
    manifest = disruption_budget.build_budget(observed.job, 3)
    assert manifest["metadata"]["name"] == "demo"
    assert manifest["metadata"]["ownerReferences"][0]["uid"] == observed.job.uid
    assert manifest["spec"]["selector"] == {"matchLabels": names.build_selector_labels("demo")}
    assert manifest["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_the_budget_is_written_only_when_its_value_changes() -> None:
    job_spec = build.spec(
        workers={"spares": 1},
        checkpoint=STORAGE,
        recovery={"disruption": {"maxDurableAgeSeconds": 60}},
        trainer={"steps": 10**6},
    )
    written: list[str] = []

    class BudgetRecorder(FakeCluster):
        def _write(self, write: Any) -> None:
            if isinstance(write, ApplyOptional) and write.manifest["kind"] == "PodDisruptionBudget":
                written.append(write.manifest["spec"]["minAvailable"])
            super()._write(write)

    cluster = BudgetRecorder(job_spec, 6)
    cluster.run(120)
    assert cluster.status.phase is Phase.RUNNING
    assert written == [4]
    cluster.crash_process(1)
    cluster.run(20)
    assert written == [4], "a restart in place is over in a moment"
    cluster.kill_pod(cluster.members()[1].view.name)
    cluster.run(60)
    assert written[1] == disruption_budget.MIN_AVAILABLE_FORBIDDING_EVICTION
    assert written[-1] == 4
    assert len(written) <= 4
