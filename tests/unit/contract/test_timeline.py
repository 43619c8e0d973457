"""Timelines of workers: their states, unknown periods, and the drawing."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.testing.api.recorded_jobs import NOW, recorded_object
from tests.testing.page.html_page import Page
from trainium_contract.pages.job_page import JobReport, render_live_job, report_html
from trainium_contract.pages.svg import Span, choose_time_ticks, draw_timeline
from trainium_contract.status import ledger
from trainium_contract.views.interruptions import STAGES, InterruptionView, read_interruptions
from trainium_contract.views.job import build_job_view
from trainium_contract.views.status_reader import read_public_status
from trainium_contract.views.timeline import MAX_ROWS, MIN_ROWS, Timeline, WorkerState, build_timeline
from trainium_contract.views.workers import MemberRow, Members, PodRow, count_workers, parse_pod_table

BEGIN, END = 1_000.0, 11_000.0
ENTRY = read_interruptions(read_public_status(recorded_object("job")))[0]


def entry(
    at: float, pod: str, response: str = "Spare", generation: int = 1, seconds: float | None = 60.0
) -> InterruptionView:
    return replace(ENTRY, at=at, pod=pod, response=response, generation=generation, recovered_seconds=seconds)


def members(*names: str, generation: int = 1) -> Members:
    return Members(generation, 1, tuple(MemberRow(rank, name, f"node-{rank}") for rank, name in enumerate(names)))


def pod(name: str, state: str = "Running", created: float | None = BEGIN) -> PodRow:
    return PodRow(name, state, "node", created)


def timeline_of(entries: Any, pods: Any, current_members: Members | None, **changes: Any) -> Timeline:
    return build_timeline(entries, pods, current_members, begin=BEGIN, end=END, **changes)


def segments_of(view: Timeline, name: str) -> list[tuple[WorkerState, float, float]]:
    (row,) = [row for row in view.rows if row.name == name]
    return [(segment.state, segment.since, segment.until) for segment in row.segments]


def test_an_uninterrupted_worker_trains_since_the_first_step() -> None:
    view = timeline_of([], [pod("w-0")], members("w-0"), first_step=1_500.0)
    assert segments_of(view, "w-0") == [(WorkerState.UNKNOWN, BEGIN, 1_500.0), (WorkerState.TRAINED, 1_500.0, END)]


def test_a_lost_worker_is_a_member_until_its_replacement_by_a_spare() -> None:
    view = timeline_of([entry(5_000.0, "w-1")], [pod("w-0"), pod("w-2")], members("w-0", "w-2", generation=2))
    assert segments_of(view, "w-1") == [(WorkerState.MEMBER, BEGIN, 5_000.0), (WorkerState.FAILED, 5_000.0, 5_060.0)]
    assert segments_of(view, "w-2") == [(WorkerState.UNKNOWN, BEGIN, 5_060.0), (WorkerState.TRAINED, 5_060.0, END)]
    assert view.rows[0].name == "w-1", "interrupted workers come first"


def test_a_lost_worker_with_a_recorded_rank_trained_until_its_loss() -> None:
    current_members = replace(members("w-0", "w-2", generation=2), processes_per_node=4)
    view = timeline_of([replace(entry(5_000.0, "w-1"), rank=4)], [pod("w-0"), pod("w-2")], current_members)
    assert segments_of(view, "w-1")[0] == (WorkerState.TRAINED, BEGIN, 5_000.0)
    (row,) = [row for row in view.rows if row.name == "w-1"]
    assert row.segments[0].text == "w-1: ranks 4-7 of generation 1"


def test_a_restart_in_place_is_a_gap_in_training() -> None:
    view = timeline_of([entry(5_000.0, "w-0", "InPlace")], [pod("w-0")], members("w-0"))
    assert [state for state, _, _ in segments_of(view, "w-0")] == [
        WorkerState.TRAINED,
        WorkerState.FAILED,
        WorkerState.TRAINED,
    ]


def test_pods_outside_the_membership_are_spares_or_pending() -> None:
    view = timeline_of([], [pod("w-0"), pod("w-1"), pod("w-2", "Pending", 9_000.0)], members("w-0"))
    assert segments_of(view, "w-1") == [(WorkerState.SPARE, BEGIN, END)]
    assert segments_of(view, "w-2") == [(WorkerState.PENDING, 9_000.0, END)]


def test_a_failing_pod_comes_first() -> None:
    view = timeline_of(
        [entry(5_000.0, "w-1")], [pod("w-0"), pod("w-3", "CrashLoopBackOff")], members("w-0", generation=2)
    )
    assert [row.name for row in view.rows] == ["w-3", "w-1", "w-0"]
    assert segments_of(view, "w-3")[-1][0] is WorkerState.FAILED


def test_members_of_an_ended_job_trained_until_its_end() -> None:
    assert segments_of(timeline_of([], [], members("w-0"), job_ended=True), "w-0") == [
        (WorkerState.TRAINED, BEGIN, END)
    ]
    assert timeline_of([], [], members("w-0")).rows == ()


def test_a_failing_member_trained_before() -> None:
    view = timeline_of([], [pod("w-0", "Error")], members("w-0"))
    assert [state for state, _, _ in segments_of(view, "w-0")] == [WorkerState.TRAINED, WorkerState.FAILED]


def test_without_a_membership_no_pod_is_a_spare() -> None:
    assert segments_of(timeline_of([], [pod("w-0")], None), "w-0") == [(WorkerState.UNKNOWN, BEGIN, END)]


def test_only_interrupted_workers_of_a_large_job_are_shown() -> None:
    names = [f"w-{number}" for number in range(1_000)]
    pods = [pod(name) for name in names]
    view = timeline_of(
        [entry(2_000.0 + number, f"w-{number}", "InPlace") for number in range(30)], pods, members(*names)
    )
    assert (len(view.rows), view.quiet, view.left_out) == (30, 970, 0)
    assert len(timeline_of([], pods, members(*names)).rows) == MIN_ROWS
    view = timeline_of([], pods, members())
    assert (len(view.rows), view.quiet, view.left_out) == (MAX_ROWS, 0, 960)


@given(
    st.lists(
        st.tuples(
            st.floats(0, 12_000), st.sampled_from("abc"), st.sampled_from(["InPlace", "Spare", "Stop", "?"]),
            st.integers(-1, 4), st.none() | st.floats(0, 20_000),
        ),
        max_size=12,
    ),
    st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["Running", "Pending", "Error"]),
                       st.none() | st.floats(0, 20_000)), max_size=4, unique_by=lambda pod: pod[0]),
    st.none() | st.integers(0, 5),
    st.booleans(),
)  # fmt: skip
def test_segments_of_a_worker_are_ordered_bounded_and_disjoint(
    entries: list[Any], pods: list[Any], generation: int | None, job_ended: bool
) -> None:
    current_members = None if generation is None else members("a", "d", generation=generation)
    view = timeline_of(
        [entry(*fields) for fields in entries], [pod(*fields) for fields in pods], current_members, job_ended=job_ended
    )
    for row in view.rows:
        end = BEGIN
        for segment in row.segments:
            assert end <= segment.since < segment.until <= END
            end = segment.until


def test_creation_times_are_read_from_tables() -> None:
    created = {row.name: row.created for row in parse_pod_table(recorded_object("pods"), NOW)}
    assert created == {"llama-w-0": NOW - 214, "llama-w-2": NOW - 214, "llama-w-3": NOW - 97}
    assert {row.created for row in parse_pod_table(recorded_object("pods"))} == {None}


def test_a_page_shows_each_workers_states_and_what_is_not_recorded() -> None:
    job, pods = recorded_object("job"), parse_pod_table(recorded_object("pods"), NOW)
    current_members = Members(2, 1, (MemberRow(0, "llama-w-0", "node-2"), MemberRow(1, "llama-w-2", "node-1")))
    view = build_job_view(job, now=NOW, workers=count_workers(pods, current_members))
    report = JobReport(view, read_interruptions(read_public_status(job)), current_members, None, (), (), pods)
    page = Page(report_html(report, NOW))
    assert page.open == []
    for text in ("States of the workers", "llama-w-1: member of generation 1", "llama-w-2 on node-1: ranks 1",
                  "are not recorded", "Nov 23 02:07"):  # fmt: skip
        assert text in page.text
    later = render_live_job(report, NOW)
    assert later == render_live_job(report, NOW), "equal data is an equal page"


@pytest.mark.parametrize(
    ("begin", "length", "words"),
    [
        (0.0, 7.0, ["Jan 1 00:00:00", "00:00:01"]),
        (86_400 * 365.0, 1_800.0, ["Jan 1 00:00", "00:05"]),
        (86_400 * 30.9, 86_400.0, ["Feb 1 00:00", "06:00"]),
        (0.0, 7 * 86_400.0, ["Jan 1", "Jan 2"]),
        (0.0, 4_000 * 86_400.0, ["Jan 1"]),
    ],
)
def test_an_axis_has_round_times_and_names_each_new_day(begin: float, length: float, words: list[str]) -> None:
    marks = choose_time_ticks(begin, begin + length)
    assert [label for _, label in marks][: len(words)] == words
    assert 2 <= len(marks) <= 9


@given(st.floats(0, 2e9, allow_subnormal=False), st.floats(0.5, 1e9))
def test_time_marks_are_ordered_and_in_range(begin: float, length: float) -> None:
    times = [time for time, _ in choose_time_ticks(begin, begin + length)]
    assert times == sorted(set(times))
    assert all(begin <= time <= begin + length for time in times)
    assert len(times) <= 9


def test_an_empty_timeline_is_no_picture() -> None:
    assert draw_timeline(5.0, 5.0, [("row", [Span(5.0, 5.0, 1, "x")])], "x") == ""
    assert draw_timeline(0.0, 5.0, [], "x") == ""


def test_views_have_the_stages_of_a_recovery_in_their_order() -> None:
    assert STAGES == ledger.STAGES
