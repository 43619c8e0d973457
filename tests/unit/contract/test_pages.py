"""What both sides show of a job: the list, the style and script that a browser lets in, and a curve that is watched."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from tests.testing.page.html_page import Page
from trainium_contract.pages.html import FILE_POLICY, STYLE, digest_of
from trainium_contract.pages.jobs_page import MOST_JOBS, JobRow, live_jobs_html, which_namespace_html
from trainium_contract.pages.live import HEADERS, LIVE_SCRIPT
from trainium_contract.views.curve import LiveCurve

HOSTILE = '"><script>alert(1)</script>'


def test_jobs_that_have_not_ended_come_first_and_what_is_left_out_is_counted() -> None:
    rows = [JobRow("a", f"job-{at:04}", phase="Completed") for at in range(MOST_JOBS)]
    rows += [JobRow("z", "alive", phase="Running", step=5, total_steps=10)]
    page = Page(live_jobs_html(rows, 0.0, where="all namespaces", root="/ui"))
    links = [value for name, value in page.attributes if name == "href"]
    assert links[0] == "/ui/z/alive"
    assert len(links) == MOST_JOBS
    assert "… and 1 more" in page.said
    assert page.open == []


def test_words_of_others_are_text_in_the_list_and_in_the_form() -> None:
    row = JobRow(HOSTILE, HOSTILE, phase=HOSTILE, note=HOSTILE)
    listed = Page(live_jobs_html([row], 0.0, where=HOSTILE, root="/ui"))
    assert listed.tags.count("script") == 1
    assert listed.said.count("alert(1)") == 6, "title, heading and four cells"
    form = Page(which_namespace_html(HOSTILE, "/ui"))
    assert "script" not in form.tags
    assert form.open == []


def test_a_browser_lets_in_our_style_and_script_alone() -> None:
    policy = HEADERS["Content-Security-Policy"]
    assert policy.startswith("default-src 'none';")
    assert digest_of(STYLE) in policy
    assert digest_of(LIVE_SCRIPT) in policy
    assert f"default-src 'none'; style-src {digest_of(STYLE)}" == FILE_POLICY
    text = live_jobs_html([], 0.0, where="x", root="/ui")
    assert re.findall(r"<script>(.*?)</script>", text, re.DOTALL) == [LIVE_SCRIPT]
    assert " style=" not in text


@given(st.lists(st.tuples(st.integers(0, 300), st.floats(0, 10) | st.none()), max_size=300), st.integers(2, 40))
def test_a_watched_curve_is_bounded_ascends_and_ends_with_what_was_seen_last(
    seen: list[tuple[int, float | None]], most: int
) -> None:
    curve = LiveCurve(most)
    for step, loss in seen:
        curve.add(step, loss)
        assert len(curve.points) <= most
    steps = [point.step for point in curve.points]
    assert steps == sorted(set(steps))
    known = [step for step, loss in seen if loss is not None]
    assert steps[-1:] == known[-1:]
