"""Views and pages of a job from recorded objects of a real one."""

import base64
import gzip
import json
import re
import textwrap
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import RenderableType

from tests.testing.api.recorded_jobs import NOW, recorded_log, recorded_object
from trainium_client.render.interruption import render_interruption
from trainium_client.render.json_output import format_json
from trainium_client.render.page import render_text
from trainium_client.render.status import format_status_line, render_status
from trainium_client.render.tables import (
    render_goodput,
    render_machines,
    render_scaling,
    render_sizes,
)
from trainium_client.views.interruption_report import MAX_LINES, explain_interruption
from trainium_client.views.machines import find_machine, parse_machines
from trainium_client.views.sizes import list_scaling_rows, list_size_rows
from trainium_contract.pages.facts import list_job_facts
from trainium_contract.pages.formatting import format_duration
from trainium_contract.pages.job_page import JobReport, report_html
from trainium_contract.rfc3339 import parse_rfc3339
from trainium_contract.views.events import build_event_views
from trainium_contract.views.job import build_job_view, compute_cost
from trainium_contract.views.job_view import JobView
from trainium_contract.views.raw import strip_control_characters
from trainium_contract.views.status_reader import read_public_status
from trainium_contract.views.workers import Members, build_members, build_rank_rows, count_workers, parse_pod_table
from trainium_contract.wire.recorded_membership import MAX_RECORD_BYTES, parse_members, parse_membership
from trainium_operator.plan.fleet.memory import MachineState
from trainium_operator.plan.model.text import format_sentence


def job_view(name: str = "job", **changes: Any) -> JobView:
    job = recorded_object(name)
    job["status"] |= changes
    workers = count_workers(parse_pod_table(recorded_object("pods")), members())
    return build_job_view(job, now=NOW, workers=workers, events=build_event_views(recorded_object("events")["items"]))


def members() -> Members:
    return build_members(parse_membership(recorded_object("membership")))


def render_plain(content: RenderableType, width: int = 100) -> str:
    return render_text(content, width=width, colour=False)


def status_text(view: JobView, width: int = 100, *, colour: bool = False) -> str:
    return render_text(render_status(view, now=NOW, width=width), width=width, colour=colour)


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
    job = recorded_object("job")
    job["status"] = {"phase": "Pending", "desired": 2}
    assert format_status_line(build_job_view(job, now=NOW)) == "Pending, step 0, 0/2 workers, 0 interruptions"


def test_a_job_without_a_status_asks_for_the_operator() -> None:
    job = {key: value for key, value in recorded_object("job").items() if key != "status"}

    view = build_job_view(job, now=NOW)
    assert view.phase == ""
    assert "No operator has answered" in view.advice[0]
    assert "no status yet" in status_text(view)


def test_a_status_that_is_no_longer_updated_is_stale() -> None:
    view = build_job_view(recorded_object("job"), now=NOW + 600)

    assert view.stale
    assert "does not write" in view.advice[0]
    assert not job_view().stale


@pytest.mark.parametrize(("desired", "seconds"), [(2, 15), (256, 15), (1024, 60), (4096, 90)])
def test_an_old_status_shows_neither_a_speed_nor_a_time_left(desired: int, seconds: int) -> None:
    job = recorded_object("job")
    job["status"] |= {"desired": desired}
    written = build_job_view(job, now=NOW).written_at
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
    view = build_job_view(recorded_object("job"), now=NOW + 600)
    assert "(no news since " in list_job_facts(view, ages=False)[0].warning


def test_a_step_that_is_no_longer_updated_is_shown_with_its_age() -> None:
    """Its namespace has left `watchNamespaces`: phase and step remain as they were written last."""
    job = recorded_object("job")
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
    job = recorded_object("job")
    message = "0 of 2 workers are registered. llama-w-0 on node n: init container fetch is running"
    job["status"] |= {"phase": "Pending", "conditions": [condition("PodsReady", "WorkerNotStarting", message)]}
    view = build_job_view(job, now=NOW + 3600)
    assert not view.stale
    assert view.advice == (message,)
    job["status"]["conditions"] = []
    (advice,) = build_job_view(job, now=NOW + 3600).advice
    assert "If it should have, check that the operator runs" in advice


def test_a_job_held_by_a_finalizer_names_it() -> None:
    job = recorded_object("job")
    message = "the job is being deleted; it waits for: finalizer example.com/hold"
    held = [condition("Running", "Terminating", message), condition("Ready", "Terminating", message)]
    job["status"] |= {"phase": "Terminating", "conditions": held}
    job["metadata"] |= {"deletionTimestamp": "2026-11-21T10:00:00Z", "generation": 1 << 20}
    view = build_job_view(job, now=NOW)
    assert view.advice == (message,)
    assert not view.outdated
    del job["metadata"]["deletionTimestamp"]
    assert build_job_view(job, now=NOW).outdated


def test_a_refusal_in_two_conditions_is_one_line_of_advice() -> None:
    job = recorded_object("job")
    refusal = "failed quota: team: must specify limits.memory for: worker."
    job["status"] |= {
        "phase": "Pending",
        "conditions": [
            condition("PodsReady", "CreationRefused", f"0 of 2 workers are registered. {refusal}"),
            condition("Admitted", "CreationRefused", refusal),
        ],
    }
    assert build_job_view(job, now=NOW).advice == (f"0 of 2 workers are registered. {refusal}",)


def condition(kind: str, reason: str, message: str) -> dict[str, str]:
    return {"type": kind, "status": "False", "reason": reason, "message": message}


def test_a_failed_job_lists_its_changed_fields_and_the_retry_command() -> None:
    job = recorded_object("failed")

    def build_advice(generation: int = 1, **record: Any) -> str:
        job["metadata"]["generation"], job["status"]["observedGeneration"] = generation, 1
        job["status"]["failedSpec"] = record
        return build_job_view(job, now=NOW).advice[-1]

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
    assert "kubectl trn retry" in status_text(build_job_view(job, now=NOW))


def test_an_ended_job_is_not_stale() -> None:
    assert not build_job_view(recorded_object("failed"), now=NOW + 1e6).stale


def test_members_spares_and_failing_pods_are_counted_separately() -> None:
    table = recorded_object("pods")
    bad = json.loads(json.dumps(table["rows"][0]))
    bad["cells"][0], bad["cells"][2] = "llama-w-9", "ImagePullBackOff"
    node = [column["name"] for column in table["columnDefinitions"]].index("Node")
    bad["cells"][node] = "<none>"
    table["rows"].append(bad)

    view = count_workers(parse_pod_table(table), members())

    assert view.members == {"Running": 2}
    assert view.others == {"Running": 1, "ImagePullBackOff": 1}
    assert [(row.name, row.node) for row in view.unhealthy] == [("llama-w-9", "")]


def test_a_member_whose_pod_is_missing_is_counted_as_missing() -> None:
    table = recorded_object("pods")
    table["rows"] = [row for row in table["rows"] if row["cells"][0] != "llama-w-0"]

    assert count_workers(parse_pod_table(table), members()).members == {"Running": 1, "missing": 1}


def test_the_slowest_rank_comes_first_and_a_silent_worker_before_it() -> None:
    healthy = [{"localRank": 0, "step": 20, "step_seconds": 0.5, "phase": "TRAINING", "updated": NOW - 1}]
    behind = [{**healthy[0], "step": 19}]

    rows = build_rank_rows(members(), {"llama-w-0": healthy, "llama-w-2": behind}, read_public_status({}), NOW)
    assert [row.rank for row in rows] == [1, 0]
    rows = build_rank_rows(
        members(), {"llama-w-0": "llama-w-0 is gone", "llama-w-2": behind}, read_public_status({}), NOW
    )
    assert [(row.rank, row.note) for row in rows] == [(0, "llama-w-0 is gone"), (1, "")]


def test_a_straggler_comes_before_a_rank_with_a_longer_step() -> None:
    records = {pod: [{"localRank": 0, "step": 20, "step_seconds": 0.5}] for pod in ("llama-w-0", "llama-w-2")}
    status = {"stragglers": [{"pod": "llama-w-2", "slowdown": 2.5}]}

    assert [row.rank for row in build_rank_rows(members(), records, read_public_status({"status": status}), NOW)] == [
        1,
        0,
    ]


def test_a_global_rank_is_mapped_to_its_worker() -> None:
    other_generation = Members(1, 4, members().rows)

    assert [other_generation.find_by_rank(rank).pod for rank in (0, 3, 4, 7)] == ["llama-w-0"] * 2 + ["llama-w-2"] * 2  # type: ignore[union-attr]
    assert other_generation.find_by_rank(8) is None
    assert other_generation.find_by_rank(-1) is None


def test_why_shows_pod_cause_and_log_line_of_a_crash() -> None:
    report = explain_interruption(recorded_object("job"), log=recorded_log())

    assert report.entry is not None
    assert (report.entry.cause, report.entry.pod, report.number) == ("Crash", "llama-w-0", 3)
    assert any("rank 0 ended with code 137" in line for line in report.log_lines)
    assert len(report.log_lines) <= MAX_LINES
    output = render_plain(render_interruption(report))
    assert f"restart {format_duration(report.entry.stages['restart'])}" in output
    assert "processes restarted in place, pods kept" in output


VERDICT = (
    "Configuration or user error (bad config, missing data, import error, shape): rank 3 of pod llama-w-0 on node "
    "node-5, exit code 64: data.source /data/corpus.txt: there is no such file or folder: correct the path or mount "
    "the data. Correct the configuration, the data or the image and run the job again (kubectl trn retry); it resumes "
    "from its newest checkpoint."
)


def report_of(message: str, *, response: str, log: str) -> str:
    job = recorded_object("job")
    last = job["status"]["history"][-1]
    last |= {"message": message, "response": response}
    return render_plain(render_interruption(explain_interruption(job, log=log)), 110)


def test_why_shows_the_whole_verdict_before_the_log() -> None:
    output = " ".join(report_of(VERDICT, response="Stop", log=recorded_log()).split())
    assert "Log of llama-w-0 at that time" in output
    assert VERDICT in output


def test_why_shows_a_traceback_in_lines_with_the_error_first() -> None:
    frames = 'Traceback (most recent call last):\n  File "/src/train.py", line 3, in <module>\n    import missing'
    error = "ModuleNotFoundError: No module named 'missing'"
    message = format_sentence(f"Rank 0 of pod llama-w-0, exit code 1: {error}\n{frames}\nCorrect the program.")
    seen = report_of(message, response="Stop", log="").partition("Seen")[2].partition("Response")[0].splitlines()
    assert textwrap.dedent("\n".join(seen[1:])).splitlines() == [*frames.split("\n"), "Correct the program."]
    assert seen[0].endswith(error)


def test_why_shows_a_traceback_of_a_verdict_once() -> None:
    (time,) = re.findall(r"^(\S+) .*rank 0 ended with code 137", recorded_log(), re.MULTILINE)[-1:]
    frames = ["Traceback (most recent call last):", '  File "/src/train.py", line 3, in <module>', "    import missing"]
    error = "ModuleNotFoundError: No module named 'missing'"
    log = "\n".join(f"{time} [rank 0] {line}" for line in ("loading the data", *frames, error))
    message = format_sentence("\n".join((error, *frames, "Correct the program.")))
    output = report_of(message, response="Stop", log=log)
    assert "[rank 0] loading the data" in output
    assert all(output.count(line.strip()) == 1 for line in (*frames, error))


def test_why_cuts_long_messages_at_words_and_drops_step_lines() -> None:
    steps = " | ".join(
        f"23:12:{step} rank 0 INFO step {step}/900: loss 5.1400, 1593 tokens/s" for step in range(10, 40)
    )
    output = report_of(f"rank 0 crashed; killed by signal 9 | {steps}", response="InPlace", log=recorded_log())
    assert "rank 0 crashed; killed by signal 9\n           …\n" in output
    words = " ".join(f"word{number}" for number in range(100))
    seen = (
        report_of(words, response="InPlace", log=recorded_log()).partition("Seen")[2].partition("Response")[0].split()
    )
    assert seen[-1] == "…"
    assert seen[:-1] == words.split()[: len(seen) - 1]


def test_why_shows_python_frames_and_no_cpp_frames() -> None:
    (time,) = re.findall(r"^(\S+) .*rank 0 ended with code 137", recorded_log(), re.MULTILINE)[-1:]
    python = [
        "Traceback (most recent call last):", '  File "/app/mine.py", line 7, in columns', '    return row["text"]',
        "KeyError: 'text'",
    ]  # fmt: skip
    native = ["Exception raised from get at /pytorch/a.cpp:9 (most recent call first):"]
    native += [f"frame #{number}: c10::Error::Error(std::string) + 0x8 (0x7 in libc10.so)" for number in range(20)]
    log = "".join(f"{time} [rank 0] {line}\n" for line in [*python, *native])

    shown = explain_interruption(recorded_object("job"), log=log).log_lines

    assert list(shown) == [f"[rank 0] {line}" for line in python]


def test_wrapped_lines_are_indented() -> None:
    job = recorded_object("failed")
    output = render_plain(render_interruption(explain_interruption(job, advice=("word " * 40,))), 60)
    assert re.search(r"^- word .*\n  word ", output, re.MULTILINE)
    log = recorded_log()
    report = render_plain(render_interruption(explain_interruption(recorded_object("job"), log=log)), 60)
    lines = report.partition(" at that time\n")[2]
    assert all(line.startswith("  ") for line in lines.splitlines())


def test_cost_is_node_hours_and_divides_fully_into_causes() -> None:
    view = job_view()
    assert view.eta_seconds is not None
    cost = compute_cost(view, price=36.0)

    assert cost.so_far == pytest.approx(6.33808), "a hundredth for each of 633.808 node-seconds"
    assert cost.productive == pytest.approx(6.33808 * 0.2511)
    assert cost.to_end == pytest.approx(0.01 * view.eta_seconds * (2 + view.spares))
    # Other jobs of this cluster left 5.2 nodes with this one.
    assert cost.lost["Crash"] == pytest.approx(0.01 * 2.834 * 633.808 / 120.851)
    assert cost.idle > 0
    assert cost.productive + sum(cost.lost.values()) + cost.idle == pytest.approx(cost.so_far)


def test_the_ledger_shows_the_cost_of_each_part_where_a_price_is_given() -> None:
    view = job_view()
    goodput = replace(view.goodput, cost=compute_cost(view, price=3600.0))

    page = render_plain(render_goodput(goodput, 120))
    assert re.search(r"Cost +633\.81 so far, [\d,.]+ more until the last step", page)
    assert re.search(r"CAUSE +SECONDS +SHARE +COST", page)
    assert re.search(r"productive +79\.6 +65\.8 % +159\.15", page)
    assert re.search(r"idle nodes +\d", page)
    assert "COST" not in render_plain(render_goodput(view.goodput, 120))


def test_a_job_that_has_not_started_costs_nothing_yet() -> None:
    cost = compute_cost(job_view(goodput={}, progress={}), price=10.0)
    assert (cost.so_far, cost.productive, cost.lost, cost.idle, cost.to_end) == (0, 0, {}, 0, None)


def test_speeds_are_compared_with_the_smallest_size() -> None:
    job = recorded_object("job")
    batch = job["spec"]["trainer"]["batch"]["globalSize"]
    measured = [(4, 30, batch / 30.0), (1, 10, batch / 10.0), (3, 5, None), (2, 20, batch / 16.0)]
    job["status"]["goodput"]["sizes"] = [
        {"size": size, "steps": steps, "stepSeconds": seconds} for size, steps, seconds in measured
    ]

    rows = list_scaling_rows(job)
    assert [(row.nodes, row.steps, row.current) for row in rows] == [(1, 10, False), (2, 20, True), (4, 30, False)]
    assert [row.samples_per_second for row in rows] == pytest.approx([10.0, 16.0, 30.0])
    assert [(row.speedup, row.efficiency) for row in rows] == [(1.0, 1.0), (1.6, 0.8), (3.0, 0.75)]
    assert re.search(r"4 +30 .* 30 +x3\.00 +75\.0 %", render_plain(render_scaling(rows, 100)))


def test_speeds_of_a_program_whose_batch_is_not_known_are_step_times() -> None:
    job = recorded_object("job")
    del job["spec"]["trainer"], job["spec"]["checkpoint"]
    job["spec"]["program"] = {"image": "x", "command": ["train"]}

    (row,) = list_scaling_rows(job)
    assert (row.step_seconds, row.samples_per_second, row.efficiency) == (0.301376, None, None)
    assert "Give program.batch" in render_plain(render_scaling((row,), 100))
    assert "no step time was measured yet" in render_plain(render_scaling((), 100))


def test_the_command_of_a_program_is_shown_on_one_line() -> None:
    job = recorded_object("job")
    del job["spec"]["trainer"], job["spec"]["checkpoint"]
    job["spec"]["program"] = {"image": "x", "command": ["sh", "-c"], "args": ["newest=$(ls)\n  exec python train.py\n"]}
    assert build_job_view(job, now=NOW).model == "sh -c newest=$(ls) exec python train.py"


def test_the_stage_decide_is_labelled_as_the_wait_for_a_worker() -> None:
    job = recorded_object("job")
    job["status"]["history"][-1]["stages"]["decide"] = 41.0
    job["status"]["goodput"]["lostByStage"]["Decide"] = 41.0

    output = render_plain(render_interruption(explain_interruption(job)), 200)
    assert f"decide (wait for a worker) {format_duration(41.0)}" in output
    ledger = render_plain(render_goodput(build_job_view(job, now=NOW).goodput, 100))
    assert re.search(r"Decide \(wait for a worker\) +41\.0", ledger)
    assert "Decide (wait for a worker): 41.0 s" in report_html(
        JobReport(build_job_view(job, now=NOW), (), None, None, (), ()), NOW
    )


def test_the_report_of_an_earlier_interruption_is_chosen_by_its_number() -> None:
    report = explain_interruption(
        recorded_object("job"), number=2, log_note="llama-w-1 was deleted, and its log with it"
    )

    assert report.entry is not None
    assert report.entry.cause == "Preempted"
    assert report.log_lines == ()
    assert "was deleted" in report.log_note


def test_the_report_of_a_failed_job_is_its_verdict() -> None:
    report = explain_interruption(recorded_object("failed"))

    assert report.entry is not None
    assert report.entry.stopped
    assert "stopped for good" in render_plain(render_interruption(report))


def test_a_job_without_interruptions_has_nothing_to_explain() -> None:
    job = recorded_object("job")
    job["status"]["history"] = []

    assert "nothing has interrupted this job" in render_plain(render_interruption(explain_interruption(job)))


def test_machines_are_shown_with_their_evidence_and_found_by_node_or_key() -> None:
    entry = (
        "machine: aws:///us-west-2a/i-0abc\nnode: ip-10-0-3-7\nstate: Quarantined\nuntil: '2026-11-23T03:00:00Z'\n"
        "quarantines: 1\nstrikes:\n- 2026-11-23T02:00:00Z Device team/llama\n"
    )
    data = {"about": "…", "accounted": "{}", "aws.us-west-2a.i-0abc": entry, "odd": "- 1", "worse": ": :"}

    machines = parse_machines({"data": data}, {"ip-10-0-0-1": ""})

    assert machines[0].state == "Quarantined"
    assert machines[0].strikes[0].cause == "Device"
    assert machines[0].present is False
    assert {machine.state for machine in machines[1:]} == {"Unreadable"}
    assert find_machine(machines, "ip-10-0-3-7") is machines[0]
    assert find_machine(machines, "nowhere") is None
    assert "Device 11-23 02:00 by team/llama" in render_plain(render_machines(machines, 160, now=NOW), 160)


def test_machines_are_sorted_by_the_states_that_the_operator_writes() -> None:
    data = {f"m{number}": f"node: n{number}\nstate: {state.value}\n" for number, state in enumerate(MachineState)}
    data["m9"] = "node: n9\n"

    states = [machine.state for machine in parse_machines({"data": data}, None)]

    assert states == ["Permanent", "Quarantined", "Probation", "Watched", "Watched"]
    assert set(states) == {state.value for state in MachineState}


def test_nodes_that_save_no_pass_are_one_row() -> None:
    job: dict[str, Any] = {
        "spec": {
            "workers": {"replicas": 128, "minReplicas": 64, "accelerator": {"instanceType": "trn1.32xlarge"}},
            "trainer": {"batch": {"globalSize": 1024}},
            "parallelism": {"tensor": 8},
        }
    }
    rows = list_size_rows(job)
    assert [(row.min_nodes, row.max_nodes, row.trains, row.micro_batches) for row in rows] == [
        (128, 128, 128, 2),
        (86, 127, 86, 3),
        (64, 85, 64, 4),
    ]
    assert rows[1].speed == pytest.approx(2 / 3)
    assert rows[1].fill_ratio == pytest.approx(1024 / (3 * 344))
    assert {row.compiled for row in rows} == {None}
    job["spec"]["trainer"]["batch"]["tolerance"] = 0.01
    job["spec"]["precompile"] = {"enabled": True, "sizes": "Background"}
    job["status"] = {"compiled": {"sizes": [86, "many", [3]]}}
    assert [(row.min_nodes, row.trains, row.batch, row.compiled) for row in list_size_rows(job)] == [
        (128, 128, 1024, True),
        (127, 127, 1016, False),
        (86, 86, 1032, True),
        (85, 85, 1020, False),
        (64, 64, 1024, False),
    ]


def test_sizes_above_the_requested_one_are_marked_as_idle_nodes() -> None:
    job: dict[str, Any] = {
        "spec": {
            "workers": {"replicas": 2, "maxReplicas": 4, "accelerator": {"device": "cpu"}},
            "trainer": {"batch": {"globalSize": 12}},
            "elasticity": {"idleNodes": "Take"},
        }
    }
    rows = list_size_rows(job)
    assert [(row.trains, row.speed, row.uses_idle_nodes) for row in rows] == [
        (4, 2.0, True),
        (3, 1.5, True),
        (2, 1.0, False),
        (1, 0.5, False),
    ]
    assert render_plain(render_sizes(rows, 120), 120).count("idle nodes") == 2


def test_escape_sequences_are_printed_only_with_colour() -> None:
    assert "\x1b" not in status_text(job_view())
    assert "\x1b" in status_text(job_view(), colour=True)


def test_text_of_a_pod_can_neither_control_the_terminal_nor_be_markup() -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J[red]boo[/red] \u202eevil"
    history = recorded_object("job")["status"]["history"]
    view = job_view(verdict=hostile, phase="Failed", history=[{**history[0], "message": hostile}])

    shown = status_text(view)

    assert "[red]boo[/red]" in shown
    assert not any(sign in shown for sign in "\x1b\x07\u202e")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(recorded_object("job")["status"])), JSON)
def test_a_status_with_any_malformed_field_is_shown(field: str, value: Any) -> None:
    view = job_view(**{field: value})

    assert status_text(view, 60)
    json.loads(format_json(view))
    assert format_status_line(view)
    explain_interruption(
        {**recorded_object("job"), "status": {**recorded_object("job")["status"], field: value}}, log=recorded_log()
    )


def test_json_output_has_camel_case_keys_and_all_figures() -> None:
    reported = json.loads(format_json(job_view()))

    assert reported["goodput"]["lostSeconds"]["Crash"] == pytest.approx(2.834)
    assert reported["checkpoints"]["durableStep"] == 254
    assert reported["workers"]["members"] == {"Running": 2}


def test_a_malformed_or_oversized_membership_is_refused() -> None:
    def membership_config_map(text: bytes) -> dict[str, Any]:
        return {"binaryData": {"membership.json.gz": base64.b64encode(gzip.compress(text)).decode()}}

    assert parse_members(recorded_object("membership"))[0]["podName"] == "llama-w-0"
    for config_map in (
        membership_config_map(b" " * (MAX_RECORD_BYTES + 1)),
        membership_config_map(b"[]"),
        {"binaryData": {"membership.json.gz": "AAAA"}},
    ):
        with pytest.raises(ValueError, match="membership"):
            parse_membership(config_map)
    with pytest.raises(KeyError):
        parse_membership({"data": {}})


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
    condition = {"type": "PodsReady", "status": status, "reason": reason, "message": message}
    view = job_view(phase="Pending", stage="", conditions=[condition])
    shown = re.sub(" +", " ", status_text(view))
    assert f"Phase {output}" in re.sub(" *\n", "\n", shown)
    assert (message in view.advice) is (reason == "Unschedulable")


def test_failing_saves_are_reported_once_with_the_error_of_the_store() -> None:
    overdue = {"type": "CheckpointHealthy", "status": "False", "reason": "CheckpointOverdue", "message": "too slow"}
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


def test_a_job_that_exceeds_its_deadline_shows_it_while_stopping_and_afterwards() -> None:
    output = "The job has been active for 60 s, as long as activeDeadlineSeconds allows."
    target = {"type": "FailureTarget", "status": "True", "reason": "DeadlineExceeded", "message": output}
    view = job_view(phase="Stopping", conditions=[target])

    assert view.advice == (f"{output} Its workers save and leave, then it fails.",)
    job = recorded_object("job")
    entry = {"generation": 1, "time": "2026-01-01T00:00:00Z", "cause": "Yielded", "response": "Stop", "message": output}
    job["status"] |= {"phase": "Failed", "verdict": output, "history": [entry]}
    report = render_plain(render_interruption(explain_interruption(job, advice=build_job_view(job, now=NOW).advice)))
    assert "stopped for good" in report
    assert "active for 60 s" in report
    assert "kubectl trn retry" in report


def test_a_job_of_another_controller_names_that_controller() -> None:
    job = recorded_object("job")
    del job["status"]
    job["spec"]["managedBy"] = "kueue.x-k8s.io/multikueue"

    view = build_job_view(job, now=NOW)

    assert view.advice == (
        "kueue.x-k8s.io/multikueue controls this job (spec.managedBy), and the operator leaves it alone: look there.",
    )
    job["spec"]["managedBy"] = "trainium.dev/trainium-operator"
    assert "No operator has answered" in build_job_view(job, now=NOW).advice[0]


def test_control_characters_are_removed_and_line_breaks_kept() -> None:
    assert strip_control_characters("a\x1b[31mb\x07\n\tc\x9b") == "ab\n\tc"


def test_unpaired_surrogates_are_removed() -> None:
    unpaired = json.loads('"a\\ud800b"')
    assert strip_control_characters(unpaired) == "ab"
    (event,) = build_event_views([{"reason": unpaired, "message": unpaired}])
    assert (event.reason, event.message) == ("ab", "ab")
