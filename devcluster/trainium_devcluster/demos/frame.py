"""Run a demo: a job through faults, the same job without them, and what the faults cost.

Guarantees:
- Each fault waits until the job has recovered from the previous one.
- A wait that times out ends the demo with the state of the job.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import yaml

from trainium_contract.pages.facts import format_goodput
from trainium_contract.pages.formatting import format_duration
from trainium_contract.views.goodput import GoodputView, build_goodput_view
from trainium_contract.views.status_reader import read_public_status
from trainium_devcluster.cluster import create_system_values
from trainium_devcluster.demos.curves import Curves, Fault, draw_curves, format_fault_table
from trainium_devcluster.demos.session import NAMESPACE, REPOSITORY, DemoSession, Outcome
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.jobs import recovery
from trainium_devcluster.jobs.driver import JobDriver
from trainium_devcluster.jobs.metrics import has_every_sample_once

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from trainium_devcluster.cluster import Cluster
    from trainium_devcluster.demos.view import View

OPERATOR_NAMESPACE = "trainium-system"
RELEASE = "trainium-operator"
WAIT_SECONDS = 120.0


class DemoJob(JobDriver):
    """A job of a demo, which is shown during each wait; a job that fails ends the demo."""

    def __init__(self, cluster: Cluster, name: str, folder: Path, view: View, trainer: Mapping[str, Any]) -> None:
        """`trainer` is `spec.trainer` of the job, or its steps, epochs and batch for a program."""
        super().__init__(cluster, NAMESPACE, name, folder)
        self._view = view
        self.trainer = trainer
        self.current: dict[str, Any] = {}
        """Newest status that was read."""

    def observe(self) -> None:
        """Show the job; raises ClusterError if it failed."""
        super().observe()
        job = self.read_object()
        self.current = job.get("status") or {}
        self._view.show(job)
        if self.current.get("phase") == "Failed":
            raise ClusterError(f"The job {self.name} failed: {self.current.get('verdict')}")

    @property
    def steps(self) -> int:
        """Steps of the whole run; if the job counts epochs, 0 until it has started."""
        if self.trainer.get("epochs"):
            return int((self.current.get("progress") or {}).get("totalSteps", 0))
        return int(self.trainer["steps"])

    @property
    def goodput(self) -> GoodputView:
        """The ledger of the job."""
        return build_goodput_view(read_public_status({"status": self.current}), time.time())

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return int(self.trainer["batch"]["globalSize"])


class Demo(ABC):
    """A demo on a running cluster."""

    samples_sentence = "every sample seen once"
    picture_title = ""
    """Title of the picture of both curves; empty for none."""
    reference_trainer: Mapping[str, Any] = {}
    """Fields of `spec.trainer` that the undisturbed run changes."""

    def __init__(self, cluster: Cluster, view: View, out: Path) -> None:
        self.cluster = cluster
        self.view = view
        self.out = out
        self.faults: list[Fault] = []

    @abstractmethod
    def create_manifest(self, name: str) -> dict[str, Any]:
        """Return the TrainingJob of the demo under a name."""

    @abstractmethod
    def inject_faults(self, run: DemoJob) -> None:
        """Inject all faults into the job, which has done its first step."""

    def check_samples(self, run: DemoJob, reference: DemoJob) -> bool:  # noqa: ARG002 - other demos compare
        """Return whether the run with faults used the right samples."""
        return has_every_sample_once(run.folder, run.steps, run.global_batch)

    def conclude(self, run: DemoJob, curves: Curves, outcome: Outcome) -> None:  # noqa: B027 - most have nothing to add
        """Add what this demo shows of the run besides its curve."""

    # --- setup ------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Install the operator with helm."""
        started = time.monotonic()
        self.cluster.kubectl("create", "namespace", NAMESPACE)
        chart = str(REPOSITORY / "helm" / "trainium-operator")
        values = self.out / "operator.yaml"
        values.write_text(yaml.safe_dump({"statusIntervalSeconds": 1, **create_system_values()}))
        namespace = (f"--namespace={OPERATOR_NAMESPACE}", "--create-namespace")
        self.cluster.helm("install", RELEASE, chart, *namespace, f"--values={values}", "--wait", "--timeout=90s")
        self.view.log(f"helm install {RELEASE}: the operator is ready ({time.monotonic() - started:.1f} s)")

    def read_job(self, file: Path, name: str) -> dict[str, Any]:
        """Read a TrainingJob from a file, and set its name and its checkpoint folder."""
        job: dict[str, Any] = yaml.safe_load(file.read_text())
        job["metadata"] |= {"name": name, "namespace": NAMESPACE}
        job["spec"]["checkpoint"]["storage"] = {"hostPath": {"path": str(self.out / "checkpoints")}, "subPath": name}
        return job

    def create_trainer_settings(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `spec.trainer` of the job."""
        trainer: Mapping[str, Any] = job["spec"]["trainer"]
        return trainer

    def apply(self, job: Mapping[str, Any]) -> DemoJob:
        """Apply a job."""
        name = job["metadata"]["name"]
        run = DemoJob(self.cluster, name, self.out / "checkpoints" / name, self.view, self.create_trainer_settings(job))
        (self.out / f"{name}.yaml").write_text(yaml.safe_dump(job, sort_keys=False))
        run.apply_manifest(job)
        self.view.log(f"kubectl apply -f {name}.yaml")
        return run

    def run_with_faults(self, name: str) -> DemoJob:
        """Run the job with all faults."""
        run = self.apply(self.create_manifest(name))
        run.wait_for_step(1, WAIT_SECONDS * 2)
        run.wait_for("the number of steps", lambda: run.steps > 0)
        self.view.log(f"the first step is done, of {run.steps}")
        self.inject_faults(run)
        run.wait_for_phase("Completed", WAIT_SECONDS * 2)
        run.log.refresh()
        self.view.log("the job is complete")
        return run

    def run_undisturbed(self) -> DemoJob:
        """Run the same training without faults."""
        job = self.create_manifest("reference")
        job["spec"]["workers"] |= {"spares": 0, "minReplicas": job["spec"]["workers"]["replicas"]}
        if self.reference_trainer:
            job["spec"]["trainer"] |= self.reference_trainer
        run = self.apply(job)
        run.wait_for_phase("Completed", WAIT_SECONDS * 3)
        run.log.refresh()
        self.view.log("the undisturbed run is complete")
        return run

    # --- faults -----------------------------------------------------------------------------------------------

    def inject_at_shares(self, run: DemoJob, faults: Mapping[float, Callable[[DemoJob], None]]) -> None:
        """Inject each fault when the job has done this share of its steps."""
        for share, inject in faults.items():
            run.wait_for_step(round(run.steps * share))
            inject(run)

    def inject_in_turn(self, run: DemoJob, steps_between: int, *faults: Callable[[DemoJob], None]) -> None:
        """Inject faults one after the other, each followed by this number of steps."""
        for inject in faults:
            inject(run)
            run.wait_for_step(run.read_newest_step() + steps_between)

    def kill_process(self, run: DemoJob) -> None:
        """Send SIGKILL to one training process; its pod and all others remain."""
        member = run.list_members()[1]
        pod = member["podName"]
        self.view.log(f"fault: SIGKILL of the training process in {pod} (rank {member['nodeRank']})")
        self._measure(run, "killed process", lambda: run.signal_rank(pod))

    def lose_node(self, run: DemoJob) -> None:
        """Power off the node of the last rank, and on again after the recovery."""
        member = run.list_members()[-1]
        node: str = member["nodeName"]
        self.view.log(f"fault: power loss of {node} with {member['podName']} (rank {member['nodeRank']})")
        self._measure(run, "lost node", lambda: self.cluster.faults.kill_node(node))
        self.cluster.faults.start_node(node)
        self.view.log(f"{node} is powered on again; the operator refills the spare")

    def lose_node_and_wait_for_spare(self, run: DemoJob) -> None:
        """Lose a node, and wait until there is a warm spare again."""
        self.lose_node(run)
        run.wait_until("a new warm spare", lambda status: status.get("spares", 0) >= 1)

    def resize(self, run: DemoJob, size: int) -> None:
        """Scale the job to `size` nodes with `kubectl scale`."""
        self.view.log(f"kubectl scale trainingjob {run.name} --replicas={size}")
        self._measure(run, f"resize {run.read_size()} to {size}", lambda: run.scale(size))

    def _measure(self, run: DemoJob, kind: str, action: Callable[[], object]) -> None:
        cost = recovery.follow(run, recovery.inject(run, action), WAIT_SECONDS)
        entry = cost.entries[-1]
        resumed_at, ended_at = run.log.step_time(cost.last_step + 1), run.log.first_times.get(cost.last_step)
        fault = Fault(
            kind=kind,
            step=cost.last_step,
            detected_seconds=entry.get("detectedSeconds"),
            recovered_seconds=cost.recovery_seconds,
            pause_seconds=None if resumed_at is None or ended_at is None else resumed_at - ended_at,
            steps_lost=cost.steps_lost,
            pods_replaced=cost.pods_joined,
        )
        self.faults.append(fault)
        self.view.log(
            f"{kind}: {entry['response']}, first new step after {fault.recovered_seconds or 0:.2f} s, "
            f"{fault.steps_lost} steps lost, {fault.pods_replaced} pods replaced"
        )


def run_demo(
    session: DemoSession,
    create: Callable[[Cluster, View, Path], Demo],
    prepare: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run a demo on a cluster of the session, after `prepare`; write its report and its picture."""
    started = time.monotonic()
    prepare()
    with session.run_cluster() as cluster:
        demo = create(cluster, session.view, session.out)
        demo.install()
        run = demo.run_with_faults(session.title)
        reference = demo.run_undisturbed()
    seconds = time.monotonic() - started
    entries = run.current.get("history") or []
    unplanned = tuple(entry["stepBefore"] for entry in entries if entry["response"] in ("Grow", "Shrink"))
    curves = Curves(run.steps, run.log.list_losses(), reference.log.list_losses(), tuple(demo.faults), unplanned)
    has_right_samples = demo.check_samples(run, reference)
    outcome = Outcome()
    outcome.tables.append(format_fault_table(curves.faults))
    losses = f"{curves.loss[curves.steps]:.6f} with faults, {curves.reference[curves.steps]:.6f} undisturbed"
    before = ", none before the first resize" if curves.is_identical_before_resize else ""
    outcome.lines += [
        f"loss after {curves.steps} steps: {losses}; largest relative difference {curves.max_difference:.1e}{before}",
        f"{demo.samples_sentence}: {'yes' if has_right_samples else 'NO'}",
        f"goodput of the run with {len(curves.faults)} faults: {format_goodput(run.goodput)}",
        f"both runs and the installation took {format_duration(seconds)}",
    ]
    outcome.expect("The curve with faults is not the undisturbed one.", curves.is_identical)
    outcome.expect(f"This does not hold: {demo.samples_sentence}.", has_right_samples)
    outcome.report |= {"completed": True, **curves.to_json(), "everySampleSeenOnce": has_right_samples}
    outcome.report |= {"goodput": run.goodput.ratio, "wallSeconds": run.goodput.wall_seconds}
    outcome.report |= {"seconds": round(seconds, 1), "history": entries}
    if demo.picture_title:
        draw_curves(curves, session.out / "loss.png", demo.picture_title)
        outcome.lines.append(f"picture: {session.out / 'loss.png'}")
    demo.conclude(run, curves, outcome)
    return outcome
