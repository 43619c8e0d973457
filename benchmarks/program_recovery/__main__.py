"""Run the same faults and resizes in turn under each launcher, and print what each cost.

`python -m benchmarks.program_recovery --jobset COMMAND`, in the environment of `make program`, on one control plane.
COMMAND installs JobSet's definition and runs its controller in the foreground, with KUBECONFIG set; without it JobSet
is left out.

`--program all --resume --document` runs the programs of `programs.py` instead, without those that an earlier run ended
without a problem, and writes their table into docs/program-runs.md.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from benchmarks.harness.launchers import run_jobset
from benchmarks.program_recovery import document
from benchmarks.program_recovery.costs import FaultCost, RunCost, Runs, read_report, write_report
from benchmarks.program_recovery.fault_run import FaultRun
from benchmarks.program_recovery.launchers import (
    JobSetLauncher,
    Launcher,
    TorchrunLauncher,
    TrainingJobLauncher,
    install_script,
)
from benchmarks.program_recovery.programs import FAULTS, PROGRAMS, ProgramLauncher, install_programs
from trainium_devcluster.demos.frame import OPERATOR_NAMESPACE
from trainium_devcluster.demos.session import NAMESPACE, DemoSession, Name, Out, Outcome
from trainium_devcluster.program import ProgramDemo

if TYPE_CHECKING:
    from collections.abc import Callable

_COMPARED_FAULTS = ("killed rank", "lost node", "resize to 1", "resize to 2")
_LIMIT_SECONDS = 600.0
"""Seconds that a run of a program may take; the next program runs then."""


def compare(
    *,
    jobset: Annotated[str | None, typer.Option(help="Command that installs JobSet and runs its controller.")] = None,
    random_faults: Annotated[int, typer.Option(help="Inject so many random faults into the TrainingJob.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the random faults.")] = 1,
    only: Annotated[list[str] | None, typer.Option(help="Launchers: trainingjob, jobset, torchrun.")] = None,
    program: Annotated[list[str] | None, typer.Option(help=f"Run {', '.join(PROGRAMS)} or `all` instead.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the programs that report.json has without a problem.")
    ] = False,
    record: Annotated[bool, typer.Option("--document", help="Write the table of docs/program-runs.md.")] = False,
    out: Out = Path("out/program_recovery"),
    name: Name = None,
) -> None:
    """Compare the recovery of one script of TRL under several launchers."""
    names = only or ["trainingjob", *(["jobset"] if jobset else []), "torchrun"]
    run = partial(_run_random, count=random_faults, seed=seed) if random_faults else partial(_run_all, names=names)
    earlier = read_report(out / "report.json") if program and resume else {}
    kept = {key: cost for key, cost in earlier.items() if not cost.problem}
    if unknown := {*(program or ())} - {*PROGRAMS, "all"}:
        raise typer.BadParameter(f"there is no program {', '.join(sorted(unknown))}", param_hint="--program")
    if program:
        names = [key for key in (PROGRAMS if program == ["all"] else program) if key not in kept]
        run = partial(_run_programs, names=names, runs=kept)
    DemoSession("program-recovery", out, name, keep=False).show(lambda session: _compare(session, jobset, run, kept))
    if program and record:
        document.record(read_report(out / "report.json"))


def _compare(session: DemoSession, jobset: str | None, run: Callable[[ProgramDemo], Runs], kept: Runs) -> Outcome:
    write_report(session.out / "report.json", kept)
    with session.run_cluster() as cluster:
        demo = ProgramDemo(cluster, session.view, session.out)
        demo.install()
        install_script(demo)
        with run_jobset(demo, jobset):
            runs = run(demo)
    write_report(session.out / "report.json", runs)
    return Outcome([_build_table(list(runs.values()))], [f"report: {session.out / 'report.json'}"])


def _run_all(demo: ProgramDemo, names: list[str]) -> Runs:
    kinds: dict[str, type[Launcher]] = {
        "trainingjob": TrainingJobLauncher,
        "jobset": JobSetLauncher,
        "torchrun": TorchrunLauncher,
    }
    runs: Runs = {}
    reference = None
    for name in names:
        kind = kinds[name]
        # Both peers run the same script, so they share the undisturbed run.
        if reference is None or name == "trainingjob" or [*runs] == ["trainingjob"]:
            reference = FaultRun(demo, kind(demo, f"{name}-reference")).run_undisturbed()
        runs[name] = FaultRun(demo, kind(demo, name)).run_with_faults(reference, _COMPARED_FAULTS)
    return runs


def _run_programs(demo: ProgramDemo, names: list[str], runs: Runs) -> Runs:
    """Run each program undisturbed and through all faults; write the report after each one."""
    install_programs(demo)
    for name in names:
        runs[name] = _run_program(demo, name)
        demo.view.log(str(runs[name]))
        write_report(demo.out / "report.json", runs)
        # A container that was killed several times waits longer for each restart; that of a new pod does not.
        demo.cluster.kubectl("rollout", "restart", "deployment", "-n", OPERATOR_NAMESPACE)
        demo.cluster.kubectl("rollout", "status", "deployment", "-n", OPERATOR_NAMESPACE, "--timeout=90s", timeout=120)
    return runs


def _run_program(demo: ProgramDemo, name: str) -> RunCost:
    """Run a program undisturbed and through all faults; one that does not end has no faults in its costs."""
    program, started_at = PROGRAMS[name], time.monotonic()
    try:
        undisturbed = ProgramLauncher(demo, f"{name}-reference", program)
        reference = FaultRun(demo, undisturbed, _LIMIT_SECONDS).run_undisturbed()
        run = FaultRun(demo, ProgramLauncher(demo, name, program), _LIMIT_SECONDS)
        run.started_at = started_at
        return run.run_with_faults(reference, FAULTS if program.resizes else FAULTS[:-2])
    except Exception as error:  # noqa: BLE001 - the other programs still run
        demo.cluster.kubectl("delete", "trainingjobs", "--all", "-n", NAMESPACE, timeout=120)
        return RunCost.failed(program.title, f"{type(error).__name__}: {error}", time.monotonic() - started_at)


def _run_random(demo: ProgramDemo, count: int, seed: int) -> Runs:
    reference = FaultRun(demo, TrainingJobLauncher(demo, "reference")).run_undisturbed()
    run = FaultRun(demo, TrainingJobLauncher(demo, "random"))
    return {"random": run.run_with_random_faults(reference, count, seed)}


def _build_table(costs: list[RunCost]) -> Table:
    table = Table(title="One script of TRL, two nodes: seconds to the first new step (steps computed again)")
    table.add_column("")
    for cost in costs:
        table.add_column(cost.title, justify="right")
    longest = max((cost.faults for cost in costs), key=len, default=())
    for number, fault in enumerate(longest):
        cells = [_format_cell(cost.faults[number]) if number < len(cost.faults) else "not training" for cost in costs]
        table.add_row(fault.kind, *cells)
    rows: dict[str, Callable[[RunCost], Any]] = {
        "samples missing": lambda cost: cost.samples_missing,
        "samples used too often": lambda cost: cost.samples_repeated,
        "largest difference of the loss": lambda cost: f"{cost.loss_difference:.1e}",
        "completed": lambda cost: f"{'yes' if cost.completed else 'no'}, {cost.steps} steps",
    }
    for title, render in rows.items():
        table.add_row(title, *(str(render(cost)) for cost in costs))
    return table


def _format_cell(fault: FaultCost) -> str:
    if fault.first_new_step_seconds is None:
        return "never"
    deleted = "" if fault.node_deleted_after is None else f", node deleted after {fault.node_deleted_after:.0f} s"
    return f"{fault.first_new_step_seconds:.1f} s ({fault.steps_recomputed}){deleted}"


if __name__ == "__main__":
    typer.run(compare)
