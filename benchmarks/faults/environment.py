"""Provide a cluster with the operator, jobs with a fault injector, node faults, and the reference curves.

Guarantees:
- Every job trains the same model on the same data, so each size has one reference curve.
- A faulty node is replaced before the next run, so that no run inherits its strikes.
- Leftovers of a row are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import yaml

from benchmarks.faults.curves import check_batches, compare_losses
from benchmarks.faults.operator_pods import OperatorPods
from benchmarks.faults.target import TargetJob
from tests.testing.api.json_objects import merge
from tests.testing.cluster.access import ROOT
from tests.testing.cluster.installed import NAMESPACE as OPERATOR_NAMESPACE
from tests.testing.cluster.installed import RELEASE, install_operator, make_namespace
from tests.testing.suite import timeouts
from trainium_contract.api_server.errors import ApiError
from trainium_devcluster.jobs.metrics import read_samples
from trainium_devcluster.state import NodeSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from tests.testing.cluster.shared_cluster import SharedCluster
    from trainium_devcluster.faults import Faults

Json = dict[str, Any]
NAMESPACE = "fault-table"
SHARED_FOLDER = "/shared-folder"
"""Placeholder in a row's spec for the folder that all nodes share."""
_JOB = Path(__file__).with_name("job.yaml")
_TRAINER = yaml.safe_load(_JOB.read_text())["trainer"]
STEPS: int = _TRAINER["steps"]
BATCH: int = _TRAINER["batch"]["globalSize"]
STEP_SECONDS = 0.15
"""Duration of a step; this small model needs only 20 ms."""
NODES = 7
"""Three nodes for members, two for spares, and two idle ones; the operator has another node."""
FULL_SIZE_NODES = 6
"""Nodes for three members, two spares and the operator; on fewer a job has two members and one spare."""
_REFERENCE_STEPS = 500
"""Length of the reference curve unless a row needs more."""
_CURVE_PARTS = ("models", "data", "backends", "loop")


_COPIED_FILES = (
    "benchmarks/faults/trainium_fault_injector.py",
    "benchmarks/faults/faulty_rollout_server.py",
    "tests/testing/cluster/train_ddp.py",
    "manifests/examples/grpo_rollout.py",
    "manifests/examples/rollout_server.py",
)


class RowSkippedError(Exception):
    """The row cannot run on this cluster; the message has the reason."""


class FaultEnvironment:
    """A cluster for all rows."""

    def __init__(self, cluster: SharedCluster, out: Path, log: Callable[[str], None]) -> None:
        self.cluster = cluster
        self.out = out
        self.log = log
        self.operator = OperatorPods(cluster)
        self._full_size = self.local or len(cluster.worker_nodes()) >= FULL_SIZE_NODES
        self._references: dict[str, dict[int, float]] = {}
        self._numbers = itertools.count(int(time.time()) % 1_000_000)

    def __enter__(self) -> Self:
        faults = self.cluster.shared / "cache" / "faults"
        for folder in (faults.parent, faults, faults / "lib"):
            folder.mkdir(mode=0o777, exist_ok=True)
            folder.chmod(0o777)
        for source in _COPIED_FILES:
            shutil.copy(ROOT / source, faults / "lib")
        install_operator(self.cluster, {"statusIntervalSeconds": 1, "replicas": 1})
        self.log("the operator is installed")
        make_namespace(self.cluster, NAMESPACE)
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.api.close()

    @property
    def local(self) -> bool:
        """Whether this is the development cluster, where all faults can be injected."""
        return self.cluster.devcluster is not None

    @property
    def size(self) -> int:
        """Number of members of a job; a small cluster keeps a node for a spare."""
        return 3 if self._full_size else 2

    def count_spares(self, requested: int) -> int:
        """Return the number of spares for which the cluster has nodes."""
        return requested if self._full_size else min(requested, 1)

    def require(self, requirement: str) -> None:
        """Raise RowSkippedError if the cluster does not fulfil this requirement of a row."""
        settings, nodes = self.cluster.settings.keys(), len(self.cluster.worker_nodes())
        problems = {
            "devcluster": "" if self.local else "needs the development cluster",
            "images": "the development cluster pulls no images" if self.local else "",
            "full_size": "" if self._full_size else f"{FULL_SIZE_NODES} nodes are needed",
            "four_nodes": "" if nodes >= 4 else "four nodes are needed",
            "partitions": _find_missing(settings, "cutOff", "mend") if not self.local else "",
            "name_servers": (
                "the development cluster has no name server; test_name_server.py has one"
                if self.local
                else _find_missing(settings, "dnsStop", "dnsGo")
            ),
        }
        if problems[requirement]:
            raise RowSkippedError(problems[requirement])

    @contextlib.contextmanager
    def run_job(
        self,
        name: str,
        *changes: Mapping[str, Any],
        environment: dict[str, str] | None = None,
        step_seconds: float = STEP_SECONDS,
    ) -> Iterator[TargetJob]:
        """Run a job with a fault injector, and remove it at the end; later changes of its spec take precedence."""
        unique = f"{name}-{next(self._numbers)}"
        commands = self.cluster.shared / "cache" / "faults" / f"{NAMESPACE}-{unique}"
        commands.mkdir(mode=0o777)
        commands.chmod(0o777)
        variables = {
            "PYTHONPATH": "/cache/faults/lib",
            "TRAINIUM_RANK_ENTRY": "trainium_fault_injector:main",
            "TRAINIUM_FAULTS_DIR": f"/cache/faults/{commands.name}",
            "TRAINIUM_FAULTS_STEP_SECONDS": f"{step_seconds:g}",
        }
        spec: dict[str, Any] = yaml.safe_load(_JOB.read_text())
        for change in ({"workers": {"replicas": self.size}}, *changes):
            spec = merge(spec, dict(change))
        text = yaml.safe_dump(spec).replace(SHARED_FOLDER, str(self.cluster.shared))
        target = TargetJob(self.cluster, NAMESPACE, unique, text, commands, variables | (environment or {}))
        target.apply()
        try:
            yield target
        finally:
            target.remove()
            shutil.rmtree(target.folder, ignore_errors=True)

    def compute_reference(self, size: int, steps: int, batch: int = BATCH) -> dict[int, float]:
        """Return the losses by step of an undisturbed job at this size and global batch, for at least `steps` steps.

        The curve is computed once for each version of the trainer's code.
        """
        name = f"reference-{size}" if batch == BATCH else f"reference-{size}-{batch}"
        path = self.out / f"{name}-{hash_curve_code()}.json"
        losses = self._references.get(path.name) or _read_losses(path)
        if len(losses) < steps:
            length = _REFERENCE_STEPS if steps <= _REFERENCE_STEPS else STEPS
            self.log(f"an undisturbed run of {length} steps at size {size} as the reference curve")
            trainer = {"monitor": {"recordSamples": False}, "batch": {"globalSize": batch}}
            change = {"workers": {"replicas": size}, "trainer": trainer}
            with self.run_job(name, change, step_seconds=0.0) as target:
                target.wait_for_step(length, 900)
                losses = target.read_losses()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(losses))
        self._references[path.name] = losses
        return losses

    def check_curve(self, target: TargetJob, size: int, tolerance: float = 0.0, batch: int = BATCH) -> list[str]:
        """Return a sentence for each deviation of the curve and of the samples of a job."""
        losses = target.read_losses()
        reference = self.compute_reference(size, max(losses, default=0), batch)
        samples = read_samples(target.folder)
        recorded = max(0, max(samples, default=0) - 2)  # some ranks may not have recorded the newest steps yet
        return [*compare_losses(losses, reference, tolerance), *check_batches(samples, recorded, batch)]

    def save_diagnostics(self, target: TargetJob, name: str) -> None:
        """Save objects, events and logs of a stuck run."""
        folder = self.out / "stuck" / name
        folder.mkdir(parents=True, exist_ok=True)
        namespace = target.namespace
        in_namespace = ("-n", namespace)
        commands = {
            "job.yaml": ("get", "trainingjob", target.name, *in_namespace, "-o", "yaml"),
            "pods.txt": ("get", "pods,configmaps,poddisruptionbudgets", *in_namespace, "-o", "wide"),
            "nodes.txt": ("get", "nodes", "-o", "wide"),
            "events.txt": ("get", "events", *in_namespace, "--sort-by=.metadata.creationTimestamp"),
            "operator.log": ("logs", "-n", OPERATOR_NAMESPACE, f"deployment/{RELEASE}", "--tail=400"),
        }
        with contextlib.suppress(ApiError):
            names = [pod["metadata"]["name"] for pod in target.list_pods()]
            commands |= {f"{pod}.log": ("logs", pod, *in_namespace, "--tail=400") for pod in names}
        for file, command in commands.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                output = self.cluster.run("kubectl", *command, seconds=20)
                (folder / file).write_text(output.stdout + output.stderr)

    def replace_node(self, node: str) -> None:
        """Replace a faulty node by a new one; on an existing cluster, power it on."""
        cluster = self.cluster.devcluster
        if cluster is None:
            if node in self.cluster.powered_off_nodes:
                self.cluster.power_on(node)
            return
        with contextlib.suppress(Exception):
            cluster.faults.thaw_node(node)
        cluster.add_node(NodeSpec(name=f"node-{next(self._numbers)}", cpu="4", memory="8Gi"), wait=False)
        with contextlib.suppress(Exception):
            cluster.faults.kill_node(node)
        cluster.request_supervisor({"op": "delete-node", "node": node})
        self.cluster.api.delete(f"/api/v1/nodes/{node}")

    def list_cordoned(self) -> list[str]:
        """Return the cordoned nodes."""
        nodes = self.cluster.api.get("/api/v1/nodes")["items"]
        return [node["metadata"]["name"] for node in nodes if node["spec"].get("unschedulable")]

    def clear_quarantine(self) -> None:
        """Delete the fleet's records of bad machines, so that rows are independent."""
        self.cluster.api.delete(f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/configmaps/{RELEASE}-quarantine")

    def set_unhealthy(self, node: str, *, on: bool = True) -> None:
        """Set the condition by which a health monitor reports a bad node, or remove it."""
        kind, reason = "NeuronHealth", "NeuronHasError_HBM_UNCORRECTABLE_ERROR"
        if self.cluster.devcluster is not None and on:
            self.cluster.devcluster.faults.set_condition(node, kind, "True", reason)
        elif self.cluster.devcluster is not None:
            self.cluster.devcluster.faults.clear_condition(node, kind)
        else:
            condition = {"status": "True", "reason": reason} if on else {"$patch": "delete"}
            change = json.dumps({"status": {"conditions": [{"type": kind, **condition}]}})
            self.cluster.kubectl("patch", "node", node, "--subresource=status", "--type=strategic", "-p", change)

    def partition(self, node: str, *, on: bool = True) -> None:
        """Cut a node off from the API and its peers, or reconnect it, on a cluster with partitions."""
        if self.cluster.devcluster is not None:
            faults = self.cluster.devcluster.faults
            (faults.partition_node if on else faults.heal_node)(node)
            return
        command = str(self.cluster.settings["cutOff" if on else "mend"])
        subprocess.run(command.format(node=node), shell=True, check=True, timeout=timeouts.scaled(60))

    @property
    def faults(self) -> Faults:
        """Fault controls of the development cluster; raises RowSkippedError elsewhere."""
        self.require("devcluster")
        assert self.cluster.devcluster is not None
        return self.cluster.devcluster.faults

    def kill_agent(self, namespace: str, member: Json, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the main process of a worker, from outside its container."""
        if self.cluster.devcluster is not None:
            self.cluster.devcluster.faults.kill_container(namespace, member["podName"], signal=number)
            return
        shell = self.cluster.settings.get("nodeShell")
        if not shell:
            raise RowSkippedError("the cluster's settings have no nodeShell command")
        command = f"{shell.format(node=member['nodeName'])} pkill -{number.value} -o -f trainium-agent"
        subprocess.run(command, shell=True, check=True, timeout=timeouts.scaled(60))

    @contextlib.contextmanager
    def stop_name_servers(self) -> Iterator[None]:
        """Stop all name servers of a cluster whose settings have the commands."""
        stop, resume = (self.cluster.settings.get(key, "") for key in ("dnsStop", "dnsGo"))
        try:
            subprocess.run(stop, shell=True, check=True, timeout=timeouts.scaled(60))
            yield
        finally:
            # A name server that its kubelet has restarted needs no signal.
            subprocess.run(resume, shell=True, check=False, timeout=timeouts.scaled(60))

    def move_operator_off(self, node: str) -> bool:
        """Move the operator off a node that is about to fail; return whether it was there."""
        if all(pod["spec"].get("nodeName") != node for pod in self.operator.list_pods()):
            return False
        with self.cluster.cordon_nodes(node):
            self.operator.kill()
            time.sleep(1)
            self.operator.wait_until_stable(90)
        return True


def _find_missing(settings: Collection[str], *names: str) -> str:
    """Return the reason for which a row is skipped without these commands in the settings; empty if there are all."""
    return "" if set(names) <= set(settings) else f"the cluster's settings have no {' and '.join(names)} commands"


def _read_losses(path: Path) -> dict[int, float]:
    if not path.exists():
        return {}
    return {int(step): loss for step, loss in json.loads(path.read_text()).items()}


def hash_curve_code() -> str:
    """Return a digest of the code that affects the loss curve."""
    package = ROOT / "trainer_image" / "trainium_trainer"
    digest = hashlib.sha256(_JOB.read_bytes())
    for part in _CURVE_PARTS:
        path = package / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
