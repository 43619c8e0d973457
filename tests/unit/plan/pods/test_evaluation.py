"""The pod that evaluates milestones: its creation, its results, and its independence from the workers."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW, SETTINGS
from tests.unit.plan.plan_results import PlanResult, make_plan, with_written_status
from trainium_contract.job import TrainingJobSpec
from trainium_contract.status.conditions import ConditionType
from trainium_contract.status.results import MAX_EVALUATIONS, ArtifactReport, MilestoneEvaluation
from trainium_contract.wire.worker_env import ROLE_EVALUATION
from trainium_operator.plan.features.evaluation.pod import build_evaluation_pod
from trainium_operator.plan.features.evaluation.policy import BACKOFF_SECONDS, MAX_ATTEMPTS, describe_attempt
from trainium_operator.plan.model import names
from trainium_operator.plan.model.actions import CreateOtherPod, DeleteOtherPod
from trainium_operator.plan.model.conditions import set_condition
from trainium_operator.plan.model.observed import Observed, PodPhase, PodView, WriteRefusal
from trainium_operator.plan.model.reasons import Reason

REFUSED = {"Pod/demo-evaluation": WriteRefusal("exceeded quota", name_in_use=False, retry_at=NOW + 30)}
FIGURES = {"evaluation": [{"name": "hellaswag acc", "after": 0.3125, "standardError": 0.0208}]}


def measured_spec(**changes: Any) -> TrainingJobSpec:
    trainer = {
        "artifacts": {"atMilestones": True, "kinds": ["Model"]},
        "evaluate": {"atMilestones": True, "tasks": {"names": ["hellaswag"]}},
        **changes.pop("trainer", {}),
    }
    checkpoint = {"milestones": {"everyTokens": 1000}, "storage": {"persistentVolumeClaim": {"claimName": "fsx"}}}
    return build.spec(trainer=trainer, checkpoint=checkpoint, **changes)


def model(step: int) -> ArtifactReport:
    path = f"/checkpoints/default/demo/artifacts/step-{step}/model"
    return ArtifactReport(kind="Model", path=path, step=step, tokens=step * 100, bytes=3 << 20)


def job_with_models(*steps: int, **changes: Any) -> Observed:
    """Return a job that trains and has the models of these steps."""
    status = {"artifacts": tuple(map(model, steps)), **changes.pop("status", {})}
    observed = build.running_job(job_spec=measured_spec(), status=status, **changes)
    return replace(observed, other_pods=())


def creations(result: PlanResult) -> list[dict[str, Any]]:
    return [action.manifest for action in result.actions_of_type(CreateOtherPod)]


def deletions(result: PlanResult) -> list[tuple[str, str]]:
    return [(action.name, action.uid) for action in result.actions_of_type(DeleteOtherPod)]


def evaluation_pod(step: int, failures: int = 0, **changes: Any) -> tuple[PodView, ...]:
    evaluates = describe_attempt(MilestoneEvaluation(step=step, path=model(step).path, failures=failures))
    fields = {"name": "demo-evaluation", "uid": "uid-e", "evaluates": evaluates, "role": ROLE_EVALUATION, **changes}
    return (build.pod(0, **fields),)


def ended_pod(code: int, message: str, **changes: Any) -> tuple[PodView, ...]:
    phase = PodPhase.FAILED if code else PodPhase.SUCCEEDED
    return evaluation_pod(100, phase=phase, exit_code=code, message=message, **changes)


def test_models_are_evaluated_once_in_order_and_results_are_recorded_before_deletion() -> None:
    observed = job_with_models(100, 200)
    first = make_plan(observed)
    (manifest,) = creations(first)
    assert first.action_kinds[-1] == "CreateOtherPod"
    assert [(evaluation.step, evaluation.tokens, evaluation.figures) for evaluation in first.status.evaluations] == [
        (100, 10_000, ()),
        (200, 20_000, ()),
    ]
    evaluates = manifest["metadata"]["annotations"][names.ANNOTATION_EVALUATES]
    running_pod = evaluation_pod(100, evaluates=evaluates)
    assert make_plan(replace(with_written_status(observed), other_pods=running_pod)).action_kinds == []

    over = make_plan(replace(with_written_status(observed), other_pods=ended_pod(0, json.dumps(FIGURES))))
    (figure,) = over.status.evaluations[0].figures
    assert (figure.name, figure.after, figure.standard_error) == ("hellaswag acc", 0.3125, 0.0208)
    assert over.status.evaluations[0].time == "2027-01-15T08:00:00Z"
    assert deletions(over) == [("demo-evaluation", "uid-e")]
    assert creations(over) == []
    assert [(event.reason, event.note) for event in over.events if event.reason == "Evaluated"] == [
        ("Evaluated", "The model of step 100 was measured: hellaswag acc 0.3125 ± 0.021.")
    ]
    recorded = build.with_status(replace(observed, other_pods=ended_pod(0, json.dumps(FIGURES))), over.status)
    again = make_plan(recorded)
    assert (again.status.evaluations, deletions(again)) == (over.status.evaluations, [("demo-evaluation", "uid-e")])
    assert [event.reason for event in again.events] == []
    second = make_plan(replace(recorded, other_pods=()))
    assert creations(second)[0]["spec"]["containers"][0]["command"][2] == model(200).path


def test_no_evaluation_pod_before_the_last_one_is_deleted_and_pods_were_read() -> None:
    assert creations(make_plan(replace(job_with_models(100), other_pods=evaluation_pod(7, deleting=True)))) == []
    unread = make_plan(replace(job_with_models(100), other_pods=None))
    assert creations(unread) == []
    assert unread.requeue_after is not None
    assert unread.requeue_after <= 5.0


@pytest.mark.parametrize("code", [1, 137])
def test_a_failed_evaluation_is_retried_with_backoff_a_bounded_number_of_times(code: int) -> None:
    observed = job_with_models(100)
    for failures in range(MAX_ATTEMPTS):
        observed = with_written_status(observed)
        assert [evaluation.failures for evaluation in observed.job.status.evaluations] == [failures]
        failed = replace(observed, other_pods=ended_pod(code, "Traceback ... boom", failures=failures))
        result = make_plan(failed)
        (entry,) = result.status.evaluations
        assert (entry.failures, entry.message) == (failures + 1, "Traceback ... boom")
        assert [event.reason for event in result.events if event.reason == "EvaluationFailed"] == ["EvaluationFailed"]
        counted = make_plan(build.with_status(failed, result.status))
        assert (counted.status.evaluations, len(deletions(counted))) == ((entry,), 1)
        waiting = make_plan(replace(build.with_status(observed, result.status), other_pods=()))
        assert creations(waiting) == []
        later = NOW + BACKOFF_SECONDS * 2 ** (failures + 1)
        observed = replace(build.with_status(observed, result.status), other_pods=(), now=later)
        assert len(creations(make_plan(observed))) == (failures + 1 < MAX_ATTEMPTS)
        observed = replace(observed, now=NOW)


@pytest.mark.parametrize(
    ("pods", "failures"),
    [
        (ended_pod(64, "tasks need the package lm-eval"), MAX_ATTEMPTS),
        (ended_pod(0, "no JSON"), 1),
        (ended_pod(0, json.dumps({"evaluation": []})), 1),
        (ended_pod(0, json.dumps({"evaluation": [{"name": "x" * 500}]})), 1),
        (ended_pod(143, "", disrupted=True, reason="Preempted"), 0),
    ],
    ids=["mistake of the user", "no figures", "none", "malformed", "preempted"],
)
def test_only_errors_and_invalid_figures_count_as_failed_evaluations(pods: tuple[PodView, ...], failures: int) -> None:
    result = make_plan(replace(with_written_status(job_with_models(100)), other_pods=pods))
    assert [(evaluation.failures, evaluation.figures) for evaluation in result.status.evaluations] == [(failures, ())]
    assert len(deletions(result)) == 1


def test_a_deleted_evaluation_pod_is_recreated_with_the_same_attempt() -> None:
    observed = with_written_status(job_with_models(100))
    (first,), (second,) = creations(make_plan(job_with_models(100))), creations(make_plan(observed))
    assert first == second


@pytest.mark.parametrize("phase", [PodPhase.FAILED, PodPhase.PENDING, PodPhase.RUNNING])
def test_evaluation_never_changes_the_plan_of_the_workers(phase: PodPhase) -> None:
    plain = make_plan(job_with_models())
    pods = ended_pod(1, "boom") if phase is PodPhase.FAILED else evaluation_pod(100, phase=phase)
    for changes in ({"other_pods": pods}, {"refusals": REFUSED}):
        result = make_plan(replace(job_with_models(100), **changes))
        assert (result.created_pods, result.deleted_pods) == (plain.created_pods, plain.deleted_pods)
        assert result.status.conditions == plain.status.conditions
        assert (result.status.failures, result.status.membership) == (plain.status.failures, plain.status.membership)


def test_a_refused_pod_is_reported_and_tried_again_later() -> None:
    result = make_plan(replace(job_with_models(100), refusals=REFUSED))
    assert creations(result) == []
    (entry,) = result.status.evaluations
    assert (entry.failures, entry.message) == (0, "its pod cannot be created: exceeded quota")
    assert len(creations(make_plan(replace(job_with_models(100), refusals=REFUSED, now=NOW + 30)))) == 1


def test_evaluation_stops_with_suspended_failed_or_changed_jobs() -> None:
    observed = with_written_status(job_with_models(100))
    for job_spec in (measured_spec(suspend=True), build.spec()):
        result = make_plan(replace(observed, job=replace(observed.job, spec=job_spec), other_pods=evaluation_pod(100)))
        assert deletions(result) == [("demo-evaluation", "uid-e")]
    for kind, goes_on in ((ConditionType.FAILED, False), (ConditionType.COMPLETE, True)):
        status = set_condition(observed.job.status, kind, True, Reason.COMPLETED, "", now=NOW)
        over = replace(build.with_status(observed, status), other_pods=evaluation_pod(100))
        assert len(deletions(make_plan(over))) == (not goes_on)
        measured = make_plan(replace(over, other_pods=ended_pod(0, json.dumps(FIGURES))))
        assert len(measured.status.evaluations[0].figures) == 1
        assert len(creations(make_plan(replace(over, other_pods=())))) == goes_on


def test_the_newest_milestones_are_kept() -> None:
    many = tuple(
        MilestoneEvaluation(step=step, path=f"/m/{step}", failures=MAX_ATTEMPTS) for step in range(MAX_EVALUATIONS)
    )
    result = make_plan(job_with_models(100, status={"evaluations": many}))
    assert [evaluation.step for evaluation in result.status.evaluations] == [*range(1, MAX_EVALUATIONS), 100]


def build_manifest(job_spec: TrainingJobSpec, **settings: Any) -> dict[str, Any]:
    entry = MilestoneEvaluation(step=100, path=model(100).path, bytes=3 << 20)
    return build_evaluation_pod(build.job(job_spec), replace(SETTINGS, **settings), entry, "0 /m")


def test_the_evaluation_pod_is_no_worker_and_preempts_nobody() -> None:
    template = {
        "metadata": {"annotations": {"sidecar.istio.io/inject": "false"}},
        "spec": {
            "serviceAccountName": "reader",
            "priorityClassName": "high",
            "nodeSelector": {"zone": "a"},
            "containers": [{"env": [{"name": "HF_HOME", "value": "/fsx/hub"}], "resources": {"limits": {"cpu": "96"}}}],
        },
    }
    job_spec = measured_spec(
        workers={"accelerator": {"device": "neuron", "instanceType": "trn1.32xlarge"}, "template": template},
        scheduling={"priorityClassName": "high"},
        precompile={"enabled": True},
    )
    manifest = build_manifest(job_spec)
    metadata, body = manifest["metadata"], manifest["spec"]
    assert metadata["name"] == "demo-evaluation"
    assert metadata["ownerReferences"][0]["uid"] == "job-uid"
    selector = names.build_selector_labels("demo")
    assert {key: metadata["labels"].get(key) for key in selector} != selector
    assert metadata["annotations"] == {"sidecar.istio.io/inject": "false", names.ANNOTATION_EVALUATES: "0 /m"}
    assert (body["priorityClassName"], body["serviceAccountName"], body["restartPolicy"]) == (
        "idle-nodes",
        "reader",
        "Never",
    )
    assert (body["nodeSelector"], body["automountServiceAccountToken"]) == ({"zone": "a"}, False)
    assert {"affinity", "initContainers"} & body.keys() == set()
    assert {volume["name"] for volume in body["volumes"]} == {"config", "shared-memory", "cache", "checkpoints"}
    (container,) = body["containers"]
    assert container["resources"] == {"requests": {"cpu": "1", "memory": "2054Mi"}}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    variables = {variable["name"] for variable in container["env"]}
    assert "HF_HOME" in variables
    assert not any(name.startswith("TRAINIUM_") for name in variables)
    folder = "/checkpoints/default/demo/artifacts/step-100"
    assert container["command"] == [
        *("trainium-trainer", "evaluate", f"{folder}/model", "--config", "/etc/trainium/trainer.yaml"),
        *("--device", "cpu", "--message", "/dev/termination-log", "--output", f"{folder}/milestone.json"),
    ]


def test_without_a_class_the_pod_has_the_default_priority() -> None:
    assert "priorityClassName" not in build_manifest(measured_spec(), extra_priority_class="")["spec"]
