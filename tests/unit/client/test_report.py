"""The page of a job: self-contained, escaped, bounded."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.testing.api.recorded_jobs import NOW, recorded_object
from tests.testing.page.html_page import Page
from tests.unit.client.conftest import Command
from trainium_client.commands.report import read_run_curve
from trainium_client.read import JobSnapshot
from trainium_contract.pages.job_page import JobReport, report_html
from trainium_contract.pages.svg import LinearScale, draw_line_chart
from trainium_contract.views.checkpoints import CheckpointRow, describe_location, get_metrics_path
from trainium_contract.views.curve import MAX_POINTS, read_curve
from trainium_contract.views.events import build_event_views
from trainium_contract.views.interruptions import read_interruptions
from trainium_contract.views.job import build_job_view
from trainium_contract.views.job_view import ArtifactView, FigureView, MilestoneView
from trainium_contract.views.status_reader import read_public_status
from trainium_contract.views.workers import MemberRow, Members

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>&amp;'


def metric_lines(steps: int) -> list[str]:
    return [json.dumps({"step": step, "loss": 6 - step / steps, "tokensPerSecond": 10.0}) for step in range(steps)]


def page_of_job(job: dict[str, Any]) -> str:
    return report_html(JobReport(build_job_view(job, now=NOW), (), None, None, (), ()), NOW)


def hostile_report() -> JobReport:
    """Return a report with every section and markup in every text."""
    job = recorded_object("job")
    view = build_job_view(job, now=NOW, events=build_event_views(recorded_object("events")["items"]))
    view = replace(
        view,
        verdict=HOSTILE,
        advice=(HOSTILE,),
        artifacts=(ArtifactView("Model", f"s3://bucket/{HOSTILE}", 10, 2048, HOSTILE),),
        evaluation=(FigureView(HOSTILE, 1.0, 0.5),),
        evaluations=(MilestoneView(10, 12_345, (FigureView(HOSTILE, None, 0.3125, 0.0208),), ""),),
        not_shown=(HOSTILE,),
    )
    entries = tuple(
        replace(entry, message=HOSTILE, pod=HOSTILE, cause=HOSTILE)
        for entry in read_interruptions(read_public_status(job))
    )
    members = Members(3, 32, (MemberRow(0, HOSTILE, HOSTILE), MemberRow(1, "w-1", "n-1")))
    row = CheckpointRow(HOSTILE, "committed", 254, 2**20, None, "2x1x1", NOW - 60, HOSTILE)
    return JobReport(view, entries, members, (row,), read_curve(metric_lines(300)), (HOSTILE,))


def test_hostile_text_becomes_no_element_and_the_page_loads_nothing() -> None:
    page = Page(report_html(hostile_report(), NOW))

    assert page.open == []
    assert not {"script", "img", "link", "iframe", "object", "a"} & set(page.tags)
    names = {name for name, _ in page.attributes}
    assert not {name for name in names if name.startswith("on") or name in {"src", "href", "xlink:href"}}
    assert page.text.count("alert(1)") > 5


def test_the_page_has_every_section() -> None:
    page = Page(report_html(hostile_report(), NOW))

    for text in ("Loss", "Where the time went", "Interruptions", "Who trains (generation 3)", "Checkpoints on storage",
                  "Artifacts", "Evaluation", "Events", "Not shown", "32-63", "6.6 %", "1.0 MiB"):  # fmt: skip
        assert text in page.text, text
    assert page.tags.count("polyline") == 2, "loss and speed"
    marks = [value for name, value in page.attributes if (name, value) == ("class", "mark")]
    assert len(marks) == 6, "three interruptions in two charts"


def test_the_page_of_a_failed_job_shows_what_was_changed_since() -> None:
    job = recorded_object("failed")
    job["metadata"]["generation"] = job["status"]["observedGeneration"] = 2
    change = {"field": "trainer.data.source", "was": '"/a<b>"', "now": '"/c"'}
    job["status"]["failedSpec"] = {"changes": [change]}
    html = page_of_job(job)
    assert "Changed since the failure: trainer.data.source (was &quot;/a&lt;b&gt;&quot;, is &quot;/c&quot;)" in html


def test_a_job_without_a_status_has_a_page() -> None:
    job = {key: value for key, value in recorded_object("job").items() if key != "status"}

    page = Page(page_of_job(job))

    assert page.open == []
    assert "no status yet" in page.text


@given(st.floats(allow_nan=False), st.floats(allow_nan=False), st.integers(2, 8))
def test_an_axis_has_a_few_marks_of_any_two_values_in_its_range(low: float, high: float, count: int) -> None:
    axis = LinearScale(min(low, high), max(low, high), 0.0, 100.0)

    marks = axis.choose_ticks(count)

    assert 1 <= len(marks) <= 2 * count + 2
    assert all(0 <= axis.project(value) <= 100 for value in (low, high, *marks))


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [(0, 299, [0, 50, 100, 150, 200, 250]), (5, 6, [5, 5.2, 5.4, 5.6, 5.8, 6]), (4, 4, [3.6, 3.8, 4, 4.2, 4.4])],
)
def test_marks_are_round_numbers(low: float, high: float, marks: list[float]) -> None:
    assert LinearScale(low, high, 0, 1).choose_ticks(6 if high > 9 else 4) == pytest.approx(marks)


def test_an_infinite_loss_is_left_out() -> None:
    huge = json.dumps({"step": 1, "loss": 10**400})
    assert read_curve([huge, json.dumps({"step": 2, "loss": 3.0})])[0].step == 2


def test_a_long_curve_is_thinned_and_a_spike_stays() -> None:
    long = metric_lines(20_000)
    long[777] = json.dumps({"step": 777, "loss": 99.0, "validationLoss": 3.0})

    curve = read_curve([*long, "", "{", '{"step": 20001, "loss": null}', "[]"])

    assert len(curve) == MAX_POINTS
    assert curve[-1].step == 19_999
    assert max(point.highest for point in curve) == 99.0
    assert [point.validation for point in curve if point.validation is not None] == [3.0]


def test_a_thousand_workers_and_a_full_history_stay_a_page_that_a_browser_opens() -> None:
    rows = tuple(MemberRow(rank, f"llama-w-{rank}", f"node-{rank}") for rank in range(1000))
    page = report_html(
        replace(hostile_report(), members=Members(9, 32, rows), curve=read_curve(metric_lines(20_000))), NOW
    )

    assert len(page) < 1_000_000
    assert Page(page).open == []


def test_the_curve_comes_from_the_file_that_is_given(trn: Command, tmp_path: Path) -> None:
    metrics, output = tmp_path / "metrics.jsonl", tmp_path / "page.html"
    metrics.write_text("\n".join(metric_lines(50)))
    assert trn("report", "llama", "--metrics", str(metrics), "-o", str(output)).code == 0
    assert "polyline" in Page(output.read_text()).tags


@pytest.mark.parametrize(
    ("storage", "location"),
    [
        ({"hostPath": {"path": "/data"}}, "/data/team/llama/metrics.jsonl on the nodes"),
        ({"hostPath": {"path": "/data"}, "subPath": "runs/one"}, "/data/runs/one/metrics.jsonl on the nodes"),
        ({"persistentVolumeClaim": {"claimName": "fsx"}}, "team/llama/metrics.jsonl on the volume of claim fsx"),
        ({"uri": "s3://bucket/runs"}, "s3://bucket/runs/team/llama/metrics.jsonl"),
        ({}, ""),
    ],
)
def test_artifacts_and_checkpoints_are_shown_by_their_location(storage: dict[str, object], location: str) -> None:
    job = recorded_object("job")
    job["spec"]["checkpoint"]["storage"] = storage
    assert describe_location(job, "metrics.jsonl") == location


def test_steps_that_a_program_computes_again_are_in_the_curve_once() -> None:
    lines = [
        json.dumps({"step": step, "loss": loss}) for step, loss in ((1, 4.0), (2, 3.0), (3, 2.5), (2, 3.5), (3, 2.0))
    ]
    assert [(point.step, point.loss) for point in read_curve(lines)] == [(1, 4.0), (2, 3.5), (3, 2.0)]


def test_the_curve_explains_only_what_is_drawn_in_it() -> None:
    plain = report_html(replace(hostile_report(), entries=(), curve=read_curve(metric_lines(50))), NOW)
    assert "<p class=soft>by step</p>" in plain
    assert "dashed: interruptions" in report_html(replace(hostile_report(), curve=read_curve(metric_lines(50))), NOW)
    assert "the band" in report_html(replace(hostile_report(), curve=read_curve(metric_lines(20_000))), NOW)


def test_a_gap_in_the_curve_is_no_line() -> None:
    lines = [line for at, line in enumerate(metric_lines(300)) if not 100 <= at < 200]
    page = Page(report_html(replace(hostile_report(), curve=read_curve(lines)), NOW))
    assert page.tags.count("polyline") == 4, "two parts of loss and of speed"
    assert "interrupted where steps are missing" in page.text


def test_each_figure_of_the_steps_has_a_chart_and_the_logs_a_command() -> None:
    lines = [json.dumps({"step": at, "loss": 1.0, "learningRate": 3e-4, "gradNorm": 1.0 + at}) for at in range(20)]
    page = Page(report_html(replace(hostile_report(), curve=read_curve(lines)), NOW))
    assert [label in page.text for label in ("Learning rate", "Gradient norm", "Tokens per second")] == [
        True,
        True,
        False,
    ]
    assert "kubectl trn logs llama -n team" in page.text


def test_labels_of_an_axis_differ_and_do_not_overlap() -> None:
    chart = draw_line_chart([(step, 4.4 + step / 1e6) for step in range(0, 2_000_000, 1000)], (), "Loss")
    labels = re.findall(r'<text x="(-?[\d.]+%?)" y="[\d.]+" text-anchor="(\w+)"[^>]*>([^<]+)</text>', chart)
    values = [text for x, _, text in labels if x == "-6"]
    assert len(values) == len(set(values)) >= 3
    placed = [(float(x[:-1]) * 7.8, anchor, 6.6 * len(text)) for x, anchor, text in labels if x.endswith("%")]
    ends = [x + width * {"start": 1, "middle": 0.5, "end": 0}[anchor] for x, anchor, width in placed]
    starts = [x - width * {"start": 0, "middle": 0.5, "end": 1}[anchor] for x, anchor, width in placed]
    assert all(start > end for start, end in zip(starts[1:], ends[:-1], strict=True))
    assert starts[0] >= 0
    assert ends[-1] <= 780


def test_figures_are_beside_the_checkpoints_and_never_in_a_bucket() -> None:
    job = recorded_object("job")
    assert get_metrics_path(job).endswith("/metrics.jsonl")
    job["spec"]["checkpoint"]["storage"] = {"uri": "s3://bucket/prefix"}
    assert get_metrics_path(job) == "/checkpoints/metrics.jsonl"


def test_figures_of_a_program_are_read_beside_its_checkpoints() -> None:
    job = recorded_object("job")
    job["spec"]["checkpoint"]["storage"] = {"hostPath": {"path": "/data"}}
    job["spec"]["program"] = {"command": ["a"], "checkpoints": {"path": "/checkpoints/run"}}
    assert get_metrics_path(job) == "/checkpoints/run/metrics.jsonl"
    assert describe_location(job, "metrics.jsonl") == "/data/run/metrics.jsonl on the nodes"
    del job["spec"]["program"]["checkpoints"]
    snapshot = JobSnapshot(job=job, view=hostile_report().view, members=None, pods=())
    curve, note = read_run_curve(cast("Any", None), snapshot)
    assert curve == ()
    assert "set that, or give --metrics FILE" in note
