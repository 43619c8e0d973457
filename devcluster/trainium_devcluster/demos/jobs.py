"""Install, apply and follow the TrainingJobs of a demo, and inject one fault after another.

Guarantees:
- Each fault waits until the job has recovered from the previous one.
- A wait that times out ends the demo with a message that names the condition and where to look.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from trainium_contract.views.goodput import GoodputView, build_goodput_view
from trainium_contract.views.status_reader import public_status
from trainium_contract.wire.recorded_membership import parse_members
from trainium_devcluster.cluster import system_values
from trainium_devcluster.demos.curves import Fault
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.jobs.metrics import StepLog

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
    """A TrainingJob of a demo, read from the API server and its files."""

    name: str
    folder: Path
    """Folder of the checkpoints."""
    trainer: Mapping[str, Any]
    """`spec.trainer` of the job; only `steps` for a program."""
    log: StepLog
    status: dict[str, Any] = field(default_factory=dict)
    """Newest status that was read; empty until the operator has written one."""

    @property
    def steps(self) -> int:
        """Steps of the whole run; if the job counts epochs, 0 until it has started."""
        if self.trainer.get("epochs"):
            return int((self.status.get("progress") or {}).get("totalSteps", 0))
        return int(self.trainer["steps"])

    @property
    def goodput(self) -> GoodputView:
        """Return the ledger of the job."""
        return build_goodput_view(public_status({"status": self.status}), time.time())

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
    """A demo on a running cluster."""

    command = "make demo"
    """Command that runs the demo again."""

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
        self.until(run, lambda: run.finished, "the end", seconds=seconds)
        run.log.refresh()
        self.view.log("the undisturbed run is complete")
        return run

    # --- setup ------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Install the operator with helm."""
        started = time.monotonic()
        self.cluster.kubectl("create", "namespace", NAMESPACE)
        chart = str(self.repository / "helm" / "trainium-operator")
        values = self.out / "operator.yaml"
        values.write_text(yaml.safe_dump({"statusIntervalSeconds": 1, **system_values()}))
        namespace = (f"--namespace={OPERATOR_NAMESPACE}", "--create-namespace")
        self.cluster.helm("install", RELEASE, chart, *namespace, f"--values={values}", "--wait", "--timeout=90s")
        self.view.log(f"helm install {RELEASE}: the operator is ready ({time.monotonic() - started:.1f} s)")

    def read_job(self, file: Path, name: str) -> dict[str, Any]:
        """Read a TrainingJob from a file, and set its name and its checkpoint folder."""
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
        return Run(name, folder, self.trainer_settings(job), StepLog(folder / "metrics.jsonl"))

    def trainer_settings(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `spec.trainer` of the job."""
        trainer: Mapping[str, Any] = job["spec"]["trainer"]
        return trainer

    def until(self, run: Run, condition: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> None:
        """Show the job until `condition` holds; raises ClusterError if the job fails or at the timeout."""
        deadline = time.monotonic() + seconds
        while True:
            run.log.refresh()
            job = self.cluster.api.get(f"{_JOBS}/{run.name}")
            run.status = job.get("status") or {}
            self.view.show(job)
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
        self.until(run, lambda: run.log.newest >= step, f"step {step}")

    # --- faults -----------------------------------------------------------------------------------------------

    def members(self, run: Run) -> list[dict[str, Any]]:
        """Return the current members by node rank."""
        return parse_members(self.cluster.api.get(f"/api/v1/namespaces/{NAMESPACE}/configmaps/{run.name}-membership"))

    def kill_process(self, run: Run) -> None:
        """Send SIGKILL to one training process; its pod and all others remain."""
        member = self.members(run)[1]
        pod = member["podName"]
        pid = self.find_process(pod)
        self.view.log(f"fault: SIGKILL of the training process in {pod} (rank {member['nodeRank']})")
        self._measure(run, "killed process", lambda: self.exec_in_worker(pod, "sh", "-c", f"kill -9 {pid}"))

    def find_process(self, pod: str) -> int:
        """Return the pid of the training process in the worker."""
        return int(
            json.loads(self.exec_in_worker(pod, "python", "-m", "trainium_agent.show_ranks").splitlines()[0])["pid"]
        )

    def exec_in_worker(self, pod: str, *command: str) -> str:
        """Run a command in the worker; return its output."""
        return self.cluster.kubectl("exec", pod, "-n", NAMESPACE, "-c", "worker", "--", *command)

    def power_off_node(self, run: Run) -> str:
        """Power off the node of the last rank; return its name."""
        member = self.members(run)[-1]
        node: str = member["nodeName"]
        self.view.log(f"fault: power loss of {node} with {member['podName']} (rank {member['nodeRank']})")
        self._measure(run, "lost node", lambda: self.cluster.faults.kill_node(node))
        return node

    def kill_process_and_node(self, run: Run, first: int, second: int) -> None:
        """Kill a process at one step and power a node off at a later one; return when a spare is ready again."""
        self.until_step(run, first)
        self.kill_process(run)
        self.until_step(run, second)
        node = self.power_off_node(run)
        self.cluster.faults.start_node(node)
        self.view.log(f"{node} is powered on again; the operator refills the spare")
        self.until(run, lambda: run.status.get("spares", 0) >= 1, "a new warm spare")

    def resize(self, run: Run, size: int) -> None:
        """Scale the job to `size` nodes with `kubectl scale`."""
        before = run.status["membership"]["size"]
        self.view.log(f"kubectl scale trainingjob {run.name} --replicas={size}")
        command = ("scale", "trainingjob", run.name, "-n", NAMESPACE, f"--replicas={size}")
        self._measure(run, f"resize {before} to {size}", lambda: self.cluster.kubectl(*command))

    def _measure(self, run: Run, kind: str, inject: Callable[[], object]) -> None:
        before = {(item["generation"], item.get("attempt", 0)) for item in run.history()}
        run.log.refresh()
        step = run.log.newest
        injected_at = time.time()
        inject()

        def newest_entry() -> dict[str, Any] | None:
            new_items = [item for item in run.history() if (item["generation"], item.get("attempt", 0)) not in before]
            return new_items[-1] if new_items else None

        def is_recovered() -> bool:
            entry = newest_entry()
            return entry is not None and entry.get("recoveredSeconds") is not None

        self.until(run, is_recovered, f"the recovery from {kind}")
        entry = newest_entry()
        assert entry is not None
        run.log.refresh()
        # The trainer saves the steps after the decision to resize; a program repeats them.
        last = max(step, entry["stepBefore"], entry.get("resumeStep", 0))
        resumed = run.log.step_time(last + 1)
        ended = run.log.first_times.get(last)
        fault = Fault(
            kind=kind,
            step=last,
            detected_seconds=entry.get("detectedSeconds"),
            recovered_seconds=None if resumed is None else resumed - injected_at,
            pause_seconds=None if resumed is None or ended is None else resumed - ended,
            steps_lost=entry.get("stepsLost", 0),
            pods_replaced=entry.get("podsReplaced", 0),
        )
        self.faults.append(fault)
        self.view.log(
            f"{kind}: {entry['rung']}, first new step after {fault.recovered_seconds or 0:.2f} s, "
            f"{fault.steps_lost} steps lost, {fault.pods_replaced} pods replaced"
        )
