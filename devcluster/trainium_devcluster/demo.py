"""Train a model through faults on a development cluster, and compare it with an undisturbed run (`make demo`)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import typer

from trainium_devcluster.demos.frame import Demo, DemoJob, run_demo
from trainium_devcluster.demos.session import REPOSITORY, DemoSession, Keep, Name, Out


class PretrainDemo(Demo):
    """A demo that trains a model from random weights."""

    picture_title = "Same loss curve, whatever fails"

    def create_manifest(self, name: str) -> dict[str, Any]:
        """Read the example job."""
        return self.read_job(REPOSITORY / "manifests" / "examples" / "demo.yaml", name)

    def inject_faults(self, run: DemoJob) -> None:
        """Kill a process, power a node off, and resize the job twice."""
        self.inject_at_shares(
            run,
            {
                0.1: self.kill_process,
                0.2: self.lose_node_and_wait_for_spare,
                0.6: partial(self.resize, size=3),
                0.8: partial(self.resize, size=4),
            },
        )


def demo(*, keep: Keep = False, out: Out = Path("out/demo"), name: Name = None) -> None:
    """Train a Llama model on a real control plane, through real faults, and compare it with an undisturbed run."""
    DemoSession("demo", out, name, keep=keep).show(lambda session: run_demo(session, PretrainDemo))


if __name__ == "__main__":
    typer.run(demo)
