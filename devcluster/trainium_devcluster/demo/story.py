"""What the demo does, in order: install, apply, disturb, finish, repeat undisturbed, compare.

Invariants: each disturbance waits until the one before is over; a wait that is not fulfilled ends the demo with a
sentence that says what was waited for and where to look.
"""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from trainium_devcluster.binaries import Program
from trainium_devcluster.cluster import system_values
from trainium_devcluster.demo.metrics import StepLog, every_sample_once
from trainium_devcluster.demo.report import Fault, Result
from trainium_devcluster.demo.watch import JobWatch
from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from trainium_devcluster.cluster import Cluster
    from trainium_devcluster.demo.view import View

NAMESPACE = "training"
OPERATOR_NAMESPACE = "trainium-system"
RELEASE = "trainium-operator"
WAIT_SECONDS = 120.0


@dataclass
class Run:
    """One TrainingJob of the demo, seen through kubectl and through its files."""

    name: str
    folder: Path
    steps: int
    global_batch: int
    watch: JobWatch
    log: StepLog

    @property
    def finished(self) -> bool:
        """Whether the job reached a terminal phase."""
        return self.watch.status.get("phase") in {"Completed", "Failed"}


class Story:
    """The demo on one running cluster."""

    def __init__(self, cluster: Cluster, view: View, repository: Path, out: Path) -> None:
        self.cluster = cluster
        self.view = view
        self.repository = repository
        self.out = out
        self.faults: list[Fault] = []

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
        self.view.say(f"helm install {RELEASE}: the operator is ready ({time.monotonic() - started:.1f} s)")

    def manifest(self, name: str) -> dict[str, Any]:
        """The example job, with its checkpoints below the demo's own folder."""
        example = self.repository / "manifests" / "examples" / "demo.yaml"
        job: dict[str, Any] = yaml.safe_load(example.read_text())
        job["metadata"]["name"] = name
        job["metadata"]["namespace"] = NAMESPACE
        job["spec"]["checkpoint"]["storage"] = {"hostPath": {"path": str(self.out / "checkpoints")}, "subPath": name}
        return job

    @contextmanager
    def run(self, name: str, **workers: int) -> Iterator[Run]:
        """Apply the example as `name` and follow it until the block ends."""
        job = self.manifest(name)
        job["spec"]["workers"].update(workers)
        path = self.out / f"{name}.yaml"
        path.write_text(yaml.safe_dump(job, sort_keys=False))
        self.cluster.kubectl("apply", "-f", str(path))
        self.view.say(f"kubectl apply -f {path.name}")
        folder = self.out / "checkpoints" / name
        kubectl = self.cluster.binaries.path(Program.KUBECTL)
        with JobWatch(kubectl, {**self.cluster.variables()}, NAMESPACE, name) as watch:
            trainer = job["spec"]["trainer"]
            log = StepLog(folder / "metrics.jsonl")
            yield Run(name, folder, trainer["steps"], trainer["batch"]["globalSize"], watch, log)

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
                    f"Waited {seconds:.0f} s for {what} of job {run.name}, in vain; see `trainium-devcluster run` or "
                    f"`kubectl describe trainingjob -n {NAMESPACE} {run.name}` with `make demo ARGS=--keep`."
                )
            run.watch.wait_change(0.1)

    def until_step(self, run: Run, step: int) -> None:
        """Wait until `step` has been completed."""
        self.until(run, f"step {step}", lambda: run.log.newest >= step)

    # --- disturbances --------------------------------------------------------------------------------------------

    def members(self, run: Run) -> list[dict[str, Any]]:
        """The current members by node rank."""
        record = json.loads(
            self.cluster.kubectl("get", "configmap", f"{run.name}-membership", "-n", NAMESPACE, "-o", "json")
        )
        members: list[dict[str, Any]] = json.loads(record["data"]["membership.json"])["members"]
        return members

    def kill_process(self, run: Run) -> None:
        """SIGKILL one training process; its pod and all others stay."""
        victim = self.members(run)[1]
        pod = victim["podName"]
        inside = ("exec", pod, "-n", NAMESPACE, "-c", "worker", "--")
        records = self.cluster.kubectl(*inside, "python", "-m", "trainium_trainer.monitor")
        pid = json.loads(records.splitlines()[0])["pid"]
        self.view.say(f"fault: SIGKILL of the training process in {pod} (rank {victim['nodeRank']})")
        self._measure(run, "killed process", lambda: self.cluster.kubectl(*inside, "sh", "-c", f"kill -9 {pid}"))

    def lose_node(self, run: Run) -> str:
        """Power loss of the node that holds the last rank; returns its name."""
        victim = self.members(run)[-1]
        node: str = victim["nodeName"]
        self.view.say(f"fault: power loss of {node} with {victim['podName']} (rank {victim['nodeRank']})")
        self._measure(run, "lost node", lambda: self.cluster.faults.kill_node(node))
        return node

    def resize(self, run: Run, size: int) -> None:
        """`kubectl scale` to `size` nodes."""
        before = run.watch.status["membership"]["size"]
        self.view.say(f"kubectl scale trainingjob {run.name} --replicas={size}")
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
        last = entry["resumeStep"] if resize else max(step, entry["stepBefore"])
        resumed = run.log.time_of(last + 1)
        ended = run.log.time_of(last)
        fault = Fault(
            kind=kind,
            step=last,
            detected_seconds=entry.get("detectedSeconds"),
            recovered_seconds=None if resumed is None else resumed - moment,
            pause_seconds=None if resumed is None or ended is None else resumed - ended,
            steps_lost=entry["stepsLost"],
            pods_replaced=entry.get("podsReplaced", 0),
        )
        self.faults.append(fault)
        self.view.say(
            f"{kind}: {entry['rung']}, first new step after {fault.recovered_seconds or 0:.2f} s, "
            f"{fault.steps_lost} steps lost, {fault.pods_replaced} pods replaced"
        )

    # --- the whole -----------------------------------------------------------------------------------------------

    def disturbed(self) -> tuple[Run, dict[str, Any]]:
        """The run with all faults; returns it with its last status."""
        with self.run("demo") as run:
            self.until(run, "the first step", lambda: run.log.newest >= 1, seconds=WAIT_SECONDS * 2)
            self.view.say("the first step is done")
            at = [round(run.steps * share) for share in (0.1, 0.2, 0.6, 0.8)]
            self.until_step(run, at[0])
            self.kill_process(run)
            self.until_step(run, at[1])
            node = self.lose_node(run)
            self.cluster.faults.start_node(node)
            self.view.say(f"{node} is powered on again; the operator refills the spare")
            self.until(run, "a new warm spare", lambda: run.watch.status.get("spares", 0) >= 1)
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
        with self.run("reference", spares=0, minReplicas=4) as run:
            self.until(run, "the end", lambda: run.finished, seconds=WAIT_SECONDS * 2)
            run.log.refresh()
            self.view.say("the undisturbed run is complete")
            return run

    def tell(self) -> Result:
        """Run everything and compare."""
        started = time.monotonic()
        self.install()
        run, status = self.disturbed()
        reference = self.reference()
        resizes = [fault.step for fault in self.faults if fault.kind.startswith("resize")]
        return Result(
            completed=status.get("phase") == "Completed" and run.log.newest == run.steps,
            steps=run.steps,
            faults=tuple(self.faults),
            loss={step: record["loss"] for step, record in run.log.steps.items()},
            reference={step: record["loss"] for step, record in reference.log.steps.items()},
            every_sample_once=every_sample_once(run.folder, run.steps, run.global_batch),
            goodput=(status.get("goodput") or {}).get("ratio", 0.0),
            seconds=time.monotonic() - started,
            first_resize_step=min(resizes, default=None),
        )
