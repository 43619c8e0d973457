"""Compare what commands, pages, metrics and the simulator show of one job: a name has one meaning and one unit."""

import io
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from rich.console import Console

from tests.testing.api.recorded_jobs import recorded_object
from tests.testing.operator.metric_builders import named_job, read_samples
from tests.testing.outputs.tables import read_columns
from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_cluster import FakeCluster
from trainium_client.render.page import render_text
from trainium_client.render.status import render_status
from trainium_client.render.tables import render_goodput, render_scaling, render_sizes
from trainium_client.views.sizes import list_scaling_rows, list_size_rows
from trainium_contract.job import TrainingJobStatus
from trainium_contract.pages.formatting import format_duration, format_percent
from trainium_contract.pages.job_page import JobReport, report_html
from trainium_contract.views.job import build_job_view
from trainium_contract.views.job_view import JobView
from trainium_devcluster.demos.view import View
from trainium_operator.monitoring.metrics import Metrics
from trainium_simulator.report import format_shares
from trainium_simulator.virtual.result import SimulationResult
from trainium_trainer.monitor.step_metrics import StepMetrics
from trainium_worker.progress_record import ProgressRecord


@cache
def run_job() -> tuple[TrainingJobStatus, float]:
    """Return the status that the operator's plan writes for a job with a crash and a lost pod, and the time."""
    spec = build.spec(workers={"replicas": 4, "spares": 1, "minReplicas": 2}, trainer={"steps": 1000})
    cluster = FakeCluster(spec, nodes=7)
    cluster.run(60)
    cluster.crash_process(1)
    cluster.run(40)
    cluster.kill_pod(cluster.members()[1].view.name)
    cluster.run(60)
    return cluster.status, cluster.now


def job() -> dict[str, Any]:
    spec = {"workers": {"replicas": 4, "minReplicas": 2}, "trainer": recorded_object("job")["spec"]["trainer"]}
    return recorded_object("job") | {"spec": spec, "status": run_job()[0].to_wire()}


def view() -> JobView:
    return build_job_view(job(), now=run_job()[1])


def pages() -> dict[str, str]:
    """Return each page that shows a figure of the ledger, by its command."""
    now = run_job()[1]

    def shown() -> Iterator[tuple[str, Any]]:
        yield "status", render_status(view(), now=now, width=200)
        yield "goodput", render_goodput(view().goodput, 200)
        yield "sizes", render_sizes(list_size_rows(job()), 200)
        yield "scaling", render_scaling(list_scaling_rows(job()), 200)

    texts = {command: render_text(page, width=200, colour=False) for command, page in shown()}
    return texts | {"ui": report_html(JobReport(view(), (), None, None, (), ()), now)}


def test_the_goodput_is_the_same_figure_in_the_same_unit_everywhere() -> None:
    status = run_job()[0]
    assert status.goodput.ratio == pytest.approx(
        status.goodput.productive_seconds / status.goodput.wall_seconds, abs=1e-4
    )
    goodput = format_percent(status.goodput.ratio)
    assert read_columns(job())["Goodput"] == goodput
    for command in ("status", "goodput", "ui"):
        assert f"{goodput} of {format_duration(status.goodput.wall_seconds)}" in pages()[command], command
    metrics = Metrics(named_jobs=1)
    metrics.record_plan(named_job("a"), status)
    samples = read_samples(metrics)
    shown = [value for key, value in samples.items() if "job_goodput_ratio" in key and 'measure="strict"' in key]
    assert shown == [status.goodput.ratio]


def test_what_was_lost_is_the_same_sum_with_the_same_names_everywhere() -> None:
    goodput = view().goodput
    lost = goodput.wall_seconds - goodput.productive_seconds
    assert sum(goodput.lost_seconds.values()) == pytest.approx(lost, abs=0.01)
    assert sum(goodput.lost_by_stage.values()) == pytest.approx(lost, abs=0.01)
    assert {"Crash", "Startup"} <= set(goodput.lost_seconds)
    for command in ("status", "goodput", "ui"):
        assert f"lost {format_duration(goodput.lost)}" in pages()["status"]
        assert "Startup" in pages()[command]
        assert not re.search(r"Overhead(?! \(slower steps\))", pages()[command]), "explained wherever it is shown"


def test_the_simulator_has_the_ratios_and_the_names_of_the_ledger() -> None:
    ledger = run_job()[0].goodput
    result = SimulationResult(
        days=1.0,
        ledger=ledger,
        user_wait_seconds=0.0,
        work_seconds=ledger.productive_seconds,
        work_seconds_by_day=(),
        seconds_by_size={},
        interruptions=run_job()[0].history,
    )
    assert result.strict_goodput == pytest.approx(ledger.ratio, abs=1e-4)
    assert result.uptime == pytest.approx(ledger.uptime_ratio, abs=1e-4)
    assert result.compute_fleet_utilization(4) == pytest.approx(ledger.fleet_ratio, abs=1e-3)
    assert (result.lost_by_cause, result.lost_by_stage) == (ledger.lost_seconds, ledger.lost_by_stage)
    shown = format_shares({"Overhead": 0.5, "Decide": 0.25})
    assert shown == "Overhead (slower steps) 50.000 %, Decide (wait for a worker) 25.000 %"


def test_a_demo_shows_the_lines_of_status() -> None:
    output = io.StringIO()
    with View(Console(file=output, width=200, force_terminal=True)) as demo:
        demo.show(job())
    for label in ("Progress", "Size", "Checkpoint", "Goodput", "Interrupted"):
        (line,) = (line for line in pages()["status"].splitlines() if line.startswith(label))
        value = line.removeprefix(label).split(", ")[0].split(" left")[0].strip()
        assert value in output.getvalue(), label


def test_the_stages_of_each_interruption_are_all_of_its_time() -> None:
    status = run_job()[0]
    reference = status.goodput.sizes[-1].step_seconds
    assert reference is not None
    assert len(status.history) == 2
    for entry in status.history:
        assert entry.stages is not None
        assert entry.recovered_seconds == pytest.approx(entry.stages.total + reference, abs=0.01)


def test_the_step_time_of_a_size_is_the_same_in_every_command() -> None:
    (account,) = run_job()[0].goodput.sizes
    step_time = format_duration(account.step_seconds)
    assert f"{step_time} a step" in pages()["status"]
    for command in ("goodput", "sizes", "scaling"):
        (header,) = (line for line in pages()[command].splitlines() if "STEP TIME" in line)
        row = next(line for line in pages()[command].splitlines() if re.match(r" *4 ", line))
        end = header.index("STEP TIME") + len("STEP TIME")
        assert row[:end].split()[-1] == step_time, command


def test_the_bars_of_what_was_lost_are_shares_of_it() -> None:
    section = pages()["goodput"].split("What was lost, by stage")[1].split("Steps by size")[0]
    drawn = [line.count("━") for line in section.splitlines() if "%" in line]
    assert max(drawn) >= 20 / len(drawn)
    assert sum(drawn) == pytest.approx(20, abs=len(drawn))


def test_no_figure_of_the_trainer_is_called_goodput() -> None:
    """It counts neither the start nor slow steps, so it is higher than the goodput of the job."""
    metrics = StepMetrics(
        step=1, loss=1.0, grad_norm=1.0, learning_rate=1.0, tokens=1, samples=1, batch=1, time_in_steps=0.98
    )
    names = {*metrics.to_json(), *metrics.list_scalars(), *ProgressRecord.__dataclass_fields__}
    assert not [name for name in names if "goodput" in name.lower()]
    assert metrics.to_json()["timeInSteps"] == metrics.list_scalars()["train/timeInSteps"] == 0.98
