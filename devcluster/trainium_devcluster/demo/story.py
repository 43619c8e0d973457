"""What the demo does, in order: install, apply, disturb, finish, repeat undisturbed, compare."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from trainium_devcluster.demo.report import DemoResult
from trainium_devcluster.story.curves import Curves
from trainium_devcluster.story.jobs import WAIT_SECONDS, Story
from trainium_devcluster.story.metrics import every_sample_once

if TYPE_CHECKING:
    from trainium_devcluster.story.jobs import Run


class DemoStory(Story):
    """A model trained from random weights."""

    def manifest(self, name: str) -> dict[str, Any]:
        """The example job."""
        return self.job_of(self.repository / "manifests" / "examples" / "demo.yaml", name)

    def disturbed(self) -> tuple[Run, dict[str, Any]]:
        """The run with all faults; returns it with its last status."""
        with self.run(self.manifest("demo")) as run:
            self.until(run, "the first step", lambda: run.log.newest >= 1, seconds=WAIT_SECONDS * 2)
            self.view.say("the first step is done")
            at = [round(run.steps * share) for share in (0.1, 0.2, 0.6, 0.8)]
            self.kill_then_lose(run, at[0], at[1])
            self.until_step(run, at[2])
            self.resize(run, 3)
            self.until_step(run, at[3])
            self.resize(run, 4)
            self.until(run, "the end", lambda: run.finished)
            run.log.refresh()
            self.view.say("the job is complete")
            return run, run.watch.status

    def reference(self) -> Run:
        """The same job, left alone."""
        job = self.manifest("reference")
        job["spec"]["workers"] |= {"spares": 0, "minReplicas": 4}
        with self.run(job) as run:
            self.until(run, "the end", lambda: run.finished, seconds=WAIT_SECONDS * 2)
            run.log.refresh()
            self.view.say("the undisturbed run is complete")
            return run

    def tell(self) -> DemoResult:
        """Run everything and compare."""
        started = time.monotonic()
        self.install()
        run, status = self.disturbed()
        reference = self.reference()
        return DemoResult(
            completed=status.get("phase") == "Completed" and run.log.newest == run.steps,
            curves=Curves(run.steps, run.log.losses(), reference.log.losses(), tuple(self.faults)),
            every_sample_once=every_sample_once(run.folder, run.steps, run.global_batch),
            goodput=(status.get("goodput") or {}).get("ratio", 0.0),
            seconds=time.monotonic() - started,
        )
