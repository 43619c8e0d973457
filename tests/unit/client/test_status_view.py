"""The screen and the advice of `kubectl trn status` in each state of a job, from recorded objects of a real one."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.testing.api.recorded_jobs import NOW, recorded_log
from tests.testing.suite.any_json import ANYTHING
from tests.unit.client.recorded_views import condition, job_view, recorded_job, status_text, view_alone
from trainium_client.render.json_output import format_json
from trainium_client.render.status import format_status_line
from trainium_client.views.interruption_report import explain_interruption
from trainium_contract.pages.facts import list_job_facts
from trainium_contract.pages.formatting import format_duration
from trainium_contract.rfc3339 import parse_rfc3339
from trainium_contract.views.events import build_event_views
from trainium_contract.views.job import build_job_view
from trainium_contract.views.raw import strip_control_characters


def test_status_shows_figures_of_milestones_or_why_there_are_none() -> None:
    figure = {"name": "mmlu acc", "after": 0.3125, "standardError": 0.0208}
    shown = status_text(
        job_view(
            evaluation=[figure | {"before": 0.25}],
            evaluations=[
                {"step": 100, "tokens": 12_345_678, "path": "/m", "figures": [figure]},
                {"step": 200, "tokens": 24_000_000, "path": "/n", "message": "exceeded quota"},
                {"step": 300, "tokens": 36_000_000, "path": "/o"},
            ],
        )
    )
    assert "mmlu acc 0.25 -> 0.3125 ± 0.021" in shown
    assert "step 100, 12.3M tokens: mmlu acc 0.3125 ± 0.021" in shown
    assert "step 200, 24M tokens: exceeded quota" in shown
    assert "step 300, 36M tokens: not measured yet" in shown


def test_status_shows_each_role_and_why_training_waits_for_it() -> None:
    message = "llama-rollout-2 on node n: ImagePullBackOff none."
    roles = [
        {"name": "rollout", "replicas": 4, "readyReplicas": 1, "minReady": 2, "restarts": 3, "message": message},
        {"name": "judge", "replicas": 1, "readyReplicas": 1, "minReady": 1},
    ]
    waits = condition("RolesReady", "RoleNotStarting", f"role rollout: 1 of 4 pods are ready: {message}")
    view = job_view(roles=roles, conditions=[waits])
    shown = " ".join(status_text(view, 300).split())
    assert f"rollout: 1 of 4 pods ready, training waits for 2, 3 replaced {message}" in shown
    assert "judge: 1 of 1 pod ready" in shown
    assert waits["message"] in view.advice
    suspended = {**waits, "reason": "Suspended", "message": ""}
    assert job_view(roles=roles, conditions=[suspended]).advice == job_view().advice


def test_status_shows_progress_and_remaining_time() -> None:
    view = job_view()

    assert (view.phase, view.step, view.total_steps, view.size, view.restarts) == ("Running", 263, 4000, 2, 3)
    # 3,737 steps of 0.301 s, and beside each 0.41 s lost, as until now: 118.4 s after the start for 79.6 s of steps.
    assert view.eta_seconds == pytest.approx(3737 * 0.301376 * (120.851 - 2.479) / 79.563)
    assert view.checkpoints.durable_step == 254
    assert view.advice == ()
    assert f"step 263/4000, {format_duration(view.eta_seconds)} left" in status_text(view)


def test_a_failed_job_shows_its_verdict_and_how_to_retry() -> None:
    view = job_view("failed")

    assert "there is no such file or folder" in view.advice[0]
    assert view.advice[1] == "What led to it: kubectl trn why broken"
    assert "run it again from the beginning (storage has no checkpoint): kubectl trn retry broken" in view.advice[2]
    assert "kubectl trn retry broken -f FILE" in view.advice[2]
    assert view.eta_seconds is None
    assert view.checkpoints.durable_step is None
    assert "none on storage" in status_text(view)
    assert re.search(r"Stopped +UserError on ", status_text(view)), "the end of a job is no interruption"


def test_memory_checkpoints_are_not_shown_without_pods() -> None:
    assert "step 262 in memory" in status_text(job_view())
    for phase in ("Completed", "Failed", "Suspended"):
        assert "in memory" not in status_text(job_view(phase=phase))


def test_the_status_line_counts_requested_workers_before_training() -> None:
    job = recorded_job() | {"status": {"phase": "Pending", "desired": 2}}
    assert format_status_line(view_alone(job)) == "Pending, step 0, 0/2 workers, 0 interruptions"


def test_a_job_without_a_status_asks_for_the_operator() -> None:
    job = {key: value for key, value in recorded_job().items() if key != "status"}

    view = view_alone(job)
    assert view.phase == ""
    assert "No operator has answered" in view.advice[0]
    assert "no status yet" in status_text(view)


def test_a_status_that_is_no_longer_updated_is_stale() -> None:
    view = view_alone(recorded_job(), after=600)

    assert view.stale
    assert "does not write" in view.advice[0]
    assert not job_view().stale


@pytest.mark.parametrize(("desired", "seconds"), [(2, 15), (256, 15), (1024, 60), (4096, 90)])
def test_an_old_status_shows_neither_a_speed_nor_a_time_left(desired: int, seconds: int) -> None:
    job = recorded_job(desired=desired)
    written = view_alone(job).written_at
    assert written is not None

    before = status_text(build_job_view(job, now=written + seconds - 1))
    after = status_text(build_job_view(job, now=written + seconds))

    assert "no news" not in before
    assert "tokens/s" in before
    assert " left" in before
    assert f"Running (no news for {seconds} s)" in " ".join(after.split())
    assert "tokens/s" not in after
    assert " left" not in after


def test_a_live_page_names_the_time_of_the_last_news() -> None:
    view = view_alone(recorded_job(), after=600)
    assert "(no news since " in list_job_facts(view, ages=False)[0].warning


def test_a_step_that_is_no_longer_updated_is_shown_with_its_age() -> None:
    """Its namespace has left `watchNamespaces`: phase and step remain as they were written last."""
    job = recorded_job()
    updated = parse_rfc3339(job["status"]["progress"]["updated"])
    assert updated is not None

    def progress_after(seconds: float) -> str:
        (progress,) = [
            fact.value
            for fact in list_job_facts(build_job_view(job, now=updated + seconds))
            if fact.label == "Progress"
        ]
        return progress

    assert "step 263/4000 (10m ago)" in progress_after(600)
    assert "ago" not in progress_after(120), "a step may take a while"
    job["status"]["phase"] = "Suspended"
    assert "ago" not in progress_after(600), "a suspended job makes no step"


def test_a_status_that_need_not_change_is_not_stale() -> None:
    """A worker that waits an hour for its init container is no sign that the operator is away."""
    message = "0 of 2 workers are registered. llama-w-0 on node n: init container fetch is running"
    job = recorded_job(phase="Pending", conditions=[condition("PodsReady", "WorkerNotStarting", message)])
    view = view_alone(job, after=3600)
    assert not view.stale
    assert view.advice == (message,)
    job["status"]["conditions"] = []
    (advice,) = view_alone(job, after=3600).advice
    assert "If it should have, check that the operator runs" in advice


def test_a_job_held_by_a_finalizer_names_it() -> None:
    message = "the job is being deleted; it waits for: finalizer example.com/hold"
    held = [condition("Running", "Terminating", message), condition("Ready", "Terminating", message)]
    job = recorded_job(phase="Terminating", conditions=held)
    job["metadata"] |= {"deletionTimestamp": "2026-11-21T10:00:00Z", "generation": 1 << 20}
    view = view_alone(job)
    assert view.advice == (message,)
    assert not view.outdated
    del job["metadata"]["deletionTimestamp"]
    assert view_alone(job).outdated


def test_a_refusal_in_two_conditions_is_one_line_of_advice() -> None:
    refusal = "failed quota: team: must specify limits.memory for: worker."
    conditions = [
        condition("PodsReady", "CreationRefused", f"0 of 2 workers are registered. {refusal}"),
        condition("Admitted", "CreationRefused", refusal),
    ]
    assert view_alone(recorded_job(phase="Pending", conditions=conditions)).advice == (
        f"0 of 2 workers are registered. {refusal}",
    )


def test_a_failed_job_lists_its_changed_fields_and_the_retry_command() -> None:
    job = recorded_job("failed")

    def build_advice(generation: int = 1, **record: Any) -> str:
        job["metadata"]["generation"], job["status"]["observedGeneration"] = generation, 1
        job["status"]["failedSpec"] = record
        return view_alone(job).advice[-1]

    name = job["metadata"]["name"]
    assert build_advice(changes=[]).startswith("Nothing has changed since the failure. To run it again from ")
    source = {"field": "trainer.data.source", "was": '"/a"', "now": '"/b"'}
    changes = [source, {"field": "trainer.seed", "was": "", "now": "7"}, {"field": "x", "was": "#1", "now": "#2"}]
    output = build_advice(changes=changes)
    assert output.startswith(
        'Changed since the failure: trainer.data.source (was "/a", is "/b"), trainer.seed (was not set, is 7), x. '
    )
    assert f"kubectl trn retry {name}." in output
    assert "and 4 more" in build_advice(changes=[source] * 10)
    for unknown in (build_advice(), build_advice(generation=2, changes=[])):
        assert unknown.startswith("To run it again from "), "the specs were not compared"
    assert "kubectl trn retry" in status_text(view_alone(job))


def test_an_ended_job_is_not_stale() -> None:
    assert not build_job_view(recorded_job("failed"), now=NOW + 1e6).stale


def test_the_command_of_a_program_is_shown_on_one_line() -> None:
    job = recorded_job()
    del job["spec"]["trainer"], job["spec"]["checkpoint"]
    job["spec"]["program"] = {"image": "x", "command": ["sh", "-c"], "args": ["newest=$(ls)\n  exec python train.py\n"]}
    assert view_alone(job).model == "sh -c newest=$(ls) exec python train.py"


def test_escape_sequences_are_printed_only_with_colour() -> None:
    assert "\x1b" not in status_text(job_view())
    assert "\x1b" in status_text(job_view(), colour=True)


def test_text_of_a_pod_can_neither_control_the_terminal_nor_be_markup() -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J[red]boo[/red] \u202eevil"
    (first, *_) = recorded_job()["status"]["history"]
    view = job_view(verdict=hostile, phase="Failed", history=[first | {"message": hostile}])

    shown = status_text(view)

    assert "[red]boo[/red]" in shown
    assert not any(sign in shown for sign in "\x1b\x07\u202e")


@given(st.sampled_from(sorted(recorded_job()["status"])), ANYTHING)
def test_a_status_with_any_malformed_field_is_shown(field: str, value: Any) -> None:
    view = job_view(**{field: value})

    assert status_text(view, 60)
    json.loads(format_json(view))
    assert format_status_line(view)
    explain_interruption(recorded_job(**{field: value}), log=recorded_log())


def test_json_output_has_camel_case_keys_and_all_figures() -> None:
    reported = json.loads(format_json(job_view()))

    assert reported["goodput"]["lostSeconds"]["Crash"] == pytest.approx(2.834)
    assert reported["checkpoints"]["durableStep"] == 254
    assert reported["workers"]["members"] == {"Running": 2}


@pytest.mark.parametrize(
    ("seconds", "output"),
    [
        (None, "-"),
        (0, "0s"),
        (0.003, "3ms"),
        (0.96, "1s"),
        (3.14, "3.1s"),
        (59.6, "1m"),
        (3600, "1h"),
        (90_000, "1d1h"),
    ],
)
def test_durations_have_at_most_two_units(seconds: float | None, output: str) -> None:
    assert format_duration(seconds) == output


@pytest.mark.parametrize(
    ("pods", "output"),
    [
        (("True", "AllReady", "2 workers are registered"), "Pending, 2 workers are registered and get ready: imports"),
        (("False", "WaitingForWorkers", "1 of 2 workers are registered. "), "Pending, 1 of 2 workers are registered\n"),
        (("False", "Unschedulable", "llama-w-1 cannot be scheduled"), "Pending\n"),
    ],
)
def test_a_job_that_has_not_started_reports_what_it_waits_for(pods: tuple[str, str, str], output: str) -> None:
    status, reason, message = pods
    view = job_view(phase="Pending", stage="", conditions=[condition("PodsReady", reason, message, status)])
    shown = re.sub(" +", " ", status_text(view))
    assert f"Phase {output}" in re.sub(" *\n", "\n", shown)
    assert (message in view.advice) is (reason == "Unschedulable")


def test_failing_saves_are_reported_once_with_the_error_of_the_store() -> None:
    overdue = condition("CheckpointHealthy", "CheckpointOverdue", "too slow")
    full = "a save failed, training continues: No space left on device: free space"
    view = job_view(conditions=[overdue], checkpoint={"durableStep": 50, "notice": full})

    assert view.advice == (full,)
    assert status_text(view, 200).count("free space") == 1
    assert "too slow" in job_view(conditions=[overdue]).advice


def test_a_repeated_alert_is_shown_once() -> None:
    view = job_view(alerts=[{"kind": "LossAlarm", "step": 606, "message": "the run diverges unless this passes"}])
    repeated = tuple(replace(view.events[0], reason="LossAlarm", message=f"step {step}") for step in range(9))
    shown = status_text(replace(view, events=repeated + view.events))

    assert shown.count("LossAlarm") == 1
    assert "LossAlarm: step 606: the run diverges" in shown
    assert replace(view.alerts[0], message="Step 606: it diverges").text == "Step 606: it diverges", (
        "the step is printed once"
    )
    assert "GenerationStarted" in shown


def test_a_job_of_another_controller_names_that_controller() -> None:
    job = recorded_job()
    del job["status"]
    job["spec"]["managedBy"] = "kueue.x-k8s.io/multikueue"

    view = view_alone(job)

    assert view.advice == (
        "kueue.x-k8s.io/multikueue controls this job (spec.managedBy), and the operator leaves it alone: look there.",
    )
    job["spec"]["managedBy"] = "trainium.dev/trainium-operator"
    assert "No operator has answered" in view_alone(job).advice[0]


def test_control_characters_are_removed_and_line_breaks_kept() -> None:
    assert strip_control_characters("a\x1b[31mb\x07\n\tc\x9b") == "ab\n\tc"


def test_unpaired_surrogates_are_removed() -> None:
    unpaired = json.loads('"a\\ud800b"')
    assert strip_control_characters(unpaired) == "ab"
    (event,) = build_event_views([{"reason": unpaired, "message": unpaired}])
    assert (event.reason, event.message) == ("ab", "ab")
