"""Train the example of GRPO with rollout servers without faults and with many, and beside JobSet.

`python -m benchmarks.rollouts --jobset COMMAND`. COMMAND installs JobSet's definition and runs its controller in the
foreground, with KUBECONFIG set; without it JobSet is left out.

The noise comes first: the same run again, at one rank, and with other seeds. Then rollout servers are killed every five
seconds while a rank is killed twice, a node is lost, and both the workers and the role are resized.
"""

from __future__ import annotations

import itertools
import random
import statistics
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from rich.table import Table

from benchmarks.harness.conditions import describe_conditions
from benchmarks.harness.launchers import run_jobset, wait_for
from benchmarks.rollouts.launchers import (
    SERVERS,
    JobSetLauncher,
    JobSetRulesLauncher,
    Launcher,
    RolloutDemo,
    Training,
    TrainingJobLauncher,
)
from benchmarks.rollouts.rewards import (
    compute_max_difference,
    compute_reward_curve,
    count_updates,
    list_unequal_repetitions,
    read_rewards,
    smooth_curve,
)
from trainium_contract.api_server.errors import ApiError
from trainium_devcluster.demos.curves import format_fault_table
from trainium_devcluster.demos.session import DemoSession, Name, Out, Outcome
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.node.api.objects import is_ready

STEPS = 400
SEEDS = (0, 1, 2)
KILL_SECONDS = 5.0
_RUN_SECONDS = 600.0
_WAIT_SECONDS = 120.0
_KILLS = 2
"""Faults of each kind beside JobSet."""
_STEPS_BETWEEN = 30


@dataclass(frozen=True, slots=True)
class Noise:
    """Largest absolute differences of the mean reward of undisturbed runs."""

    same_run_again: float
    """Of any step."""
    one_rank: float
    """Of the means over 50 steps, as the next one: its sums round otherwise, which may change an answer."""
    other_seeds: float


@dataclass(frozen=True, slots=True)
class DisturbedRun:
    """Results of the run with faults."""

    completed: bool
    killed_servers: int
    servers_replaced: int
    """As the operator counted."""
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
    run.wait_for_step(1, _WAIT_SECONDS)
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


@dataclass(frozen=True, slots=True)
class KillCost:
    """Cost of one kill."""

    kind: str
    pause_seconds: float
    """Longest time between two new steps."""
    steps_recomputed: int
    whole_seconds: float
    """Seconds until all servers were ready and training went on."""
    servers_replaced: int


@dataclass(frozen=True, slots=True)
class LauncherCost:
    """Cost of the kills of a launcher."""

    title: str
    step_seconds: float
    """Median time between two steps before the first kill."""
    faults: tuple[KillCost, ...]


def measure_kills(launcher: Launcher) -> LauncherCost:
    """Kill servers and ranks in turn, each after the recovery from the last kill."""
    launcher.start()
    wait_for(
        "the start",
        lambda: read_rewards(launcher.folder).newest_step >= _STEPS_BETWEEN and _count_ready(launcher) == SERVERS,
        _WAIT_SECONDS,
    )
    times = [item.ended_at for item in read_rewards(launcher.folder).computations.values()]
    step_seconds = statistics.median(after - before for before, after in itertools.pairwise(times))
    faults = []
    for _ in range(_KILLS):
        faults += [_measure_kill(launcher, kind) for kind in ("killed server", "killed rank")]
    launcher.stop()
    return LauncherCost(launcher.title, step_seconds, tuple(faults))


def _measure_kill(launcher: Launcher, kind: str) -> KillCost:
    servers = [pod for pod in launcher.list_servers() if is_ready(pod)]
    before = {pod["metadata"]["uid"] for pod in servers}
    if kind == "killed rank":
        launcher.kill_rank()
    else:
        launcher.kill_process(servers[0])
    moment = time.time()
    newest = read_rewards(launcher.folder).newest_step

    restarts = kind == "killed rank" or launcher.restarts_all

    def is_whole() -> bool:
        ledger = read_rewards(launcher.folder)
        has_restarted = ledger.find_first_new_step(moment) is not None
        is_training = ledger.newest_step > newest + 2 and (has_restarted or not restarts)
        return is_training and _count_ready(launcher, kind == "killed server", before) == SERVERS

    wait_for(f"the recovery from {kind}", is_whole, _WAIT_SECONDS)
    whole = time.time()
    steps = read_rewards(launcher.folder).newest_step
    wait_for(
        "further steps", lambda: read_rewards(launcher.folder).newest_step >= steps + _STEPS_BETWEEN, _WAIT_SECONDS
    )
    ledger = read_rewards(launcher.folder)
    after = {pod["metadata"]["uid"] for pod in launcher.list_servers()}
    cost = KillCost(
        kind,
        ledger.find_longest_pause(moment - 1),
        ledger.count_recomputed(moment),
        whole - moment,
        len(before - after),
    )
    launcher.demo.view.log(f"{launcher.title}: {cost}")
    return cost


def _count_ready(launcher: Launcher, is_one_new: bool = False, before: set[str] | None = None) -> int:
    """Return the number of ready servers; 0 while none of them is new, if one must be."""
    ready = {pod["metadata"]["uid"] for pod in launcher.list_servers() if is_ready(pod)}
    return 0 if is_one_new and not ready - (before or set()) else len(ready)


def measure(
    *,
    jobset: Annotated[str | None, typer.Option(help="Command that installs JobSet and runs its controller.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the killed servers.")] = 1,
    parts: Annotated[str, typer.Option(help="Parts to run: faults, peers.")] = "faults,peers",
    out: Out = Path("out/rollouts"),
    name: Name = None,
) -> None:
    """Train with rollout servers through faults, and measure what kills cost here and with JobSet."""
    DemoSession("rollouts", out, name, keep=False).show(lambda session: _run(session, jobset, seed, parts.split(",")))


def _run(session: DemoSession, jobset: str | None, seed: int, parts: list[str]) -> Outcome:
    outcome = Outcome()
    with session.run_cluster() as cluster:
        demo = RolloutDemo(cluster, session.view, session.out)
        demo.install()
        with run_jobset(demo, jobset):
            if "faults" in parts:
                noise, reference = measure_noise(demo)
                disturbed = run_disturbed(demo, reference, seed)
                outcome.report |= {"noise": asdict(noise), "disturbed": asdict(disturbed)}
                outcome.report["faults"] = [asdict(fault) for fault in demo.faults]
                outcome.tables += [_format_table("Noise and the run with faults", asdict(noise) | asdict(disturbed))]
                outcome.tables += [format_fault_table(tuple(demo.faults))]
                outcome.problems += _find_problems(noise, disturbed)
            if "peers" in parts:
                costs = [measure_kills(launcher) for launcher in _list_launchers(demo, is_jobset=jobset is not None)]
                outcome.report["kills"] = [asdict(cost) for cost in costs]
                outcome.tables.append(_build_kill_table(costs))
    outcome.report |= describe_conditions("rollouts")
    return outcome


def _list_launchers(demo: RolloutDemo, *, is_jobset: bool) -> list[Launcher]:
    launchers: list[Launcher] = [TrainingJobLauncher(demo, Training("kills", 100_000))]
    if is_jobset:
        launchers += [JobSetLauncher(demo, Training("jobset", 100_000))]
        launchers += [JobSetRulesLauncher(demo, Training("jobset-rules", 100_000))]
    return launchers


def _find_problems(noise: Noise, disturbed: DisturbedRun) -> list[str]:
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


def _format_table(title: str, figures: dict[str, Any]) -> Table:
    table = Table(title=title, show_header=False)
    for key, value in figures.items():
        table.add_row(key.replace("_", " "), f"{value:.2g}" if isinstance(value, float) else str(value))
    return table


def _build_kill_table(costs: list[LauncherCost]) -> Table:
    table = Table(title="Medians: pause of the training, servers whole again (steps computed again)")
    table.add_column("")
    for cost in costs:
        table.add_column(cost.title, justify="right")
    for kind in ("killed server", "killed rank"):
        table.add_row(kind, *(_format_kills([fault for fault in cost.faults if fault.kind == kind]) for cost in costs))
    return table


def _format_kills(faults: list[KillCost]) -> str:
    pause = statistics.median(fault.pause_seconds for fault in faults)
    whole = statistics.median(fault.whole_seconds for fault in faults)
    recomputed = statistics.median(fault.steps_recomputed for fault in faults)
    return f"{pause:.2f} s, {whole:.1f} s ({recomputed:g})"


if __name__ == "__main__":
    typer.run(measure)
