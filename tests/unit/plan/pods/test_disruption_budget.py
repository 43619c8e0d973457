"""The disruption budget: allowed evictions, refusals, and the number of writes."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan.plan_builders import NOW, agent, membership, planned, running, spec, with_status, without
from tests.unit.plan.plan_cluster import FakeCluster
from trainium_contract.status.conditions import Condition, ConditionStatus, ConditionType, Phase
from trainium_operator.plan.model import names
from trainium_operator.plan.model.actions import ApplyObject
from trainium_operator.plan.model.conditions import find_condition, is_true
from trainium_operator.plan.model.text import rfc3339
from trainium_operator.plan.pods import disruption_budget

STORAGE = {"storage": {"hostPath": {"path": "/fsx"}}}
LIMIT = 600


def limited(count: int = 4, *, spares: int = 0, storage: bool = True, age: float = 0.0, **status: Any) -> Any:
    """Return a job that trains and committed a checkpoint `age` seconds ago; its limit is ten minutes."""
    job_spec = spec(
        workers={"replicas": count, "spares": spares},
        checkpoint=STORAGE if storage else {},
        recovery={"disruption": {"maxDurableAgeSeconds": LIMIT}},
    )
    seen = running(count, spares=spares, job_spec=job_spec, status={"start_time": rfc3339(NOW - 5000), **status})
    saved = seen.job.status.checkpoint.model_copy(update={"durable_step": 10, "durable_time": rfc3339(NOW - age)})
    return with_status(seen, seen.job.status.model_copy(update={"checkpoint": saved}))


def min_available(result: Any) -> int | None:
    """Return the `minAvailable` that the plan writes; None without a write."""
    manifests = [each.manifest for each in result.actions if isinstance(each, ApplyObject)]
    budgets = [each for each in manifests if each["kind"] == "PodDisruptionBudget"]
    assert len(budgets) <= 1
    return budgets[0]["spec"]["minAvailable"] if budgets else None


def allowed(result: Any) -> bool:
    return is_true(result.status, ConditionType.DISRUPTION_ALLOWED)


def condition_of(result: Any) -> str:
    condition = find_condition(result.status, ConditionType.DISRUPTION_ALLOWED)
    assert condition is not None
    return condition.message


def fresh(seen: Any) -> Any:
    """Return the observation without a disruption budget."""
    children = {key: value for key, value in seen.children.items() if not key.startswith("PodDisruption")}
    return replace(seen, children=children)


@pytest.mark.parametrize(("spares", "must_stay"), [(0, 3), (1, 4), (2, 4)])
def test_one_worker_or_as_many_as_there_are_spares_may_be_evicted(spares: int, must_stay: int) -> None:
    result = planned(fresh(limited(spares=spares)))
    assert min_available(result) == must_stay
    assert allowed(result)


def test_an_old_checkpoint_forbids_disruptions_with_a_reason() -> None:
    result = planned(limited(age=LIMIT + 1))
    assert min_available(result) == disruption_budget.ALL_STAY
    assert not allowed(result)
    assert "step 10" in condition_of(result)
    assert "maxDurableAgeSeconds (600)" in condition_of(result)
    assert rfc3339(NOW - LIMIT - 1) in condition_of(result)


def test_the_job_is_requeued_when_the_age_passes_the_limit() -> None:
    result = planned(limited(age=LIMIT - 1))
    assert min_available(result) is None
    assert result.requeue_after is not None
    assert result.requeue_after <= 1


def test_a_new_checkpoint_allows_disruptions_again() -> None:
    old = limited(age=LIMIT + 1)
    written = {"PodDisruptionBudget/demo": digest(old.job, disruption_budget.ALL_STAY)}
    old = replace(old, children={**old.children, **written})
    assert min_available(planned(old)) is None, "what is refused already is not written again"
    newer = replace(old, job=limited(age=1).job)
    assert min_available(planned(newer)) == 3


def digest(job: Any, must_stay: int) -> str:
    metadata = disruption_budget.budget_manifest(job, must_stay)["metadata"]
    content_hash: str = metadata["annotations"][names.ANNOTATION_CONTENT_HASH]
    return content_hash


def test_without_any_durable_checkpoint_the_time_since_the_first_step_counts() -> None:
    seen = limited()
    none = seen.job.status.checkpoint.model_copy(update={"durable_step": -1, "durable_time": ""})
    status = seen.job.status.model_copy(update={"checkpoint": none, "start_time": rfc3339(NOW - LIMIT - 5)})
    beats = {
        uid: replace(known, heartbeat=known.heartbeat.model_copy(update={"progress": progress(known)}))
        for uid, known in seen.agents.items()
    }
    result = planned(replace(seen, job=replace(seen.job, status=status), agents=beats))
    assert not allowed(result)
    assert "none since" in condition_of(result)


def progress(known: Any) -> Any:
    return known.heartbeat.progress.model_copy(update={"durable_step": -1})


def test_a_suspension_resets_the_age_of_unsaved_work() -> None:
    resumed = Condition(
        type=ConditionType.SUSPENDED,
        status=ConditionStatus.FALSE,
        reason="NotSuspended",
        last_transition_time=rfc3339(NOW - 30),
    )
    assert allowed(planned(limited(age=90_000, conditions=(resumed,))))
    assert not allowed(planned(limited(age=90_000)))


def test_a_job_without_durable_storage_allows_disruptions() -> None:
    result = planned(limited(storage=False, age=90_000))
    assert allowed(result)
    assert "spec.checkpoint.storage" in condition_of(result)


def test_before_the_first_step_there_is_no_budget_and_nothing_is_refused() -> None:
    seen = fresh(limited())
    joining = {f"uid-{at}": agent(at) for at in range(4)}
    status = seen.job.status.model_copy(update={"start_time": ""})
    result = planned(replace(seen, job=replace(seen.job, status=status), agents=joining))
    assert min_available(result) is None


def test_nothing_may_be_evicted_while_the_job_recovers() -> None:
    result = planned(without(limited(spares=1), 1))
    assert min_available(result) == disruption_budget.ALL_STAY
    assert not allowed(result)
    assert "recovers" in condition_of(result)


def test_a_smaller_membership_needs_fewer_workers() -> None:
    seen = limited()
    size = seen.job.status.membership.model_copy(update={"size": 3})
    status = seen.job.status.model_copy(update={"membership": size, "waiting_since": NOW})
    small = replace(without(seen, 3), membership=membership(0, 1, 2), job=replace(seen.job, status=status))
    assert min_available(planned(small)) == 2


def test_the_budget_selects_the_workers_and_allows_eviction_of_unhealthy_pods() -> None:
    seen = limited()
    manifest = disruption_budget.budget_manifest(seen.job, 3)
    assert manifest["metadata"]["name"] == "demo"
    assert manifest["metadata"]["ownerReferences"][0]["uid"] == seen.job.uid
    assert manifest["spec"]["selector"] == {"matchLabels": names.selector_labels("demo")}
    assert manifest["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_the_budget_is_written_only_when_its_value_changes() -> None:
    job_spec = spec(
        workers={"spares": 1},
        checkpoint=STORAGE,
        recovery={"disruption": {"maxDurableAgeSeconds": 60}},
        trainer={"steps": 10**6},
    )
    written: list[str] = []

    class Recording(FakeCluster):
        def _write(self, write: Any) -> None:
            if isinstance(write, ApplyObject) and write.manifest["kind"] == "PodDisruptionBudget":
                written.append(write.manifest["spec"]["minAvailable"])
            super()._write(write)

    cluster = Recording(job_spec, 6)
    cluster.run(120)
    assert cluster.status.phase is Phase.RUNNING
    assert written == [4]
    cluster.crash_process(1)
    cluster.run(20)
    assert written == [4], "a restart in place is over in a moment"
    cluster.kill_pod(cluster.members()[1].view.name)
    cluster.run(60)
    assert written[1] == disruption_budget.ALL_STAY
    assert written[-1] == 4
    assert len(written) <= 4
