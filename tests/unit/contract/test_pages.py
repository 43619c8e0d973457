"""Pages of operator and client: the list of jobs, the content security policy, and the live curve."""

import re

from hypothesis import given
from hypothesis import strategies as st

from tests.testing.page.html_page import Page
from trainium_contract.pages.html import FILE_POLICY, STYLE, compute_csp_digest
from trainium_contract.pages.jobs_page import MAX_JOBS, JobRow, render_live_jobs, render_namespace_form
from trainium_contract.pages.live import HEADERS, LIVE_SCRIPT
from trainium_contract.pages.node_map import render_node_map
from trainium_contract.pages.svg import BAD, GOOD, OTHER, WAITING
from trainium_contract.views.curve import LiveCurve
from trainium_contract.views.interruptions import InterruptionView
from trainium_contract.views.workers import PodRow

HOSTILE = '"><script>alert(1)</script>'


def test_running_jobs_come_first_and_omitted_jobs_are_counted() -> None:
    rows = [JobRow("a", f"job-{number:04}", phase="Completed") for number in range(MAX_JOBS)]
    rows += [JobRow("z", "alive", phase="Running", step=5, total_steps=10)]
    page = Page(render_live_jobs(rows, 0.0, where="all namespaces", root="/ui"))
    links = [value for name, value in page.attributes if name == "href"]
    assert links[0] == "/ui/z/alive"
    assert len(links) == MAX_JOBS
    assert "… and 1 more" in page.text
    assert page.open == []


def test_list_and_form_escape_user_text() -> None:
    row = JobRow(HOSTILE, HOSTILE, phase=HOSTILE, note=HOSTILE)
    listed = Page(render_live_jobs([row], 0.0, where=HOSTILE, root="/ui"))
    assert listed.tags.count("script") == 1
    assert listed.text.count("alert(1)") == 6, "title, heading and four cells"
    form = Page(render_namespace_form(HOSTILE, "/ui"))
    assert "script" not in form.tags
    assert form.open == []


def test_the_content_security_policy_allows_only_the_style_and_script_of_the_page() -> None:
    policy = HEADERS["Content-Security-Policy"]
    assert policy.startswith("default-src 'none';")
    assert compute_csp_digest(STYLE) in policy
    assert compute_csp_digest(LIVE_SCRIPT) in policy
    assert f"default-src 'none'; style-src {compute_csp_digest(STYLE)}" == FILE_POLICY
    text = render_live_jobs([], 0.0, where="x", root="/ui")
    assert re.findall(r"<script>(.*?)</script>", text, re.DOTALL) == [LIVE_SCRIPT]
    assert " style=" not in text


@given(st.lists(st.tuples(st.integers(0, 300), st.floats(0, 10) | st.none()), max_size=300), st.integers(2, 40))
def test_a_live_curve_is_bounded_ordered_and_ends_with_the_last_step(
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


def interruption_view(cause: str, node: str) -> InterruptionView:
    return InterruptionView(
        time="", at=None, detected_at=None, cause=cause, response="Spare", pod="p", node=node, message="", generation=1,
        attempt=0, detected_seconds=None, recovered_seconds=1.0, step_before=None, resume_step=None, steps_lost=None,
        pods_replaced=1, stages={},
    )  # fmt: skip


def test_the_node_map_shows_workers_and_interruptions_of_each_node() -> None:
    pods = [PodRow("j-w-0", "Running", "node-10"), PodRow("j-w-1", "Running", "node-2"), PodRow("j-w-2", "Pending", "")]
    pods.append(PodRow("j-w-3", "Error", "node-30"))
    interruptions = [
        interruption_view(*fields) for fields in (("Crash", "node-2"), ("Crash", "node-2"), ("NodeLost", "node-1"))
    ]
    page = render_node_map(pods, interruptions, {"j-w-0": "0 to 3"}, 10)

    titles = re.findall(r'class="c(\d+)"><title>(.*?)</title>', page)
    assert titles == [
        (str(BAD), "node-1; interrupted: NodeLost 1"),
        (str(WAITING), "node-2; j-w-1 Running; interrupted: Crash 2"),
        (str(GOOD), "node-10; j-w-0 Running, ranks 0 to 3"),
        (str(OTHER), "node-30; j-w-3 Error"),
    ]
    assert "4 nodes that the job has or had" in page
    assert "3 more are not shown" in render_node_map(pods, interruptions, {}, 1)
    assert render_node_map([], [], {}, 10) == ""


def test_the_node_map_escapes_names() -> None:
    page = Page(render_node_map([PodRow(HOSTILE, HOSTILE, HOSTILE)], [interruption_view(HOSTILE, HOSTILE)], {}, 9))
    assert "script" not in page.tags
    assert page.open == []
