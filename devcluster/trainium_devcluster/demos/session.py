"""Run the command of a demo: an empty folder, a cluster for its duration, the outcome on the terminal."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from trainium_contract.api_server.errors import ClientError
from trainium_devcluster.cluster import Cluster, create_node_specs, create_system_node
from trainium_devcluster.demos.view import View
from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[3]
NAMESPACE = "training"
_NODES = 5
_PLAIN_WIDTH = 110
"""Columns if the output is a file or a pipe."""


Keep = Annotated[bool, typer.Option("--keep", help="Keep the cluster and print how to use it.")]
Out = Annotated[Path, typer.Option("--out", help="Folder of the report, the picture and the run's files.")]
Name = Annotated[str | None, typer.Option("--name", help="Name of the cluster; by default a free one.")]


@dataclass(slots=True)
class Outcome:
    """Result of a demo, for the terminal and for report.json."""

    tables: list[Table] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Deviations from the expected result, in sentences."""
    report: dict[str, Any] = field(default_factory=dict)

    def expect(self, problem: str, holds: bool) -> None:
        """Add the sentence of a problem unless the expectation holds."""
        if not holds:
            self.problems.append(problem)


class DemoSession:
    """A run of a demo: its view, its folder of results, and its cluster."""

    def __init__(self, title: str, out: Path, name: str | None, *, keep: bool) -> None:
        console = Console()
        self.console = console if console.is_terminal else Console(width=_PLAIN_WIDTH)
        self.view = View(self.console)
        self.title = title
        self.out = out.absolute()
        self._name = name or (title if keep else None)
        self._keep = keep

    def show(self, work: Callable[[DemoSession], Outcome]) -> None:
        """Run the demo in an empty folder and print its outcome; raises typer.Exit on a deviation."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir(parents=True)
        try:
            with self.view:
                outcome = work(self)
        except (ClientError, ClusterError) as error:
            self.console.print(f"{self.title}: {error}", style="red", markup=False)
            self.console.print(f"`make {self.title} ARGS=--keep` leaves the cluster up.", markup=False)
            raise typer.Exit(1) from None
        if outcome.report:
            (self.out / "report.json").write_text(json.dumps(outcome.report, indent=1) + "\n")
            outcome.lines.append(f"report: {self.out / 'report.json'}")
        for table in outcome.tables:
            self.console.print(table)
        self.console.print("\n".join(outcome.lines), highlight=False, soft_wrap=True)
        if self._keep:
            self.console.print(_format_usage(str(self._name)), highlight=False, soft_wrap=True)
        for problem in outcome.problems:
            self.console.print(problem, style="red", markup=False)
        if outcome.problems:
            raise typer.Exit(1)

    @contextmanager
    def run_cluster(self) -> Iterator[Cluster]:
        """Run a cluster, and stop it at the end of the block unless it is kept."""
        nodes = [*create_node_specs(_NODES, cpu="4", memory="8Gi"), create_system_node()]
        started = Cluster.start(self._name, nodes, detached=self._keep, report=self.view.log)
        try:
            self.view.log(f"{_NODES} nodes for workers and one for the operator are ready")
            self.view.log(f"to watch it from another terminal: {_format_watch(started.name)}")
            yield started
        finally:
            if not self._keep:
                started.stop()


def _format_watch(name: str) -> str:
    """Return the command that lists the jobs of a demo's cluster."""
    programs = Path(sys.executable).parent
    return f"eval $({programs}/trainium-devcluster env --name {name}); {programs}/kubectl-trn list -n {NAMESPACE}"


def _format_usage(name: str) -> str:
    """Return the commands for a cluster that was kept."""
    return (
        f"\nThe cluster {name!r} is still up:\n"
        f"  eval $({REPOSITORY / '.venv/bin/trainium-devcluster'} env --name {name})\n"
        f"  kubectl get trainingjobs,pods -n {NAMESPACE}\n"
        f"  trainium-devcluster down --name {name}"
    )
