"""The frame of a demo's command: a fresh folder, a cluster that ends with it, and how to look around."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from trainium_devcluster.cluster import Cluster, node_specs, system_node
from trainium_devcluster.demos.jobs import NAMESPACE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_devcluster.demos.view import View

REPOSITORY = Path(__file__).resolve().parents[3]
_NODES = 5
_PLAIN_WIDTH = 110
"""Columns where the output is a file or a pipe."""


def console() -> Console:
    """Where a demo is shown."""
    found = Console()
    return found if found.is_terminal else Console(width=_PLAIN_WIDTH)


def empty_folder(folder: Path) -> Path:
    """Return the folder of results, without those of an earlier run."""
    folder = folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


@contextmanager
def cluster(view: View, name: str | None, *, keep: bool) -> Iterator[Cluster]:
    """Run a cluster that ends with the block unless it is kept."""
    nodes = [*node_specs(_NODES, cpu="4", memory="8Gi"), system_node()]
    started = Cluster.start(name, nodes, detached=keep, write=view.log)
    try:
        view.log(f"{_NODES} nodes for workers and one for the operator are ready")
        yield started
    finally:
        if not keep:
            started.stop()


def usage_of(name: str) -> str:
    """Return the commands for a cluster that was kept."""
    return (
        f"\nThe cluster {name!r} is still up:\n"
        f"  eval $({REPOSITORY / '.venv/bin/trainium-devcluster'} env --name {name})\n"
        f"  kubectl get trainingjobs,pods -n {NAMESPACE}\n"
        f"  trainium-devcluster down --name {name}"
    )
