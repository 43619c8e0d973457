"""Run the same faults and resizes in turn under each launcher, and print what each cost.

`python -m benchmarks.program_recovery --jobset COMMAND`, in the environment of `make program`, on one control plane.
COMMAND installs JobSet's definition and runs its controller in the foreground, with KUBECONFIG set; without it JobSet
is left out.
A node that is lost stays silent. If nothing trains after `SILENT_SECONDS`, the benchmark deletes the Node object, as an
administrator or the cloud's controller does, and counts that time.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from benchmarks.program_recovery.launchers import (
    JobSetLauncher,
    Launcher,
    TorchrunLauncher,
    TrainingJobLauncher,
    install_script,
    running_jobset,
)
from benchmarks.program_recovery.programs import FAULTS, PROGRAMS, ProgramLauncher, install_programs
from trainium_devcluster.demos.ledger import Ledger, read_ledger
from trainium_devcluster.demos.session import DemoSession, Name, Out, Outcome
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.program import ProgramDemo

if TYPE_CHECKING:
    from collections.abc import Callable

SILENT_SECONDS = 60.0
"""Seconds after the loss of a node in which a peer may do nothing."""
_COMPARED_FAULTS = ("killed rank", "lost node", "resize to 1", "resize to 2")
_STEPS_BETWEEN = 10
_WAIT_SECONDS = 150.0
_REJOIN_SECONDS = 60.0
"""Seconds that a launcher has to use all nodes again before the next resize."""


@dataclass(frozen=True, slots=True)
class FaultCost:
    """Cost of a fault or a resize."""

    kind: str
    first_new_step_seconds: float | None
    """None if no new step came within the limit."""
    steps_recomputed: int
    node_deleted_after: float | None = None
    """Seconds after which the benchmark deleted the Node object."""


@dataclass(frozen=True, slots=True)
class RunCost:
    """Cost of all faults of a run."""

    title: str
    faults: tuple[FaultCost, ...]
    completed: bool
    steps: int
    samples_missing: int
    samples_repeated: int
    loss_difference: float
    """Largest relative difference from the undisturbed run of the same script."""
    uses: tuple[int, ...]
    """Number of uses of each sample in the undisturbed run; one number if all are equal."""
    load: float
    """Load of the machine at the end, over 5 minutes."""


class Recovery:
    """Runs one launcher through the faults."""

    def __init__(self, demo: ProgramDemo, launcher: Launcher) -> None:
        self.demo = demo
        self.launcher = launcher
        self.faults: list[FaultCost] = []

    @property
    def ledger(self) -> Ledger:
        """The ledger as it is now."""
        return read_ledger(self.launcher.folder)

    def wait(self, is_done: Callable[[Ledger], bool], seconds: float = _WAIT_SECONDS) -> bool:
        """Wait for a condition of the ledger; return whether it holds."""
        deadline = time.monotonic() + seconds
        while not is_done(self.ledger):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True

    def wait_for_step(self, step: int) -> None:
        """Wait for a step; raises ClusterError if it does not come."""
        if not self.wait(lambda ledger: ledger.newest_step >= step):
            raise ClusterError(f"{self.launcher.title} did not reach step {step}.")

    def wait_for_ranks(self, ranks: int) -> None:
        """Wait until the newest start has so many ranks, for a limited time."""
        self.wait(lambda ledger: ledger.newest_ranks == ranks, _REJOIN_SECONDS)

    def run_undisturbed(self) -> Ledger:
        """Run without faults; return the ledger."""
        self.launcher.start(2)
        self.wait_for_step(1)
        if not self.wait(lambda ledger: ledger.ended):
            raise ClusterError(f"{self.launcher.title} did not end without faults.")
        self.launcher.stop()
        return self.ledger

    def run_with_faults(self, reference: Ledger, kinds: tuple[str, ...]) -> RunCost:
        """Run with faults and resizes in the second epoch."""
        self.launcher.start(2)
        with contextlib.suppress(ClusterError):  # a launcher may train no more
            self.wait_for_step(self.launcher.first_fault)
            for kind in kinds:
                self.inject(kind)
                self.wait_for_step(self.ledger.newest_step + _STEPS_BETWEEN)
        return self.finish(reference)

    def run_with_random_faults(self, reference: Ledger, count: int, seed: int) -> RunCost:
        """Run with random faults from the first step on; the order is a function of the seed."""
        launcher, chance = self.launcher, random.Random(seed)
        launcher.start(2)
        size = 2
        for _ in range(count):
            self.wait_for_step(self.ledger.newest_step + _STEPS_BETWEEN)
            kind = chance.choice(["killed rank", "stopped rank", "lost node", "killed operator", "resize"])
            if kind == "resize":
                size = 3 - size
                self.measure(f"resize to {size}", partial(launcher.resize, size))
            elif kind == "killed operator":
                with contextlib.suppress(ClusterError):  # its node still waits to restart it
                    launcher.kill_operator()
                self.measure("killed rank and operator", launcher.kill_rank)
            else:
                self.inject(kind)
        return self.finish(reference)

    def inject(self, kind: str) -> None:
        """Inject a fault or resize, and measure it."""
        launcher = self.launcher
        if kind == "lost node":
            self.lose_node()
        elif kind == "killed operator":
            self.kill_operator()
        elif kind.startswith("resize"):
            size = int(kind.removeprefix("resize to "))
            self.wait_for_ranks(3 - size)
            self.measure(kind, partial(launcher.resize, size))
        else:
            number = signal.SIGKILL if kind == "killed rank" else signal.SIGSTOP
            self.measure(kind, partial(launcher.kill_rank, number))

    def kill_operator(self) -> None:
        """Kill the operator, and wait until a new one writes the status; training goes on."""
        moment = time.time()
        self.launcher.kill_operator()
        self.wait(lambda ledger: ledger.first_step_after(moment) is not None)
        ledger, step = self.ledger, self.ledger.newest_step
        ended = ledger.first_step_after(moment)
        seconds = None if ended is None else ended - moment
        self.wait(lambda _: self.launcher.read_step() > step)
        self.add(FaultCost("killed operator", seconds, self.ledger.count_recomputed(moment)))

    def finish(self, reference: Ledger) -> RunCost:
        """Wait for the end of the training; return what all faults cost."""
        completed = self.wait(lambda ledger: ledger.ended)
        ledger = self.ledger
        missing, repeated = ledger.count_wrong_samples(reference)
        self.launcher.stop()
        return RunCost(
            title=self.launcher.title,
            faults=tuple(self.faults),
            completed=completed,
            steps=ledger.newest_step,
            samples_missing=missing,
            samples_repeated=repeated,
            loss_difference=ledger.max_loss_difference(reference),
            uses=tuple(sorted(set(reference.count_uses().values()))),
            load=os.getloadavg()[1],
        )

    def measure(self, kind: str, inject: Callable[[], object]) -> None:
        """Inject a fault, and wait for the first new step; a resize counts from its request."""
        moment = time.time()
        inject()
        self.record(kind, moment, moment if "resize" in kind else time.time())

    def lose_node(self) -> None:
        """Power a node off; delete its Node object if nothing trains; power it on again."""
        moment = time.time()
        node = self.launcher.power_off_node()
        lost_at = time.time()
        deleted_after = None
        if not self.wait(lambda ledger: ledger.first_new_step_at(moment) is not None, SILENT_SECONDS):
            self.demo.cluster.kubectl("delete", "node", node)
            deleted_after = time.time() - lost_at
        self.record("lost node", moment, lost_at, deleted_after)
        self.demo.cluster.faults.start_node(node)

    def record(self, kind: str, moment: float, counted_from: float, deleted_after: float | None = None) -> None:
        """Wait for the first new step of a start after `moment`, and record the cost."""
        self.wait(lambda ledger: ledger.first_new_step_at(moment) is not None)
        ledger = self.ledger
        ended = ledger.first_new_step_at(moment)
        seconds = None if ended is None else ended - counted_from
        self.add(FaultCost(kind, seconds, ledger.count_recomputed(moment), deleted_after))

    def add(self, cost: FaultCost) -> None:
        """Add the cost of a fault, and log it."""
        self.faults.append(cost)
        self.demo.view.log(f"{self.launcher.title}: {cost}")


def compare(
    *,
    jobset: Annotated[str | None, typer.Option(help="Command that installs JobSet and runs its controller.")] = None,
    random_faults: Annotated[int, typer.Option(help="Inject so many random faults into the TrainingJob.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the random faults.")] = 1,
    only: Annotated[list[str] | None, typer.Option(help="Launchers: trainingjob, jobset, torchrun.")] = None,
    program: Annotated[list[str] | None, typer.Option(help=f"Run {', '.join(PROGRAMS)} or `all` instead.")] = None,
    out: Out = Path("out/program_recovery"),
    name: Name = None,
) -> None:
    """Compare the recovery of one script of TRL under several launchers."""
    names = only or ["trainingjob", *(["jobset"] if jobset else []), "torchrun"]
    run = partial(_run_random, count=random_faults, seed=seed) if random_faults else partial(_run_all, names=names)
    if program:
        run = partial(_run_programs, names=list(PROGRAMS) if program == ["all"] else program)
    DemoSession("program-recovery", out, name, keep=False).show(lambda session: _compare(session, jobset, run))


def _compare(session: DemoSession, jobset: str | None, run: Callable[[ProgramDemo], list[RunCost]]) -> Outcome:
    with session.cluster() as cluster:
        demo = ProgramDemo(cluster, session.view, session.out)
        demo.install()
        install_script(demo)
        with running_jobset(demo, jobset):
            costs = run(demo)
    write_report(session.out, costs)
    return Outcome([_table(costs)], [f"report: {session.out / 'report.json'}"])


def write_report(folder: Path, costs: list[RunCost]) -> None:
    """Write report.json."""
    report = {"benchmark": "program_recovery", "runs": [asdict(cost) for cost in costs]}
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")


def _run_all(demo: ProgramDemo, names: list[str]) -> list[RunCost]:
    kinds: dict[str, type[Launcher]] = {
        "trainingjob": TrainingJobLauncher,
        "jobset": JobSetLauncher,
        "torchrun": TorchrunLauncher,
    }
    costs: list[RunCost] = []
    reference = None
    for name in names:
        kind = kinds[name]
        # Both peers run the same script, so they share the undisturbed run.
        if reference is None or name == "trainingjob" or costs[-1].title == TrainingJobLauncher.title:
            reference = Recovery(demo, kind(demo, f"{name}-reference")).run_undisturbed()
        costs.append(Recovery(demo, kind(demo, name)).run_with_faults(reference, _COMPARED_FAULTS))
    return costs


def _run_programs(demo: ProgramDemo, names: list[str]) -> list[RunCost]:
    """Run each program undisturbed and through all faults; one that does not start is left out."""
    install_programs(demo)
    costs = []
    for name in names:
        program = PROGRAMS[name]
        try:
            reference = Recovery(demo, ProgramLauncher(demo, f"{name}-reference", program)).run_undisturbed()
            recovery = Recovery(demo, ProgramLauncher(demo, name, program))
            costs.append(recovery.run_with_faults(reference, FAULTS if program.resizes else FAULTS[:-2]))
        except ClusterError as error:
            demo.view.log(str(error))
        demo.view.log(str(costs[-1:]))
        write_report(demo.out, costs)
    return costs


def _run_random(demo: ProgramDemo, count: int, seed: int) -> list[RunCost]:
    reference = Recovery(demo, TrainingJobLauncher(demo, "reference")).run_undisturbed()
    return [Recovery(demo, TrainingJobLauncher(demo, "random")).run_with_random_faults(reference, count, seed)]


def _table(costs: list[RunCost]) -> Table:
    table = Table(title="One script of TRL, two nodes: seconds to the first new step (steps computed again)")
    table.add_column("")
    for cost in costs:
        table.add_column(cost.title, justify="right")
    for number, fault in enumerate(costs[0].faults):
        cells = [_cell(cost.faults[number]) if number < len(cost.faults) else "not training" for cost in costs]
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


def _cell(fault: FaultCost) -> str:
    if fault.first_new_step_seconds is None:
        return "never"
    deleted = "" if fault.node_deleted_after is None else f", node deleted after {fault.node_deleted_after:.0f} s"
    return f"{fault.first_new_step_seconds:.1f} s ({fault.steps_recomputed}){deleted}"


if __name__ == "__main__":
    typer.run(compare)
