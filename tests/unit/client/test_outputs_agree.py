"""Compare what `status`, `why`, `list`, `kubectl get` and the page show of one job: no two contradict each other."""

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from html import unescape
from typing import Any, NamedTuple

import pytest

from tests.testing.api.recorded_jobs import RECORDED, recorded_object
from tests.testing.outputs.tables import read_columns
from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_cluster import FakeCluster
from trainium_client.render.interruption import render_interruption
from trainium_client.render.page import render_text
from trainium_client.render.status import render_status
from trainium_client.render.tables import render_jobs
from trainium_client.views.interruption_report import explain_interruption
from trainium_contract.job import GoodputStatus, TrainingJobSpec, TrainingJobStatus
from trainium_contract.pages.formatting import format_percent
from trainium_contract.pages.job_page import JobReport, report_html
from trainium_contract.pages.jobs_page import build_job_row
from trainium_contract.rfc3339 import parse_rfc3339
from trainium_contract.views.interruptions import read_interruptions
from trainium_contract.views.job import build_job_view
from trainium_contract.views.status_reader import read_public_status


def lean(**changes: Any) -> TrainingJobSpec:
    return build.spec(**{"workers": {"replicas": 4, "spares": 1}, "trainer": {"steps": 200}, **changes})


def interrupted(cluster: FakeCluster) -> None:
    cluster.run(30)
    cluster.crash_process(1)
    cluster.run(20)
    cluster.kill_pod(cluster.members()[1].view.name)


def suspended(cluster: FakeCluster) -> None:
    cluster.run(60)
    cluster.suspend(value=True)


def with_total(cluster: FakeCluster) -> None:
    cluster.total = 100_000
    cluster.run(60)


def without_steps(cluster: FakeCluster) -> None:
    cluster.reports_steps = False
    cluster.run(60)


SIMULATED: dict[str, tuple[TrainingJobSpec, Callable[[FakeCluster], object], float]] = {
    "starting": (lean(), lambda _: None, 3),
    "training": (lean(), lambda cluster: cluster.run(30), 20),
    "recovering": (lean(), interrupted, 1),
    "recovered": (lean(), interrupted, 30),
    "completed": (lean(), interrupted, 300),
    "failed before a step": (lean(), lambda cluster: (cluster.run(12), cluster.give_up(0, 64)), 30),
    "failed after steps": (lean(), lambda cluster: (cluster.run(60), cluster.give_up(2, 65)), 30),
    "suspending": (lean(), suspended, 1),
    "suspended": (lean(), suspended, 30),
    "past its deadline": (lean(activeDeadlineSeconds=40), lambda cluster: cluster.run(60), 30),
    "a program": (build.program_spec(), with_total, 10),
    "a program without steps": (build.program_spec(), without_steps, 60),
}


def find_jobs(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the jobs with a status in a recording, also in the text of a response."""
    if isinstance(value, dict):
        if value.get("kind") == "TrainingJob" and value.get("status"):
            yield value
        for each in value.values():
            yield from find_jobs(each)
    elif isinstance(value, list):
        for each in value:
            yield from find_jobs(each)
    elif isinstance(value, str) and '"TrainingJob"' in value:
        for line in value.splitlines():
            with contextlib.suppress(ValueError):
                yield from find_jobs(json.loads(line).get("object"))


@cache
def recorded_jobs() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(RECORDED.rglob("*.json")):
        for job in find_jobs(json.loads(path.read_text())):
            found.setdefault(f"{path.relative_to(RECORDED)}: {job['status'].get('phase')}", renew(job))
    return found


def renew(job: dict[str, Any]) -> dict[str, Any]:
    """Return a job as the present operator writes it: some recordings lack the columns' fields."""
    status = TrainingJobStatus.model_validate(job["status"])
    return job | {"status": status.replaced(goodput=with_percent(status.goodput)).to_wire()}


def with_percent(goodput: GoodputStatus) -> GoodputStatus:
    return goodput.replaced(percent="" if goodput.ratio is None else format_percent(goodput.ratio))


class Outputs(NamedTuple):
    """The outputs of one job."""

    status: dict[str, str]
    """Lines of `status`, by label."""
    why: dict[str, str]
    row: dict[str, str]
    """Cells of `list`, by column."""
    columns: dict[str, str]
    """Cells of `kubectl get -o wide`, by column; empty for none."""
    page: str


def read_labels(text: str) -> dict[str, str]:
    return {match[1]: match[2] for line in text.splitlines() if (match := re.match(r"([A-Z]\w+) {2,}(.*)", line))}


def show(job: dict[str, Any]) -> Outputs:
    now = parse_rfc3339(job["status"]["progress"].get("updated", "")) or build.NOW
    view = build_job_view(job, now=now)
    head, cells = (
        re.split(r" {2,}", line.strip())
        for line in render_text(
            render_jobs([build_job_row(job)], 200, where="", with_namespace=True), width=200, colour=False
        ).splitlines()
    )
    report = JobReport(view, read_interruptions(read_public_status(job)), None, None, (), ())
    page = report_html(report, now)
    return Outputs(
        status=read_labels(render_text(render_status(view, now=now, width=200), width=200, colour=False)),
        why=read_labels(render_text(render_interruption(explain_interruption(job)), width=200, colour=False)),
        row=dict(zip(head, cells, strict=True)),
        columns=read_columns(job),
        page=unescape(re.sub(r"<[^>]*>", " ", page)),
    )


def simulate(name: str) -> dict[str, Any]:
    spec, prepare, seconds = SIMULATED[name]
    cluster = FakeCluster(spec, nodes=7)
    prepare(cluster)
    cluster.run(seconds)
    return recorded_object("job") | {"spec": spec.to_wire(), "status": cluster.status.to_wire()}


def check_outputs(job: dict[str, Any]) -> None:
    status, why, row, columns, page = show(job)
    phase = columns["Phase"]
    assert (row["PHASE"], status["Phase"].split(",")[0]) == (phase, phase)
    assert status["Phase"] in page

    conditions = {each["type"]: each for each in job["status"].get("conditions", ())}
    if phase == "Failed":
        assert columns["Reason"] in {conditions["Failed"]["reason"], "" if "Ready" not in conditions else None}
        assert status["Stopped"].split()[0].rstrip(",") == why["Cause"]
        assert "Last" not in status
    last = status.get("Stopped") or status.get("Last")
    assert (last is not None) == ("Cause" in why)
    if last is not None:
        assert last.split()[0].rstrip(",") == why["Cause"]
        assert why["Cause"] in page
    restarts = job["status"]["restarts"]
    assert columns["Restarts"] == row["INTERRUPTED"] == str(sum(restarts.get("byCause", {}).values()))
    words = {"0": "never", "1": "once"}.get(columns["Restarts"], f"{columns['Restarts']} times")
    assert status["Interrupted"].startswith(words)

    step = int(columns["Step"])
    assert re.match(r"\d*", row["STEP"].replace("-", "0"))[0] == str(step)
    shown = re.search(r"step (\d+)", status.get("Progress", "step 0"))
    assert shown is not None
    assert shown[1] == str(step)
    assert f"step {step}" in page or step == 0
    assert int(re.match(r"\d*", why.get("Steps", ""))[0] or 0) <= max(step, 1), "no step before is above the newest"

    durable = f"step {columns['Ckpt']} on storage" if columns["Ckpt"] else "none on storage"
    is_known = all(each.get("reason") != "CheckpointsUnknown" for each in conditions.values())
    assert status["Checkpoint"].startswith(durable if is_known else "not known")
    assert status["Checkpoint"].split(",")[0] in page
    assert int(columns["Ckpt"] or 0) <= step

    goodput = columns["Goodput"]
    assert (row["GOODPUT"].replace("-", ""), status.get("Goodput", "").partition(" of ")[0]) == (goodput, goodput)
    assert goodput in page

    size = status["Size"]
    assert size.startswith(f"{columns['Size']} of ")
    assert ("data-parallel" in size) == (size[0] != "0" and columns["DP"] != "0"), "no rank is left at size 0"
    assert row["NODES"].split()[0] == columns["Ready"] == status["Workers"].split()[0]


@pytest.mark.parametrize("name", sorted(recorded_jobs()))
def test_what_is_shown_of_a_recorded_job_agrees(name: str) -> None:
    check_outputs(recorded_jobs()[name])


@pytest.mark.parametrize("name", SIMULATED)
def test_what_is_shown_of_a_simulated_job_agrees(name: str) -> None:
    check_outputs(simulate(name))
