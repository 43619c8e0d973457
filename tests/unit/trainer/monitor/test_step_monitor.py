"""Monitor steps, with the same results after a restart."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trainium_contract.trainer.monitor import MonitorConfig
from trainium_contract.wire.messages import AlertKind
from trainium_trainer.monitor.json_lines import LineWriter
from trainium_trainer.monitor.step_metrics import StepMetrics, compute_perplexity
from trainium_trainer.monitor.step_monitor import (
    JobDevices,
    MonitorAlert,
    MonitorState,
    StepMonitor,
    create_stability_rules,
    read_monitor_state,
)
from trainium_trainer.monitor.writers import METRICS_NAME, Recorder

CONFIG = MonitorConfig(spike_window=5, spike_event_steps=3)
RULES = create_stability_rules(CONFIG)
CPU = JobDevices(torch.device("cpu"), count=4, nodes=2, peak=None)


def create_monitor(past: MonitorState | None = None, device: JobDevices = CPU) -> StepMonitor:
    return StepMonitor(CONFIG, past or MonitorState(), device, flops_per_token=1e9)


def record_step(
    monitor: StepMonitor, step: int, loss: float = 2.0, norm: float = 1.0, **changes: Any
) -> tuple[StepMetrics, tuple[MonitorAlert, ...]]:
    fields = {
        "learning_rate": 0.1,
        "tokens": step * 100,
        "samples": step * 8,
        "batch": 8,
        "seconds": 0.5,
    }
    new_tokens = changes.pop("new_tokens", 100)
    measured = StepMetrics(step=step, loss=loss, grad_norm=norm, **(fields | changes))
    return monitor.step(measured, new_tokens=new_tokens)


def write(root: Path, metrics: list[StepMetrics]) -> None:
    writer = LineWriter(root / METRICS_NAME)
    for step_metrics in metrics:
        writer.write(step_metrics.to_json())
    writer.close()


def test_judgements_over_a_restart_at_any_step_are_those_of_an_uninterrupted_run(tmp_path: Path) -> None:
    rng = random.Random(1)
    has_spike = [60 < step % 100 < 70 for step in range(260)]
    values = [
        (rng.gauss(2, 0.1) + 0.5 * spike + 1.5 * (step > 150), rng.uniform(1, 2) + 9.0 * spike)
        for step, spike in enumerate(has_spike)
    ]
    monitor = create_monitor()
    expected = [record_step(monitor, step, *value) for step, value in enumerate(values, start=1)]
    write(tmp_path, [metrics for metrics, _ in expected])
    assert {alert.kind for _, alerts in expected for alert in alerts} == {AlertKind.LOSS_SPIKE, AlertKind.LOSS_ALARM}
    for cut in range(259, -1, -7):
        Recorder.rewind(tmp_path, cut)
        resumed = create_monitor(read_monitor_state(tmp_path, RULES))
        for step in range(cut + 1, 261):
            metrics, alerts = record_step(resumed, step, *values[step - 1])
            assert metrics.stability == expected[step - 1][0].stability
            assert alerts == expected[step - 1][1]
            assert metrics.productive_seconds == pytest.approx(step * 0.5)
            assert metrics.resumed == (step == cut + 1 and cut > 0)


def test_time_in_steps_is_a_share_of_the_time_since_the_first_start(tmp_path: Path) -> None:
    line = record_step(create_monitor(), 4)[0].to_json() | {"productiveSeconds": 60.0}
    first = line | {"step": 1, "time": line["time"] - 100.0, "seconds": 20.0}
    (tmp_path / METRICS_NAME).write_text(json.dumps(first) + "\n" + json.dumps(line) + "\n")
    past = read_monitor_state(tmp_path, RULES)
    assert past.productive_seconds == 60.0
    assert past.began == pytest.approx(line["time"] - 120.0)
    metrics, _ = record_step(create_monitor(past), 5, seconds=30.0)
    assert metrics.productive_seconds == 90.0
    assert metrics.time_in_steps == pytest.approx(90 / 120, abs=0.02)


def test_utilisation_uses_all_devices_of_the_job_and_is_left_out_without_a_peak() -> None:
    assert record_step(create_monitor(), 1)[0].utilisation is None
    with_peak = create_monitor(device=replace(CPU, peak=1e11))
    assert record_step(with_peak, 1)[0].utilisation == pytest.approx(200 * 1e9 / (4 * 1e11))


def test_a_step_reports_the_samples_of_a_second_and_the_nodes_that_made_it() -> None:
    line = record_step(create_monitor(), 1, batch=8, seconds=0.5)[0].to_json()
    assert (line["tokensPerSecond"], line["samplesPerSecond"], line["nodes"]) == (200.0, 16.0, 2)
    repeated = record_step(create_monitor(), 1, seconds=None)[0].to_json()
    assert not {"samplesPerSecond", "nodes"} & repeated.keys(), "the nodes of a repeated step are unknown"


def test_alerts_name_the_step_the_figures_and_what_to_do() -> None:
    monitor = create_monitor()
    for step in range(1, 101):
        record_step(monitor, step, loss=2.0 + 0.1 * (step % 2))
    assert [record_step(monitor, step, norm=2.5)[1] for step in (101, 102)] == [(), ()]
    (spike,) = record_step(monitor, 103, norm=2.5)[1]
    (alarm,) = [alert for step in range(104, 160) for alert in record_step(monitor, step, loss=3.0)[1]]
    assert spike.kind is AlertKind.LOSS_SPIKE
    assert "Step 103: the gradient norm, 2.5, has been above" in spike.message
    assert "for 3 steps, above all that came before it, and the loss does not fall; it is spike 1" in spike.message
    assert alarm.kind is AlertKind.LOSS_ALARM
    assert alarm.message.startswith("Step 153: the loss has risen: the median of 100 steps is 2.55, and was 2, when")
    assert all("optimizer.learningRate" in alert.message for alert in (spike, alarm))


def test_a_line_has_measured_values_and_only_numbers_of_json() -> None:
    metrics, _ = record_step(create_monitor(), 1, loss=float("nan"), norm=float("inf"), parameter_norm=float("nan"))
    line = json.loads(json.dumps(metrics.to_json(), allow_nan=False))
    assert (line["loss"], line["gradNorm"], line["lowestLoss"]) == (None, None, None)
    assert not {"perplexity", "validationLoss", "validationPerplexity", "mfu", "deviceBytes", "resumed"} & line.keys()
    assert line["hostBytes"] > 0


def test_perplexity_is_the_exponential_of_the_loss() -> None:
    assert compute_perplexity(0.0) == 1.0
    assert compute_perplexity(2.0) == pytest.approx(7.389056)
    assert compute_perplexity(None) is compute_perplexity(1e9) is None
