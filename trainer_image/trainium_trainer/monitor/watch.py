"""Derive the figures of each step: stability, speed, utilisation, goodput, memory, and alerts.

Guarantees:
- What is carried from step to step is in the lines of metrics.jsonl, so any process continues after a restart.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainium_contract.wire.messages import AlertKind
from trainium_trainer.monitor.efficiency import compute_utilisation, device_bytes, host_bytes
from trainium_trainer.monitor.figures import StepFigures
from trainium_trainer.monitor.lines import first_line, newest_lines, read_aside
from trainium_trainer.monitor.stability import LEVEL_STEPS, Judgement, Stability, StabilityRules, judge
from trainium_trainer.monitor.writers import METRICS_NAME

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from trainium_contract.trainer.monitor import MonitorConfig
    from trainium_trainer.monitor.figures import Rewards


_WINDOW = 20


class Throughput:
    """A moving rate over the last 20 steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, int, float]] = deque(maxlen=_WINDOW)

    def add(self, tokens: int, samples: int, seconds: float) -> tuple[float, float]:
        """Count a step of all ranks together; return tokens and samples per second."""
        self._steps.append((tokens, samples, seconds))
        tokens, samples, total = map(sum, zip(*self._steps, strict=True))
        return (tokens / total, samples / total) if total > 0 else (0.0, 0.0)


_log = logging.getLogger("trainium.monitor")


@dataclass(frozen=True, slots=True)
class Past:
    """The history of the steps before."""

    stability: Stability = field(default_factory=Stability)
    productive_seconds: float = 0.0
    began: float | None = None
    """Unix seconds when the first step began; None when there is none."""


@dataclass(frozen=True, slots=True)
class JobDevices:
    """Facts about the job's devices that the figures need."""

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
    """Something that a person should know at once."""

    kind: AlertKind
    sentence: str


def stability_rules(config: MonitorConfig) -> StabilityRules:
    """Return the detectors' bounds of a configuration."""
    return StabilityRules(
        window=config.spike_window,
        margin=config.spike_margin,
        reported_after=config.spike_event_steps,
        alarm_ratio=config.alarm_ratio,
    )


def read_past(root: Path, rules: StabilityRules, aside: Path | None = None, *, last: int | None = None) -> Past:
    """Return the state after the last line of the history below `root`.

    `aside`: see `lines.LineWriter`, as of the step `last`. Raises StorageError.
    """
    lines = newest_lines(root / METRICS_NAME, 2 * rules.kept)  # skipped steps have no norm
    lines += [json.loads(line) for line in read_aside(root / METRICS_NAME, aside, last=last)]
    first = first_line(root / METRICS_NAME)
    if not lines or first is None:
        return Past()
    newest = lines[-1]
    began = first["time"] - _or(first["seconds"], 0.0)
    return Past(_stability(lines, rules), newest["productiveSeconds"], began)


def _stability(lines: list[dict[str, Any]], rules: StabilityRules) -> Stability:
    newest = lines[-1]
    judged = [line for line in lines if line["gradNorm"] is not None and line["loss"] is not None][-rules.kept :]
    losses, norms = (tuple(line[name] for line in judged) for name in ("loss", "gradNorm"))
    return Stability(
        losses=losses,
        norms=norms,
        spikes=newest["spikes"],
        spike_steps=newest["spikeSteps"],
        spike_reported=newest["spikeReported"],
        differences=newest["lossDifferences"],
        noise=newest["lossNoise"],
        lowest=_or(newest["lowestLoss"], math.inf),
        lowest_noise=newest["lowestLossNoise"],
        alarm=newest["alarm"],
    )


class Watch:
    """One rank's view of the run, step by step; rank 0's is the one that is recorded."""

    def __init__(
        self,
        config: MonitorConfig,
        past: Past,
        devices: JobDevices,
        *,
        flops_per_token: float,
        of_pairs: bool = False,
    ) -> None:
        """`flops_per_token`: see `efficiency`; `of_pairs`: see `StepFigures`."""
        self._of_pairs = of_pairs
        self._rules = stability_rules(config)
        self._stability = past.stability
        self._productive = past.productive_seconds
        self._began = past.began
        self._resumed = past.began is not None
        self._devices = devices
        self._flops = flops_per_token
        self._throughput = Throughput()

    def step(
        self,
        *,
        step: int,
        loss: float,
        grad_norm: float,
        learning_rate: float,
        tokens: int,
        samples: int,
        batch: int,
        new_tokens: int = 0,
        seconds: float | None = None,
        parameter_norm: float | None = None,
        validation_loss: float | None = None,
        rewards: Rewards | None = None,
        validation_rewards: Rewards | None = None,
    ) -> tuple[StepFigures, tuple[MonitorAlert, ...]]:
        """Return the figures of a step that has just ended, and what to report of it.

        `seconds` is None for a step of an earlier process; `new_tokens` are this step's, of all ranks.
        """
        judgement = judge(self._stability, self._rules, loss=loss, gradient_norm=grad_norm)
        self._stability = judgement.after
        here = seconds is not None
        now = time.time()
        if self._began is None:
            self._began = now - (seconds or 0.0)
        self._productive += seconds or 0.0
        speed, samples_speed = self._throughput.add(new_tokens, batch, seconds) if seconds is not None else (None, None)
        figures = StepFigures(
            step=step,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            tokens=tokens,
            samples=samples,
            batch=batch,
            seconds=seconds,
            tokens_per_second=speed,
            samples_per_second=samples_speed,
            nodes=self._devices.nodes if here else None,
            utilisation=None
            if speed is None
            else compute_utilisation(speed, self._flops, devices=self._devices.count, peak=self._devices.peak),
            parameter_norm=parameter_norm,
            validation_loss=validation_loss,
            rewards=rewards,
            validation_rewards=validation_rewards,
            of_pairs=self._of_pairs,
            productive_seconds=self._productive,
            goodput=min(1.0, self._productive / (now - self._began)) if now > self._began else None,
            host_bytes=host_bytes() if here else None,
            device_bytes=device_bytes(self._devices.device) if here else None,
            resumed=here and self._resumed,
            stability=judgement.after,
        )
        self._resumed = self._resumed and not here
        if judgement.spike_ended_after >= self._rules.reported_after:
            _log.info("step %d: gradient norm is back after a spike of %d steps", step, judgement.spike_ended_after)
        return figures, tuple(_alerts(self._rules, judgement, step=step, norm=grad_norm))


def _alerts(rules: StabilityRules, judgement: Judgement, *, step: int, norm: float) -> list[MonitorAlert]:
    found = []
    if judgement.spike_reported:
        found.append(
            MonitorAlert(
                AlertKind.LOSS_SPIKE,
                f"Step {step}: the gradient norm, {norm:.4g}, has been above {judgement.bound:.4g} (the mean of "
                f"{rules.window} steps + {rules.margin:g}) for {rules.reported_after} steps, "
                "above all that came before it, and the loss does not fall; it is spike "
                f"{judgement.after.spikes} of this run. If the loss rises, lower optimizer.learningRate or go back "
                "to an earlier checkpoint.",
            )
        )
    if judgement.alarm_raised:
        found.append(
            MonitorAlert(
                AlertKind.LOSS_ALARM,
                f"Step {step}: the loss has risen: the median of {LEVEL_STEPS} steps is {judgement.level:.4g}, and was "
                f"{judgement.after.lowest:.4g}, when one step differed from the next by "
                f"{judgement.after.lowest_noise:.2g} (the gradient norm is {norm:.4g}). The run diverges unless this "
                "passes: look at metrics.jsonl, then lower optimizer.learningRate or go back to an earlier checkpoint.",
            )
        )
    return found


def _or(value: Any, otherwise: float) -> float:
    return otherwise if value is None else float(value)
