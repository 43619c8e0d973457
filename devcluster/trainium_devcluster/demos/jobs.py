"""TrainingJobs of a demo: installed, applied, followed and disturbed, one disturbance after the other.

Invariants: each disturbance waits until the one before is over; a wait that is not fulfilled ends the demo with a
message that names what was waited for and where to look.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import yaml

from trainium_contract.wire.recorded_membership import members_of
from trainium_devcluster.binaries import Program
from trainium_devcluster.cluster import system_values
from trainium_devcluster.demos.curves import Fault
from trainium_devcluster.demos.metrics import StepLog
from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from trainium_devcluster.cluster import Cluster
    from trainium_devcluster.demos.view import View

NAMESPACE = "training"
OPERATOR_NAMESPACE = "trainium-system"
RELEASE = "trainium-operator"
WAIT_SECONDS = 120.0


class JobWatch:
    """Newest known state of one TrainingJob; `close` ends the thread and its kubectl."""

    def __init__(self, kubectl: Path, environment: Mapping[str, str], namespace: str, name: str) -> None:
        self.job: dict[str, Any] = {}
        self._changed = threading.Condition()
        self._process = subprocess.Popen(
            [str(kubectl), "get", "trainingjob", name, "-n", namespace, "--watch", "-o", "json"],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def status(self) -> dict[str, Any]:
        """The status, empty before the operator has written one."""
        status: dict[str, Any] = self.job.get("status") or {}
        return status

    def history(self) -> list[dict[str, Any]]:
        """Interruptions, oldest first."""
        return list(self.status.get("history") or [])

    def wait_change(self, seconds: float) -> None:
        """Return at the next change, or after `seconds`."""
        with self._changed:
            self._changed.wait(seconds)

    def _read(self) -> None:
        # kubectl prints one indented document after another; a document ends with a brace in the first column.
        lines: list[str] = []
        assert self._process.stdout is not None
        for line in self._process.stdout:
            lines.append(line)
            if line.rstrip() == "}":
                with self._changed:
                    self.job = json.loads("".join(lines))
                    self._changed.notify_all()
                lines = []

    def close(self) -> None:
        """End the watch."""
        self._process.terminate()
        self._process.wait()
        self._thread.join()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Run:
    """One TrainingJob of a demo, seen through kubectl and through its files."""

    name: str
    folder: Path
    """Its checkpoints."""
    trainer: Mapping[str, Any]
    """Its `spec.trainer`; of a program `steps` alone."""
    watch: JobWatch
    log: StepLog

    @property
    def steps(self) -> int:
        """Steps of the whole run; of one that counts epochs they are known once it has started, and 0 before."""
        if self.trainer.get("epochs"):
            return int((self.watch.status.get("progress") or {}).get("totalSteps", 0))
        return int(self.trainer["steps"])

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return int(self.trainer["batch"]["globalSize"])

    @property
    def finished(self) -> bool:
        """Whether the job reached a terminal phase."""
        return self.watch.status.get("phase") in {"Completed", "Failed"}


class Demo(ABC):
    """A demo on one running cluster."""

    command = "make demo"
    """What a person types to see it again."""

    def __init__(self, cluster: Cluster, view: View, repository: Path, out: Path) -> None:
        self.cluster = cluster
        self.view = view
        self.repository = repository
        self.out = out
        self.faults: list[Fault] = []

    @abstractmethod
    def create_manifest(self, name: str) -> dict[str, Any]:
        """Return the TrainingJob of the demo under a name."""

    # --- set-up --------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Install the operator with helm, as a platform engineer does."""
        started = time.monotonic()
        self.cluster.kubectl("create", "namespace", NAMESPACE)
        chart = str(self.repository / "helm" / "trainium-operator")
        values = self.out / "operator.yaml"
        values.write_text(yaml.safe_dump({"statusIntervalSeconds": 1, **system_values()}))
        self.cluster.helm(
            "install",
            RELEASE,
            chart,
            "--namespace",
            OPERATOR_NAMESPACE,
            "--create-namespace",
            "-f",
            str(values),
            "--wait",
            "--timeout",
            "90s",
        )
        self.view.log(f"helm install {RELEASE}: the operator is ready ({time.monotonic() - started:.1f} s)")

    def read_job(self, file: Path, name: str) -> dict[str, Any]:
        """Read the TrainingJob of a file, with this name and its checkpoints in the folder of the demo."""
        job: dict[str, Any] = yaml.safe_load(file.read_text())
        job["metadata"] |= {"name": name, "namespace": NAMESPACE}
        job["spec"]["checkpoint"]["storage"] = {"hostPath": {"path": str(self.out / "checkpoints")}, "subPath": name}
        return job

    @contextmanager
    def run(self, job: Mapping[str, Any]) -> Iterator[Run]:
        """Apply a job and follow it until the block ends."""
        name = job["metadata"]["name"]
        path = self.out / f"{name}.yaml"
        path.write_text(yaml.safe_dump(job, sort_keys=False))
        self.cluster.kubectl("apply", "-f", str(path))
        self.view.log(f"kubectl apply -f {path.name}")
        folder = self.out / "checkpoints" / name
        kubectl = self.cluster.binaries.path(Program.KUBECTL)
        with JobWatch(kubectl, {**self.cluster.variables()}, NAMESPACE, name) as watch:
            yield Run(name, folder, self.trainer_of(job), watch, StepLog(folder / "metrics.jsonl"))

    def trainer_of(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what the job trains."""
        trainer: Mapping[str, Any] = job["spec"]["trainer"]
        return trainer

    def until(self, run: Run, what: str, condition: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
        """Show the job until `condition` holds; raises ClusterError when the job fails or the time is over."""
        deadline = time.monotonic() + seconds
        while True:
            run.log.refresh()
            newest = run.log.steps.get(run.log.newest, {})
            self.view.show(f"TrainingJob {NAMESPACE}/{run.name}", run.watch.status, newest, run.steps)
            if condition():
                return
            if run.watch.status.get("phase") == "Failed":
                raise ClusterError(f"The job {run.name} failed: {run.watch.status.get('verdict')}")
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"Job {run.name} did not reach {what} within {seconds:.0f} s; see `trainium-devcluster run` or "
                    f"`kubectl describe trainingjob -n {NAMESPACE} {run.name}` with `{self.command} ARGS=--keep`."
                )
            run.watch.wait_change(0.1)

    def until_step(self, run: Run, step: int) -> None:
        """Wait until `step` has been completed."""
        self.until(run, f"step {step}", lambda: run.log.newest >= step)

    # --- disturbances --------------------------------------------------------------------------------------------

    def members(self, run: Run) -> list[dict[str, Any]]:
        """Return the current members by node rank."""
        record = json.loads(
            self.cluster.kubectl("get", "configmap", f"{run.name}-membership", "-n", NAMESPACE, "-o", "json")
        )
        return members_of(record)

    def kill_process(self, run: Run) -> None:
        """SIGKILL one training process; its pod and all others stay."""
        member = self.members(run)[1]
        pod = member["podName"]
        pid = self.find_process(pod)
        self.view.log(f"fault: SIGKILL of the training process in {pod} (rank {member['nodeRank']})")
        self._measure(run, "killed process", lambda: self.inside(pod, "sh", "-c", f"kill -9 {pid}"))

    def find_process(self, pod: str) -> int:
        """Return the pid of the training process in the worker."""
        return int(json.loads(self.inside(pod, "python", "-m", "trainium_trainer.monitor").splitlines()[0])["pid"])

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
        self.until(run, "a new warm spare", lambda: run.watch.status.get("spares", 0) >= 1)

    def resize(self, run: Run, size: int) -> None:
        """`kubectl scale` to `size` nodes."""
        before = run.watch.status["membership"]["size"]
        self.view.log(f"kubectl scale trainingjob {run.name} --replicas={size}")
        command = ("scale", "trainingjob", run.name, "-n", NAMESPACE, f"--replicas={size}")
        self._measure(run, f"resize {before} to {size}", lambda: self.cluster.kubectl(*command), resize=True)

    def _measure(self, run: Run, kind: str, act: Callable[[], object], *, resize: bool = False) -> None:
        known = len(run.watch.history())
        before = {(item["generation"], item.get("attempt", 0)) for item in run.watch.history()}
        run.log.refresh()
        step = run.log.newest
        moment = time.time()
        act()

        def answer() -> dict[str, Any] | None:
            fresh = [item for item in run.watch.history() if (item["generation"], item.get("attempt", 0)) not in before]
            return fresh[-1] if fresh else None

        def over() -> bool:
            entry = answer()
            return entry is not None and entry.get("recoveredSeconds") is not None

        self.until(run, f"the recovery from {kind}", over)
        entry = answer()
        assert entry is not None
        assert known >= 0
        run.log.refresh()
        # A program may not report the step that it resumed from.
        last = entry.get("resumeStep", step) if resize else max(step, entry["stepBefore"])
        resumed = run.log.time_of(last + 1)
        ended = run.log.time_of(last)
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
