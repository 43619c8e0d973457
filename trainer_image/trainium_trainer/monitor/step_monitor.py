"""Derive the figures of each step: stability, speed, utilisation, time in steps, memory, and alerts.

Guarantees:
- The state between steps is in the lines of metrics.jsonl, so any process can continue after a restart.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trainium_contract.wire.messages import AlertKind
from trainium_trainer.monitor.efficiency import compute_utilisation, read_device_bytes, read_host_bytes
from trainium_trainer.monitor.json_lines import read_fallback_lines, read_first_line, read_newest_lines
from trainium_trainer.monitor.stability import (
    LEVEL_STEPS,
    METRICS_FIELDS,
    Stability,
    StabilityRules,
    StabilityUpdate,
    update_stability,
)
from trainium_trainer.monitor.writers import METRICS_NAME

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from trainium_contract.trainer.monitor import MonitorConfig
    from trainium_trainer.monitor.step_metrics import StepMetrics


_WINDOW = 20


class Throughput:
    """A moving rate over the last 20 steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, int, float]] = deque(maxlen=_WINDOW)

    def add(self, tokens: int, samples: int, seconds: float) -> tuple[float, float]:
        """Add a step of all ranks; return tokens and samples per second."""
        self._steps.append((tokens, samples, seconds))
        tokens, samples, total = map(sum, zip(*self._steps, strict=True))
        return (tokens / total, samples / total) if total > 0 else (0.0, 0.0)


_log = logging.getLogger("trainium.monitor")


@dataclass(frozen=True, slots=True)
class MonitorState:
    """The history of earlier steps."""

    stability: Stability = field(default_factory=Stability)
    productive_seconds: float = 0.0
    began: float | None = None
    """Unix seconds when the first step began; None when there is none."""


@dataclass(frozen=True, slots=True)
class JobDevices:
    """The facts about the job's devices that the figures need."""

    device: torch.device
    """Device of this process."""
    count: int
    """Processes of the job."""
    nodes: int
    """Nodes of the job."""
    peak: float | None
    """Peak of each process's device, FLOP/s; None where it is not known."""


@dataclass(frozen=True, slots=True)
class MonitorAlert:
    """A problem that a user should know immediately."""

    kind: AlertKind
    message: str


def create_stability_rules(config: MonitorConfig) -> StabilityRules:
    """Return the bounds of the detectors in a configuration."""
    return StabilityRules(
        window=config.spike_window,
        margin=config.spike_margin,
        reported_after=config.spike_event_steps,
        alarm_ratio=config.alarm_ratio,
    )


def read_monitor_state(
    root: Path, rules: StabilityRules, fallback: Path | None = None, *, last: int | None = None
) -> MonitorState:
    """Read the state after the last line of the history below `root`. Raises StorageError.

    `fallback`: see `json_lines.LineWriter`, up to the step `last`.
    """
    lines = read_newest_lines(root / METRICS_NAME, 2 * rules.kept_steps)  # skipped steps have no norm
    lines += [json.loads(line) for line in read_fallback_lines(root / METRICS_NAME, fallback, last=last)]
    first = read_first_line(root / METRICS_NAME)
    if not lines or first is None:
        return MonitorState()
    newest = lines[-1]
    began = first["time"] - (first["seconds"] or 0.0)
    return MonitorState(_restore_stability(lines, rules), newest["productiveSeconds"], began)


def _restore_stability(lines: list[dict[str, Any]], rules: StabilityRules) -> Stability:
    newest = lines[-1]
    judged = [line for line in lines if line["gradNorm"] is not None and line["loss"] is not None][-rules.kept_steps :]
    losses, norms = (tuple(line[name] for line in judged) for name in ("loss", "gradNorm"))
    figures = {field: newest[name] for name, field in METRICS_FIELDS.items() if newest[name] is not None}
    return Stability(losses=losses, norms=norms, **figures)


class StepMonitor:
    """Derives one rank's figures of each step; those of rank 0 are recorded."""

    def __init__(
        self,
        config: MonitorConfig,
        state: MonitorState,
        devices: JobDevices,
        *,
        flops_per_token: float,
        of_pairs: bool = False,
    ) -> None:
        """Create the monitor; `flops_per_token`: see `efficiency`; `of_pairs`: see `StepMetrics`."""
        self._of_pairs = of_pairs
        self._rules = create_stability_rules(config)
        self._stability = state.stability
        self._productive = state.productive_seconds
        self._began = state.began
        self._resumed = state.began is not None
        self._devices = devices
        self._flops = flops_per_token
        self._throughput = Throughput()

    def step(self, measured: StepMetrics, *, new_tokens: int = 0) -> tuple[StepMetrics, tuple[MonitorAlert, ...]]:
        """Return the figures of a step that has just ended, including derived ones, and its alerts.

        `measured.seconds` is None for a step of an earlier process; `new_tokens` are this step's, of all ranks.
        """
        loss, norm, seconds = measured.loss, measured.grad_norm, measured.seconds
        update = update_stability(self._stability, self._rules, loss=loss, gradient_norm=norm)
        self._stability = update.after
        now = time.time()
        if self._began is None:
            self._began = now - (seconds or 0.0)
        self._productive += seconds or 0.0
        metrics = replace(
            measured,
            of_pairs=self._of_pairs,
            productive_seconds=self._productive,
            time_in_steps=min(1.0, self._productive / (now - self._began)) if now > self._began else None,
            stability=update.after,
        )
        if seconds is not None:
            devices = self._devices
            speed, samples_speed = self._throughput.add(new_tokens, measured.batch, seconds)
            metrics = replace(
                metrics,
                tokens_per_second=speed,
                samples_per_second=samples_speed,
                nodes=devices.nodes,
                utilisation=compute_utilisation(speed, self._flops, devices=devices.count, peak=devices.peak),
                host_bytes=read_host_bytes(),
                device_bytes=read_device_bytes(devices.device),
                resumed=self._resumed,
            )
            self._resumed = False
        if update.spike_ended_after >= self._rules.reported_after:
            lasted = update.spike_ended_after
            _log.info("step %d: gradient norm is back after a spike of %d steps", measured.step, lasted)
        return metrics, tuple(_build_alerts(self._rules, update, step=measured.step, norm=norm))


def _build_alerts(rules: StabilityRules, update: StabilityUpdate, *, step: int, norm: float) -> list[MonitorAlert]:
    alerts = []
    if update.spike_reported:
        alerts.append(
            MonitorAlert(
                AlertKind.LOSS_SPIKE,
                f"Step {step}: the gradient norm, {norm:.4g}, has been above {update.bound:.4g} (the mean of "
                f"{rules.window} steps + {rules.margin:g}) for {rules.reported_after} steps, "
                "above all that came before it, and the loss does not fall; it is spike "
                f"{update.after.spikes} of this run. If the loss rises, lower optimizer.learningRate or go back "
                "to an earlier checkpoint.",
            )
        )
    if update.alarm_raised:
        alerts.append(
            MonitorAlert(
                AlertKind.LOSS_ALARM,
                f"Step {step}: the loss has risen: the median of {LEVEL_STEPS} steps is {update.level:.4g}, and was "
                f"{update.after.lowest:.4g}, when one step differed from the next by "
                f"{update.after.lowest_noise:.2g} (the gradient norm is {norm:.4g}). The run diverges unless this "
                "passes: look at metrics.jsonl, then lower optimizer.learningRate or go back to an earlier checkpoint.",
            )
        )
    return alerts
