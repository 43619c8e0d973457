"""Run the example without faults, for the noise of its rewards, and once with many faults.

Rollout servers are killed every five seconds while a rank is killed twice, a node is lost, and both the workers and the
role are resized.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from dataclasses import dataclass
from typing import Any, Self

from benchmarks.rollouts.launchers import RolloutDemo, Training, TrainingJobLauncher
from benchmarks.rollouts.rewards import (
    compute_max_difference,
    compute_reward_curve,
    count_updates,
    list_unequal_repetitions,
    read_rewards,
    smooth_curve,
)
from trainium_contract.api_server.errors import ApiError
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.node.api.objects import is_ready

STEPS = 400
SEEDS = (0, 1, 2)
KILL_SECONDS = 5.0
_RUN_SECONDS = 600.0
_START_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Noise:
    """Largest absolute differences of the mean reward of undisturbed runs."""

    same_run_again: float
    """The largest difference in any step."""
    one_rank: float
    """The largest difference of means over 50 steps, as in `other_seeds`: sums of one rank are rounded differently."""
    other_seeds: float


@dataclass(frozen=True, slots=True)
class DisturbedRun:
    """Results of the run with faults."""

    completed: bool
    killed_servers: int
    servers_replaced: int
    """The number of replaced servers in the status."""
    interruptions: tuple[str, ...]
    """Causes and responses in the job's history."""
    generations: int
    steps_missing: int
    updates_too_many: int
    """Updates of the last policy beyond one for each step."""
    unequal_repetitions: tuple[int, ...]
    """Steps that the same number of ranks repeated with other rewards."""
    difference_before_resize: float
    """Largest difference of the mean reward of any step up to the first resize."""
    difference: float
    """Largest difference of the means over 50 steps in the whole run."""
    role_wait_seconds: float
    seconds: float


class ServerKiller:
    """Kills or deletes a random ready server every few seconds, in a thread."""

    def __init__(self, launcher: TrainingJobLauncher, seed: int) -> None:
        self.launcher = launcher
        self.killed: list[tuple[float, str]] = []
        """Unix seconds, and how."""
        self._chance = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(KILL_SECONDS):
            try:
                pods = [pod for pod in self.launcher.list_servers() if is_ready(pod)]
                if pods:
                    self._kill(self._chance.choice(pods))
            except (ApiError, ClusterError, OSError):  # it has just ended, or its node is lost
                continue

    def _kill(self, pod: dict[str, Any]) -> None:
        kind = self._chance.choice(["SIGKILL", "deleted"])
        if kind == "SIGKILL":
            self.launcher.kill_process(pod)
        else:
            self.launcher.run.delete_pod(pod["metadata"]["name"], force=True)
        self.killed.append((time.time(), kind))


def run_undisturbed(demo: RolloutDemo, training: Training) -> dict[int, float]:
    """Run without faults; return the mean reward of each step."""
    launcher = TrainingJobLauncher(demo, training)
    launcher.start()
    launcher.run.wait_for_phase("Completed", _RUN_SECONDS)
    launcher.stop()
    return compute_reward_curve(read_rewards(launcher.folder))


def measure_noise(demo: RolloutDemo) -> tuple[Noise, dict[int, float]]:
    """Run without faults several times; return the noise, and the curve to compare with."""
    curves = [run_undisturbed(demo, Training(f"seed-{seed}", STEPS, seed)) for seed in SEEDS]
    again = run_undisturbed(demo, Training("again", STEPS))
    one_rank = run_undisturbed(demo, Training("one-rank", STEPS, ranks=1))
    first, smoothed = curves[0], [smooth_curve(curve) for curve in curves]
    noise = Noise(
        same_run_again=compute_max_difference(list(first.values()), list(again.values())),
        one_rank=compute_max_difference(smoothed[0], smooth_curve(one_rank)),
        other_seeds=max(compute_max_difference(one, other) for one, other in itertools.combinations(smoothed, 2)),
    )
    demo.view.log(f"noise: {noise}")
    return noise, first


def run_disturbed(demo: RolloutDemo, reference: dict[int, float], seed: int) -> DisturbedRun:
    """Run with killed servers and all other faults; compare with the undisturbed run."""
    started = time.monotonic()
    launcher = TrainingJobLauncher(demo, Training("disturbed", STEPS))
    launcher.start()
    run = launcher.run
    run.wait_for_step(1, _START_SECONDS)
    with ServerKiller(launcher, seed) as killer:
        demo.inject_faults(run)
        status = run.wait_for_phase("Completed", _RUN_SECONDS)
    ledger = read_rewards(launcher.folder)
    curve, steps = compute_reward_curve(ledger), set(range(1, STEPS + 1))
    resized = min(fault.step for fault in demo.faults if fault.kind.startswith("resize"))
    alike = [step for step in range(1, resized + 1) if step in curve]
    waited = (status.get("goodput") or {}).get("lostSeconds") or {}
    return DisturbedRun(
        completed=status.get("phase") == "Completed",
        killed_servers=len(killer.killed),
        servers_replaced=int(status["roles"][0].get("restarts", 0)),
        interruptions=tuple(f"{entry['cause']}/{entry['response']}" for entry in status["history"]),
        generations=int(status["membership"]["generation"]),
        steps_missing=len(steps - curve.keys()),
        updates_too_many=count_updates(launcher.folder, STEPS) - STEPS,
        unequal_repetitions=tuple(list_unequal_repetitions(ledger)),
        difference_before_resize=compute_max_difference(
            [curve[step] for step in alike], [reference[step] for step in alike]
        ),
        difference=compute_max_difference(smooth_curve(curve), smooth_curve(reference)),
        role_wait_seconds=float(waited.get("RoleWait", 0.0)),
        seconds=round(time.monotonic() - started, 1),
    )


def find_problems(noise: Noise, disturbed: DisturbedRun) -> list[str]:
    """Return a sentence for each deviation from what the run with faults must be."""
    problems = {
        "The job did not complete.": not disturbed.completed,
        "A prompt is missing.": disturbed.steps_missing > 0,
        "A step counts twice in the policy.": disturbed.updates_too_many != 0,
        "A repeated step got other rewards.": bool(disturbed.unequal_repetitions),
        "The training was interrupted by something else than its five faults.": len(disturbed.interruptions) != 5,
        "The rewards differ before the first resize.": disturbed.difference_before_resize > noise.same_run_again,
        "The curve is outside of the noise.": disturbed.difference > noise.other_seeds,
    }
    return [sentence for sentence, holds in problems.items() if holds]
