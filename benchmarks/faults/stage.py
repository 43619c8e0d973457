"""Where the rows play: a cluster with the operator installed, jobs with a saboteur in them, and what they must equal.

Invariants: every job of the table trains the same model on the same data, so that all of them have one reference curve
per size; a node that a fault has spoilt is replaced by a new one before the next run, so that no run inherits what the
fleet remembers of the run before; what a row leaves behind is removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import yaml

from benchmarks.faults.api import Api, ApiError
from benchmarks.faults.operator_pods import OperatorPods
from benchmarks.faults.patient import Patient
from tests.testing.cluster.access import ROOT
from tests.testing.cluster.installed import NAMESPACE as OPERATOR_NAMESPACE
from tests.testing.cluster.installed import RELEASE, install_operator, make_namespace
from tests.testing.cluster.jobs import Job, merged
from tests.testing.cluster.marks import cordon_of
from tests.testing.suite import patience
from trainium_devcluster.state import NodeSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.testing.cluster.sites import Site
    from trainium_devcluster.faults import Faults

Json = dict[str, Any]
NAMESPACE = "fault-table"
STEPS = 2400
BATCH = 12
PACE_SECONDS = 0.15
"""Length of a step: a model that is this small would not notice the difference between 20 ms and 150 ms."""
NODES = 7
"""Three for members, two for spares, and two that are free; the operator has one of its own."""
ROOMY = 6
"""Nodes for three members, two spares and the operator; on fewer a job has two members and one spare."""
HERE = Path(__file__).parent
SPEC = f"""
workers: {{accelerator: {{device: cpu}}}}
trainer:
  model: {{preset: Tiny}}
  data: {{sequenceLength: 32, tokenizer: {{vocabSize: 512}}, cacheDirectory: /cache}}
  batch: {{globalSize: {BATCH}, microSize: 2}}
  steps: {STEPS}
  schedule: {{warmupSteps: 20}}
  monitor: {{tensorboard: false, recordSamples: true}}
checkpoint: {{durable: {{everySteps: 20, everySeconds: 86400, keepLast: 3}}}}
recovery:
  rescaleAfterSeconds: 20
  gracePeriodSeconds: 20
  hang: {{stepFloorSeconds: 3}}
  budgets: {{process: {{maxFailures: 1000}}, infrastructure: {{maxFailures: 1000}}}}
"""
_FEW_STEPS = 500
"""How far the reference goes as long as no row needs more."""
_CURVE_PARTS = ("models", "data", "backends", "loop")


class SkipRowError(Exception):
    """The row cannot be played here; the text says why."""


class Stage:
    """One cluster for all rows."""

    def __init__(self, site: Site, out: Path, say: Callable[[str], None]) -> None:
        self.site = site
        self.out = out
        self.say = say
        self.api = Api(site)
        self.operator = OperatorPods(site, self.api)
        self._roomy = self.local or len(site.worker_nodes()) >= ROOMY
        self._references: dict[str, dict[int, float]] = {}
        self._numbers = itertools.count(int(time.time()) % 1_000_000)

    def __enter__(self) -> Self:
        faults = self.site.shared / "cache" / "faults"
        for folder in (faults.parent, faults, faults / "lib"):
            folder.mkdir(mode=0o777, exist_ok=True)
            folder.chmod(0o777)
        shutil.copy(HERE / "trainium_saboteur.py", faults / "lib")
        install_operator(self.site, {"statusIntervalSeconds": 1, "replicas": 1})
        self.say("the operator is installed")
        make_namespace(self.site, NAMESPACE)
        return self

    def __exit__(self, *_: object) -> None:
        self.api.__exit__()

    @property
    def local(self) -> bool:
        """Whether this is the development cluster, where all faults can be made."""
        return self.site.cluster is not None

    @property
    def size(self) -> int:
        """Workers of a job: on a small cluster one node is left for a spare."""
        return 3 if self._roomy else 2

    @property
    def spares(self) -> str:
        """Workers outside the membership, as a part of a spec: a second one warms up while the first is used."""
        return f"workers: {{spares: {2 if self._roomy else 1}}}"

    def needs_room(self) -> None:
        """For rows with three members and two spares; raises SkipRowError where there are too few nodes."""
        if not self._roomy:
            raise SkipRowError(f"{ROOMY} nodes are needed")

    # --- jobs ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def job(
        self, name: str, change: str = "", *, environment: dict[str, str] | None = None, pace: float = PACE_SECONDS
    ) -> Iterator[Patient]:
        """A job with a saboteur; removed at the end."""
        unique = f"{name}-{next(self._numbers)}"
        orders = self.site.shared / "cache" / "faults" / f"{NAMESPACE}-{unique}"
        orders.mkdir(mode=0o777)
        orders.chmod(0o777)
        variables = {
            "PYTHONPATH": "/cache/faults/lib",
            "TRAINIUM_RANK_ENTRY": "trainium_saboteur:main",
            "TRAINIUM_FAULTS_DIR": f"/cache/faults/{orders.name}",
            "TRAINIUM_FAULTS_PACE": f"{pace:g}",
        }
        job = Job(
            self.site,
            NAMESPACE,
            unique,
            merged_yaml(SPEC, f"workers: {{replicas: {self.size}}}", change),
            environment=variables | (environment or {}),
        )
        spares = int(job.manifest["spec"]["workers"].get("spares", 0))
        patient = Patient(self.site, self.api, job, orders, spares)
        job.apply()
        try:
            yield patient
        finally:
            patient.remove()
            shutil.rmtree(job.folder, ignore_errors=True)

    def reference(self, size: int, steps: int, batch: int = BATCH) -> dict[int, float]:
        """Step -> loss of the job, undisturbed, at this size and global batch, for at least `steps` steps.

        Computed once for a state of the trainer's code, and no longer than some row needed.
        """
        name = f"reference-{size}" if batch == BATCH else f"reference-{size}-{batch}"
        path = self.out / f"{name}-{curve_digest()}.json"
        known = self._references.get(path.name) or _losses_of(path)
        if len(known) < steps:
            wanted = _FEW_STEPS if steps <= _FEW_STEPS else STEPS
            self.say(f"an undisturbed run of {wanted} steps at size {size}, to compare the curves with")
            trainer = f"{{monitor: {{recordSamples: false}}, batch: {{globalSize: {batch}}}}}"
            change = f"workers: {{replicas: {size}}}\ntrainer: {trainer}"
            with self.job(name, change, pace=0.0) as patient:
                patient.until_step(wanted, 900)
                known = {step: record["loss"] for step, record in patient.records().items()}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(known))
        self._references[path.name] = known
        return known

    def check_curve(self, patient: Patient, size: int, tolerance: float = 0.0, batch: int = BATCH) -> list[str]:
        """What is wrong with the curve and the samples of a job, as sentences: nothing, if all is well."""
        records = patient.records()
        newest = max(records, default=0)
        reference = self.reference(size, newest, batch)
        missing = [step for step in range(1, newest + 1) if step not in records]
        wrong = [f"steps are missing in the history: {missing[:5]}"] if missing else []
        worst = max(((_difference(records[step]["loss"], reference[step]), step) for step in records), default=(0.0, 0))
        if worst[0] > tolerance:
            wrong.append(f"the curve differs from the undisturbed one: by {worst[0]:.1e} (relative) at step {worst[1]}")
        whole = _whole_steps(patient.job.folder)
        if odd := _odd_steps(patient.job.folder, whole, batch):
            wrong.append(f"samples were left out or seen twice within the first {whole} steps: {'; '.join(odd[:5])}")
        return wrong

    def keep_evidence(self, patient: Patient, name: str) -> None:
        """Write down what a person would look at when a run got stuck: objects, events and logs."""
        folder = self.out / "stuck" / name
        folder.mkdir(parents=True, exist_ok=True)
        namespace = patient.job.namespace
        inside = ("-n", namespace)
        commands = {
            "job.yaml": ("get", "trainingjob", patient.job.name, *inside, "-o", "yaml"),
            "pods.txt": ("get", "pods,configmaps,poddisruptionbudgets", *inside, "-o", "wide"),
            "nodes.txt": ("get", "nodes", "-o", "wide"),
            "events.txt": ("get", "events", *inside, "--sort-by=.metadata.creationTimestamp"),
            "operator.log": ("logs", "-n", OPERATOR_NAMESPACE, f"deployment/{RELEASE}", "--tail=400"),
        }
        with contextlib.suppress(ApiError):
            names = [pod["metadata"]["name"] for pod in patient.pods()]
            commands |= {f"{pod}.log": ("logs", pod, *inside, "--tail=400") for pod in names}
        for file, command in commands.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                done = self.site.run("kubectl", *command, seconds=20)
                (folder / file).write_text(done.stdout + done.stderr)

    # --- nodes -----------------------------------------------------------------------------------------------------

    def renew(self, node: str) -> None:
        """Put a new node in the place of a spoilt one; on a cluster that is not ours: give it its power back."""
        cluster = self.site.cluster
        if cluster is None:
            if node in self.site.powerless:
                self.site.power_on(node)
            return
        with contextlib.suppress(Exception):
            cluster.faults.thaw_node(node)
        cluster.add_node(NodeSpec(name=f"node-{next(self._numbers)}", cpu="4", memory="8Gi"), wait=False)
        with contextlib.suppress(Exception):
            cluster.faults.kill_node(node)
        cluster.supervisor({"op": "forget-node", "node": node})
        self.api.delete(f"/api/v1/nodes/{node}")

    def cordon(self, node: str, *, on: bool = True) -> None:
        """Let no new pods onto a node, or let them again."""
        self.api.patch(f"/api/v1/nodes/{node}", cordon_of(on=on))

    def cordoned(self) -> list[str]:
        """Nodes that take no new pods."""
        nodes = self.api.get("/api/v1/nodes")["items"]
        return [node["metadata"]["name"] for node in nodes if node["spec"].get("unschedulable")]

    def forget_nodes(self) -> None:
        """Release all machines that the fleet's memory holds something against, as a person may: rows stand alone."""
        self.api.delete(f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/configmaps/{RELEASE}-quarantine")

    def taint(self, node: str, key: str, effect: str) -> None:
        """Add a taint, as a termination handler does."""
        self.site.kubectl("taint", "node", node, f"{key}=fault-table:{effect}", "--overwrite")

    def untaint(self, node: str, key: str) -> None:
        """Take it away; nothing happens where it is not."""
        self.site.run("kubectl", "taint", "node", node, f"{key}-")

    def call_bad(self, node: str, *, bad: bool = True) -> None:
        """A health monitor's condition on the Node object, or its end."""
        kind, reason = "NeuronHealth", "NeuronHasError_HBM_UNCORRECTABLE_ERROR"
        if self.site.cluster is not None and bad:
            self.site.cluster.faults.set_condition(node, kind, "True", reason)
        elif self.site.cluster is not None:
            self.site.cluster.faults.clear_condition(node, kind)
        else:
            said = {"status": "True", "reason": reason} if bad else {"$patch": "delete"}
            change = json.dumps({"status": {"conditions": [{"type": kind, **said}]}})
            self.site.kubectl("patch", "node", node, "--subresource=status", "--type=strategic", "-p", change)

    def cut_off(self, node: str, *, off: bool = True) -> None:
        """Cut a node's links to the API and to its peers, or mend them; raises SkipRowError where there is no way."""
        if self.site.cluster is not None:
            faults = self.site.cluster.faults
            (faults.partition_node if off else faults.heal_node)(node)
            return
        command = self.site.settings.get("cutOff" if off else "mend")
        if not command:
            raise SkipRowError("the site's settings have no cutOff and mend commands")
        subprocess.run(command.format(node=node), shell=True, check=True, timeout=patience.patient(60))

    @property
    def faults(self) -> Faults:
        """The fault controls of the development cluster; raises SkipRowError elsewhere."""
        if self.site.cluster is None:
            raise SkipRowError("only the development cluster's nodes can be told to do this")
        return self.site.cluster.faults

    def kill_agent(self, namespace: str, pod: str, node: str) -> None:
        """SIGKILL of a worker's main process, from outside its container."""
        if self.site.cluster is not None:
            self.site.cluster.faults.kill_container(namespace, pod)
            return
        shell = self.site.settings.get("nodeShell")
        if not shell:
            raise SkipRowError("the site's settings have no nodeShell command")
        command = f"{shell.format(node=node)} pkill -9 -o -f trainium-agent"
        subprocess.run(command, shell=True, check=True, timeout=patience.patient(60))

    def needs_name_servers(self) -> None:
        """For rows in which these fall silent; raises SkipRowError where there is no way."""
        if self.site.cluster is not None:
            raise SkipRowError("the development cluster has no name server; test_name_server.py brings one")
        if not {"dnsStop", "dnsGo"} <= self.site.settings.keys():
            raise SkipRowError("the site's settings have no dnsStop and dnsGo commands")

    @contextlib.contextmanager
    def silent_names(self) -> Iterator[None]:
        """No name server of the cluster answers, after `needs_name_servers`."""
        stop, go = (self.site.settings.get(key, "") for key in ("dnsStop", "dnsGo"))
        try:
            subprocess.run(stop, shell=True, check=True, timeout=patience.patient(60))
            yield
        finally:
            # A name server that its kubelet has started anew meanwhile needs no help.
            subprocess.run(go, shell=True, check=False, timeout=patience.patient(60))

    def keep_operator(self, node: str) -> bool:
        """Before a node is lost: see that the operator is not on it; whether it had to move."""
        if all(pod["spec"].get("nodeName") != node for pod in self.operator.pods()):
            return False
        with self.site.cordoned(node):
            self.operator.kill()
            time.sleep(1)
            self.operator.settle(90)
        return True


def merged_yaml(*parts: str) -> str:
    """Mappings merged in order, as text."""
    result: dict[str, Any] = {}
    for part in parts:
        result = merged(result, yaml.safe_load(part) or {})
    return str(yaml.safe_dump(result))


def _losses_of(path: Path) -> dict[int, float]:
    if not path.exists():
        return {}
    return {int(step): loss for step, loss in json.loads(path.read_text()).items()}


def _odd_steps(folder: Path, steps: int, batch: int) -> list[str]:
    """Of the first `steps` steps those that did not see a whole batch, each sample once; within the first epoch."""
    seen: dict[int, list[tuple[str, list[int]]]] = {}
    for path in sorted(folder.glob("samples-*.jsonl")):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                seen.setdefault(record["step"], []).append((path.stem, record["samples"]))
    odd, before = [], set[int]()
    for step in range(1, steps + 1):
        every = [sample for _, samples in seen.get(step, []) for sample in samples]
        if len(every) != batch or len(set(every) - before) != batch:
            odd.append(f"step {step}: {seen.get(step, [])}")
        before.update(every)
    return odd


def _whole_steps(folder: Path) -> int:
    """Steps that every rank has surely recorded: the job may be in the middle of one when it is looked at."""
    newest = []
    for path in folder.glob("samples-*.jsonl"):
        lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
        newest.append(json.loads(lines[-1])["step"] if lines else 0)
    return max(0, max(newest, default=0) - 2)


def _difference(loss: float | None, reference: float) -> float:
    return float("inf") if loss is None else abs(loss - reference) / abs(reference)


def curve_digest() -> str:
    """Changes whenever the trainer could compute another curve."""
    package = ROOT / "trainer_image" / "trainium_trainer"
    digest = hashlib.sha256(SPEC.encode())
    for part in _CURVE_PARTS:
        path = package / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
