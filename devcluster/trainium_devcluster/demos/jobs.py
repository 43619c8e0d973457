"""TrainingJobs of a demo: installed, applied, followed and disturbed, one disturbance after the other.

Invariants: each disturbance waits until the one before is over; a wait that is not fulfilled ends the demo with a
message that names what was waited for and where to look.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from trainium_contract.wire.recorded_membership import members_of
from trainium_devcluster.cluster import system_values
from trainium_devcluster.demos.curves import Fault
from trainium_devcluster.demos.metrics import StepLog
from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from trainium_devcluster.cluster import Cluster
    from trainium_devcluster.demos.view import View

NAMESPACE = "training"
OPERATOR_NAMESPACE = "trainium-system"
RELEASE = "trainium-operator"
WAIT_SECONDS = 120.0
_POLL_SECONDS = 0.1
_JOBS = f"/apis/trainium.dev/v1alpha1/namespaces/{NAMESPACE}/trainingjobs"


@dataclass
class Run:
    """One TrainingJob of a demo, seen through the API server and through its files."""

    name: str
    folder: Path
    """Its checkpoints."""
    trainer: Mapping[str, Any]
    """Its `spec.trainer`; of a program `steps` alone."""
    log: StepLog
    status: dict[str, Any] = field(default_factory=dict)
    """Newest status that was read; empty before the operator has written one."""

    @property
    def steps(self) -> int:
        """Steps of the whole run; of one that counts epochs they are known once it has started, and 0 before."""
        if self.trainer.get("epochs"):
            return int((self.status.get("progress") or {}).get("totalSteps", 0))
        return int(self.trainer["steps"])

    def history(self) -> list[dict[str, Any]]:
        """Return the interruptions, oldest first."""
        return list(self.status.get("history") or [])

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return int(self.trainer["batch"]["globalSize"])

    @property
    def finished(self) -> bool:
        """Whether the job reached a terminal phase."""
        return self.status.get("phase") in {"Completed", "Failed"}


class Demo(ABC):
    """A demo on one running cluster."""

    command = "make demo"
    """Command that shows it again."""

    def __init__(self, cluster: Cluster, view: View, repository: Path, out: Path) -> None:
        self.cluster = cluster
        self.view = view
        self.repository = repository
        self.out = out
        self.faults: list[Fault] = []

    @abstractmethod
    def create_manifest(self, name: str) -> dict[str, Any]:
        """Return the TrainingJob of the demo under a name."""

    def run_undisturbed(self, workers: int, seconds: float, **trainer: Any) -> Run:
        """Run the same training without faults, with other fields of its `spec.trainer`."""
        job = self.create_manifest("reference")
        job["spec"]["workers"] |= {"spares": 0, "minReplicas": workers}
        if trainer:
            job["spec"]["trainer"] |= trainer
        run = self.run(job)
        self.until(run, "the end", lambda: run.finished, seconds=seconds)
        run.log.refresh()
        self.view.log("the undisturbed run is complete")
        return run

    # --- set-up --------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Install the operator with helm, as a platform engineer does."""
        started = time.monotonic()
        self.cluster.kubectl("create", "namespace", NAMESPACE)
        chart = str(self.repository / "helm" / "trainium-operator")
        values = self.out / "operator.yaml"
        values.write_text(yaml.safe_dump({"statusIntervalSeconds": 1, **system_values()}))
        namespace = (f"--namespace={OPERATOR_NAMESPACE}", "--create-namespace")
        self.cluster.helm("install", RELEASE, chart, *namespace, f"--values={values}", "--wait", "--timeout=90s")
        self.view.log(f"helm install {RELEASE}: the operator is ready ({time.monotonic() - started:.1f} s)")

    def read_job(self, file: Path, name: str) -> dict[str, Any]:
        """Read the TrainingJob of a file, with this name and its checkpoints in the folder of the demo."""
        job: dict[str, Any] = yaml.safe_load(file.read_text())
        job["metadata"] |= {"name": name, "namespace": NAMESPACE}
        job["spec"]["checkpoint"]["storage"] = {"hostPath": {"path": str(self.out / "checkpoints")}, "subPath": name}
        return job

    def run(self, job: Mapping[str, Any]) -> Run:
        """Apply a job."""
        name = job["metadata"]["name"]
        path = self.out / f"{name}.yaml"
        path.write_text(yaml.safe_dump(job, sort_keys=False))
        self.cluster.kubectl("apply", "-f", str(path))
        self.view.log(f"kubectl apply -f {path.name}")
        folder = self.out / "checkpoints" / name
        return Run(name, folder, self.trainer_of(job), StepLog(folder / "metrics.jsonl"))

    def trainer_of(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what the job trains."""
        trainer: Mapping[str, Any] = job["spec"]["trainer"]
        return trainer

    def until(self, run: Run, what: str, condition: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
        """Show the job until `condition` holds; raises ClusterError when the job fails or the time is over."""
        deadline = time.monotonic() + seconds
        while True:
            run.log.refresh()
            found = self.cluster.api.get(f"{_JOBS}/{run.name}")
            run.status = found.get("status") or {}
            newest = run.log.steps.get(run.log.newest, {})
            self.view.show(f"TrainingJob {NAMESPACE}/{run.name}", run.status, newest, run.steps)
            if condition():
                return
            if run.status.get("phase") == "Failed":
                raise ClusterError(f"The job {run.name} failed: {run.status.get('verdict')}")
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"Job {run.name} did not reach {what} within {seconds:.0f} s; see `trainium-devcluster run` or "
                    f"`kubectl describe trainingjob -n {NAMESPACE} {run.name}` with `{self.command} ARGS=--keep`."
                )
            time.sleep(_POLL_SECONDS)

    def until_step(self, run: Run, step: int) -> None:
        """Wait until `step` has been completed."""
        self.until(run, f"step {step}", lambda: run.log.newest >= step)

    # --- disturbances --------------------------------------------------------------------------------------------

    def members(self, run: Run) -> list[dict[str, Any]]:
        """Return the current members by node rank."""
        return members_of(self.cluster.api.get(f"/api/v1/namespaces/{NAMESPACE}/configmaps/{run.name}-membership"))

    def kill_process(self, run: Run) -> None:
        """SIGKILL one training process; its pod and all others stay."""
        member = self.members(run)[1]
        pod = member["podName"]
        pid = self.find_process(pod)
        self.view.log(f"fault: SIGKILL of the training process in {pod} (rank {member['nodeRank']})")
        self._measure(run, "killed process", lambda: self.inside(pod, "sh", "-c", f"kill -9 {pid}"))

    def find_process(self, pod: str) -> int:
        """Return the pid of the training process in the worker."""
        return int(json.loads(self.inside(pod, "python", "-m", "trainium_agent.show_ranks").splitlines()[0])["pid"])

    def inside(self, pod: str, *command: str) -> str:
        """Run a command in the worker; return its output."""
        return self.cluster.kubectl("exec", pod, "-n", NAMESPACE, "-c", "worker", "--", *command)

    def power_off_node(self, run: Run) -> str:
        """Power loss of the node that holds the last rank; returns its name."""
        member = self.members(run)[-1]
        node: str = member["nodeName"]
        self.view.log(f"fault: power loss of {node} with {member['podName']} (rank {member['nodeRank']})")
        self._measure(run, "lost node", lambda: self.cluster.faults.kill_node(node))
        return node

    def kill_process_and_node(self, run: Run, first: int, second: int) -> None:
        """Kill a process at one step, and power a node off at a later one; return when a spare is ready again."""
        self.until_step(run, first)
        self.kill_process(run)
        self.until_step(run, second)
        node = self.power_off_node(run)
        self.cluster.faults.start_node(node)
        self.view.log(f"{node} is powered on again; the operator refills the spare")
        self.until(run, "a new warm spare", lambda: run.status.get("spares", 0) >= 1)

    def resize(self, run: Run, size: int) -> None:
        """`kubectl scale` to `size` nodes."""
        before = run.status["membership"]["size"]
        self.view.log(f"kubectl scale trainingjob {run.name} --replicas={size}")
        command = ("scale", "trainingjob", run.name, "-n", NAMESPACE, f"--replicas={size}")
        self._measure(run, f"resize {before} to {size}", lambda: self.cluster.kubectl(*command))

    def _measure(self, run: Run, kind: str, act: Callable[[], object]) -> None:
        before = {(item["generation"], item.get("attempt", 0)) for item in run.history()}
        run.log.refresh()
        step = run.log.newest
        moment = time.time()
        act()

        def answer() -> dict[str, Any] | None:
            fresh = [item for item in run.history() if (item["generation"], item.get("attempt", 0)) not in before]
            return fresh[-1] if fresh else None

        def over() -> bool:
            entry = answer()
            return entry is not None and entry.get("recoveredSeconds") is not None

        self.until(run, f"the recovery from {kind}", over)
        entry = answer()
        assert entry is not None
        run.log.refresh()
        # The trainer saves what it makes after a resize was decided; a program repeats it.
        last = max(step, entry["stepBefore"], entry.get("resumeStep", 0))
        resumed = run.log.time_of(last + 1)
        ended = run.log.first_times.get(last)
        fault = Fault(
            kind=kind,
            step=last,
            detected_seconds=entry.get("detectedSeconds"),
            recovered_seconds=None if resumed is None else resumed - moment,
            pause_seconds=None if resumed is None or ended is None else resumed - ended,
            steps_lost=entry.get("stepsLost", run.log.steps_lost_after(moment)),
            pods_replaced=entry.get("podsReplaced", 0),
        )
        self.faults.append(fault)
        self.view.log(
            f"{kind}: {entry['rung']}, first new step after {fault.recovered_seconds or 0:.2f} s, "
            f"{fault.steps_lost} steps lost, {fault.pods_replaced} pods replaced"
        )
