"""Inject random faults into a job for hours, then check its curve, its samples and what remains of it."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from benchmarks.curves import compare_losses, compare_samples, read_losses, read_samples, worst_difference
from benchmarks.faults.environment import FaultEnvironment
from benchmarks.faults.rows.nodes import KERNEL_LOG
from benchmarks.soak.census import Census, take_census
from benchmarks.soak.injector import Injector
from benchmarks.soak.leaks import find_growth, find_job_files, find_leftovers, growths
from benchmarks.soak.schedule import PASS_SECONDS, SLOTS, SPEC, Fault, draw
from tests.testing.cluster import sites

if TYPE_CHECKING:
    from benchmarks.faults.target import TargetJob

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-5
"""Largest relative difference of a loss, across sizes."""
CENSUS_SECONDS = 20.0
DELETION_SECONDS = 90.0
_STARTED = time.monotonic()


def log(sentence: str) -> None:
    """Print progress."""
    print(f"[{time.monotonic() - _STARTED:7.1f} s] {sentence}", flush=True)


def main() -> int:
    """Run the soak; return 1 if something is wrong."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the cluster ends with this process
    faults = draw(options.seed, options.minutes, options.faults_per_hour)
    log(f"{len(faults)} faults in {options.minutes:g} minutes, seed {options.seed}")
    sites.NODES = SLOTS
    with sites.open_site("local") as site, FaultEnvironment(site, options.out, log) as env:
        wrong = _soak(env, faults, options.minutes * 60)
    for sentence in wrong:
        log(f"WRONG: {sentence}")
    log(f"{len(wrong)} deviations")
    return 1 if wrong else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=240.0, help="duration (default 240)")
    parser.add_argument("--seed", type=int, default=1, help="chooses faults, slots and times")
    parser.add_argument("--faults-per-hour", type=float, default=40.0, help="of nodes and processes (default 40)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "soak", help="folder for diagnostics")
    return parser.parse_args()


def _soak(env: FaultEnvironment, faults: tuple[Fault, ...], seconds: float) -> list[str]:
    time.sleep(5)
    before, samples = take_census(env, None), list[Census]()
    environment = {"TRAINIUM_KERNEL_LOG": KERNEL_LOG, "TRAINIUM_FAULTS_PASS_PACE": f"{PASS_SECONDS:g}"}
    with env.job("soak", json.dumps(SPEC), environment=environment, pace=0.0) as target:
        target.until_stable(10, 300)
        log("all ranks train and a spare is ready")
        injector = Injector(env, target, faults, log)
        with _Sampler(env, target, samples):
            injector.run(seconds)
        phase = target.status().get("phase")
        target.until_stable(5, 180)
        steps = target.step() - 2
        losses, seen = read_losses(target.job.folder), read_samples(target.job.folder)
        history = target.history()
        with suppress(Exception):
            env.save_diagnostics(target, "soak-end")
    after = _census_after_deletion(env, before)
    log(f"an undisturbed run of {steps} steps, for comparison")
    with env.job("undisturbed", json.dumps(SPEC), pace=0.0) as target:
        target.until_step(steps + 3, 120 + steps)
        reference, reference_samples = read_losses(target.job.folder), read_samples(target.job.folder)
    losses = {step: loss for step, loss in losses.items() if step <= steps}
    log(f"{injector.injected} faults injected, {steps:,} steps, last interruptions: {[e['cause'] for e in history]}")
    log(f"the curve is within {worst_difference(losses, reference)[0]:.1e} of the undisturbed one")
    _print_growth(samples)
    return [
        *compare_losses(losses, reference, TOLERANCE),
        *compare_samples(seen, reference_samples, steps),
        *find_leftovers(before, after),
        *find_growth(samples),
        *find_job_files(samples),
        *injector.errors,
        *([f"the job is {phase}"] if phase in ("Failed", "Completed") else []),
    ]


class _Sampler:
    """Take a census from time to time within a block."""

    def __init__(self, env: FaultEnvironment, target: TargetJob, samples: list[Census]) -> None:
        self._env, self._folder, self._samples = env, target.job.folder, samples
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(60)

    def _run(self) -> None:
        while not self._ended.wait(CENSUS_SECONDS):
            with suppress(OSError):
                self._samples.append(take_census(self._env, self._folder))


def _census_after_deletion(env: FaultEnvironment, before: Census) -> Census:
    """Return the first census without leftovers of the job, or the last one in time."""
    deadline = time.monotonic() + DELETION_SECONDS
    while True:
        after = take_census(env, None)
        if not list(find_leftovers(before, after)) or time.monotonic() > deadline:
            return after
        time.sleep(3)


def _print_growth(samples: list[Census]) -> None:
    table = Table(title="Long-lived processes: second quarter and last")
    for heading in ("process", "minutes", "MB", "files", "sockets", "threads"):
        table.add_column(heading, justify="left" if heading == "process" else "right")
    for each in growths(samples):
        pairs = (each.megabytes, each.files, each.sockets, each.threads)
        table.add_row(each.role, f"{each.minutes:.0f}", *(f"{first:.0f} → {last:.0f}" for first, last in pairs))
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())
