"""Train the example of GRPO with rollout servers without faults and with many, and beside JobSet.

`python -m benchmarks.rollouts --jobset COMMAND`. COMMAND installs JobSet's definition and runs its controller in the
foreground, with KUBECONFIG set; without it JobSet is left out.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.harness.conditions import describe_conditions
from benchmarks.harness.launchers import run_jobset
from benchmarks.rollouts.disturbed_run import find_problems, measure_noise, run_disturbed
from benchmarks.rollouts.kills import KillCost, LauncherCost, measure_kills
from benchmarks.rollouts.launchers import (
    JobSetLauncher,
    JobSetRulesLauncher,
    Launcher,
    RolloutDemo,
    Training,
    TrainingJobLauncher,
)
from trainium_devcluster.demos.curves import format_fault_table
from trainium_devcluster.demos.session import DemoSession, Name, Out, Outcome


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
                outcome.problems += find_problems(noise, disturbed)
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
