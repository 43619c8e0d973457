"""Turn a job of another platform into a TrainingJob, with a comment at each decision."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

from trainium_client.importing.source_job import QUEUE_LABEL, YEAR_SECONDS
from trainium_contract.accelerators import INSTANCES
from trainium_contract.definition.crd import build_object_schema
from trainium_contract.job import MAX_NAME
from trainium_contract.wire.worker_env import GROUP, KIND, VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_client.importing.source_job import SourceJob

_NEURON = "aws.amazon.com/"
_DROPPED_ANNOTATIONS = ("kubectl.kubernetes.io/last-applied-configuration",)
_DROPPED_LABELS = ("kueue.x-k8s.io/",)
_AUTO_RESUME = "sagemaker.amazonaws.com/"
_SETTINGS = (
    "recovery.maxInPlaceRestarts",
    "recovery.rescaleAfterSeconds",
    "recovery.gracePeriodSeconds",
    "scheduling.queueName",
    "scheduling.gangTimeoutSeconds",
    "scheduling.priorityClassName",
    "cleanPodPolicy",
    "activeDeadlineSeconds",
    "startupDeadlineSeconds",
    "ttlSecondsAfterFinished",
)
"""Fields that are set as the source has them, in the order of the manifest."""


@dataclass(slots=True)
class ImportedJob:
    """A TrainingJob as an import builds it: the object, and comments by the path of the field that they precede."""

    document: dict[str, Any]
    header: list[str] = field(default_factory=list)
    comments: dict[str, list[str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    """Sentences on fields that a person has to fill in or to change before the job can run."""

    def set(self, path: str, value: Any, comment: str = "") -> None:
        """Set a field by its dotted path, with a comment."""
        *parents, last = path.split(".")
        target = self.document
        for name in parents:
            target = target.setdefault(name, {})
        target[last] = value
        self.add_comment(path, comment)

    def add_comment(self, path: str, text: str) -> None:
        """Add a comment before a field; at the end of its object if the field is absent."""
        if text and text not in self.comments.setdefault(path, []):
            self.comments[path].append(text)

    def require(self, path: str, text: str) -> None:
        """Report a field that a person has to fill in or to change."""
        *parents, name = path.split(".")
        target = self.document
        for parent in parents:
            target = target.get(parent, {})
        action = "CHANGE" if name in target else "FILL IN"
        self.add_comment(path, f"{action} {name}: {text}")
        self.missing.append(f"{action.lower()} {path}: {text}")


def convert(source: SourceJob, *, instance_type: str = "", image: str = "") -> ImportedJob:
    """Return the TrainingJob; the options replace what the source does not know or what does not fit here."""
    job = ImportedJob({"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": {}, "spec": {}})
    _set_metadata(job, source)
    if source.settings.get("suspend"):
        job.set("spec.suspend", True)
    _set_workers(job, source)
    _set_accelerator(job, source, instance_type)
    if template := _add_environment(_clean_template(job, source, instance_type), source.program.environment):
        job.set("spec.workers.template", template)
        _check_requests(job, template, job.document["spec"]["workers"].get("accelerator", {}).get("instanceType", ""))
    _set_program(job, source, image)
    if source.pod.storage:
        job.set("spec.checkpoint.storage", source.pod.storage)
    _set_settings(job, source)
    for note in (*source.program.notes, *source.pod.notes, *source.notes):
        if note.field:
            job.add_comment(note.field, note.text)
        else:
            job.header.append(note.text)
    return job


def _set_metadata(job: ImportedJob, source: SourceJob) -> None:
    name = (
        re.sub(r"-+", "-", re.sub(r"[^a-z0-9-]", "-", source.name.lower())).lstrip("-0123456789")[:MAX_NAME].rstrip("-")
    )
    name = name or "training"
    changed = (
        f"was {source.name}: a name has at most {MAX_NAME} lowercase letters, digits and -"
        if source.name
        else "the input has no name"
    )
    job.set("metadata.name", name, "" if name == source.name else changed)
    if source.namespace:
        job.set("metadata.namespace", source.namespace)
    labels = {key: value for key, value in source.labels.items() if not key.startswith(_DROPPED_LABELS)}
    if labels:
        job.set("metadata.labels", labels)
    for key, value in source.labels.items():
        if key == "kueue.x-k8s.io/priority-class":
            job.header.append(
                f"label {key} {value}: give scheduling.priorityClassName, which is the priority in the queue"
            )
    annotations = {}
    for key, value in source.annotations.items():
        if key.startswith(_AUTO_RESUME):
            job.header.append(f"annotation {key}: the operator always replaces failed nodes, within recovery.budgets")
        elif key not in _DROPPED_ANNOTATIONS:
            annotations[key] = value
    if annotations:
        job.set("metadata.annotations", annotations)


def _set_workers(job: ImportedJob, source: SourceJob) -> None:
    program = source.program
    nodes = source.nodes
    least, most = source.min_nodes, source.max_nodes
    if most is None and program.min_nodes is not None:
        least, most = program.min_nodes, program.max_nodes
    comment = ""
    if (
        program.max_nodes is not None
        and program.max_nodes != nodes
        and source.min_nodes is None
        and program.min_nodes is None
    ):
        comment = f"torchrun had --nnodes {program.max_nodes}; the {source.kind} has {nodes}"
    if most is not None and nodes > most:
        comment, nodes = f"{nodes} in the {source.kind}, above its largest size", most
    job.set("spec.workers.replicas", nodes, comment)
    if least is not None:
        if least > nodes:
            job.add_comment("spec.workers.replicas", f"{nodes} in the {source.kind}, below its smallest size")
            nodes = least
            job.set("spec.workers.replicas", nodes)
        job.set(
            "spec.workers.minReplicas",
            least,
            "the program starts again at another world size, and its checkpoint must load there (program.resize)",
        )
    if most is not None:
        job.set("spec.workers.maxReplicas", max(most, nodes))
    if source.spares:
        job.set("spec.workers.spares", source.spares)
    elif nodes > 1:
        job.add_comment(
            "spec.workers.spares", "spares: 1 would keep a warm worker that replaces a lost node in seconds"
        )


def _set_accelerator(job: ImportedJob, source: SourceJob, instance_type: str) -> None:
    path, devices = "spec.workers.accelerator", source.pod.devices
    asked = ", ".join(f"{count} {name}" for name, count in (devices or {}).items())
    chosen = instance_type or (source.pod.instance_type if source.pod.instance_type in INSTANCES else "")
    if chosen:
        reason = "of --instance-type" if instance_type else "of the node selector"
        job.set(path, {"instanceType": chosen}, f"{reason}; each pod had {asked}" if asked else reason)
    elif devices and any(name.startswith(_NEURON) for name in devices):
        accelerator: dict[str, Any] = {"resources": devices}
        if source.program.processes:
            accelerator["coresPerNode"] = source.program.processes
        job.set(
            path, accelerator, "instanceType (--instance-type) in place of resources also sets cores and selects nodes"
        )
        if not source.program.processes:
            job.add_comment(path, "without coresPerNode or instanceType one process starts on each node")
    elif devices is not None and not devices:
        job.set(path, {"device": "cpu"}, "the pods have no device")
    else:
        had = f"each node had {asked}" if asked else "the input does not name devices"
        job.require(
            path,
            f"{had}. Give {{instanceType: TYPE}} of Trainium (option --instance-type), or device and coresPerNode",
        )


def _clean_template(job: ImportedJob, source: SourceJob, instance_type: str) -> dict[str, Any]:
    """Return the template without what keeps the workers from nodes of the chosen type."""
    template = {**source.pod.template, "spec": {**source.pod.template.get("spec", {})}}
    spec = template["spec"]
    previous = source.pod.instance_type
    if previous and not instance_type and previous not in INSTANCES:
        spec["nodeSelector"] = {"node.kubernetes.io/instance-type": previous, **spec.get("nodeSelector", {})}
    if instance_type:
        selector = {k: v for k, v in spec.get("nodeSelector", {}).items() if not _is_of_gpu(k)}
        tolerations = [
            toleration
            for toleration in spec.get("tolerations") or []
            if not (isinstance(toleration, dict) and _is_of_gpu(str(toleration.get("key", ""))))
        ]
        dropped = len(selector) < len(spec.get("nodeSelector", {})) or len(tolerations) < len(
            spec.get("tolerations") or []
        )
        for key, value in (("nodeSelector", selector), ("tolerations", tolerations)):
            if value:
                spec[key] = value
            else:
                spec.pop(key, None)
        if dropped or previous not in ("", instance_type):
            job.header.append(
                f"node selectors and tolerations of the former nodes {previous}".rstrip()
                + ": the instance type selects nodes"
            )
    return {key: value for key, value in template.items() if value}


def _add_environment(template: dict[str, Any], environment: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """Return the template with variables that were assigned before the launcher."""
    if not environment:
        return template
    spec = template.get("spec", {})
    first, *others = spec.get("containers") or [{"name": "worker"}]
    env = [*first.get("env", []), *({"name": name, "value": value} for name, value in environment)]
    return {**template, "spec": {**spec, "containers": [{**first, "env": env}, *others]}}


def _check_requests(job: ImportedJob, template: dict[str, Any], instance_type: str) -> None:
    """Report requests that no node of the instance type can satisfy."""
    instance = INSTANCES.get(instance_type)
    if instance is None or not instance.host_bytes:
        return
    amounts: dict[str, float] = {}
    for container in template.get("spec", {}).get("containers", []):
        resources = container.get("resources") or {}
        for name, amount in {**(resources.get("limits") or {}), **(resources.get("requests") or {})}.items():
            amounts[name] = amounts.get(name, 0.0) + _parse_quantity(amount)
    for name, most, unit, size in (("memory", instance.host_bytes, "GiB", 1 << 30), ("cpu", instance.vcpus, "CPUs", 1)):
        if amounts.get(name, 0.0) > most:
            job.require(
                "spec.workers.template",
                f"lower the {name} of the containers: a {instance_type} has {most // size} {unit}, they ask for "
                f"{amounts[name] / size:g}",
            )


def _parse_quantity(value: object) -> float:
    """Return a quantity of Kubernetes as a number; 0 for none."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?)(m|[kMGTP]|[KMGTP]i)?", str(value))
    if match is None:
        return 0.0
    unit = match[2] or ""
    power = "kMGTP".find(unit[:1].replace("K", "k")) + 1 if unit and unit != "m" else 0
    return float(match[1]) * (0.001 if unit == "m" else (1024.0 if unit.endswith("i") else 1000.0) ** power)


def _is_of_gpu(key: str) -> bool:
    return key.startswith(("nvidia.com/", "cloud.google.com/gke-accelerator", "k8s.amazonaws.com/accelerator"))


def _set_program(job: ImportedJob, source: SourceJob, image: str) -> None:
    program, pod = source.program, source.pod
    path = "spec.program"
    if image or pod.image:
        comment = (
            "was built for other devices: the image needs torch for the devices above" if asks_for_gpus(source) else ""
        )
        job.set(f"{path}.image", image or pod.image, "" if image else comment)
    else:
        job.require(f"{path}.image", "the image with the program (option --image)")
    if program.command:
        job.set(f"{path}.command", list(program.command))
    else:
        job.require(f"{path}.command", "the image's own entrypoint is not known here; give the command that it runs")
    if program.args:
        job.set(f"{path}.args", list(program.args))
    if pod.working_directory:
        job.set(f"{path}.workingDirectory", pod.working_directory)
    _set_processes(job, source, on_neuron="instanceType" in job.document["spec"]["workers"].get("accelerator", {}))
    job.add_comment(
        f"{path}.checkpoints",
        "give checkpoints: {path: ..., committed: ...} and progress, so that status, drains and `why` know them",
    )


def _set_processes(job: ImportedJob, source: SourceJob, *, on_neuron: bool) -> None:
    path, program = "spec.program.processesPerNode", source.program
    gpus = (source.pod.devices or {}).get("nvidia.com/gpu")
    if on_neuron and gpus == str(program.processes):
        job.add_comment(
            path, f"processesPerNode was {gpus}, one for each GPU; left out: one for each core, so the batch may change"
        )
    elif program.one_for_each_device:
        job.add_comment(path, "processesPerNode is left out: one process for each core of the accelerator")
    elif program.launched or program.processes:
        count = program.processes or 1
        same = gpus == str(count) and count > 1
        job.set(path, count, "one for each GPU, as before; leave it out for one for each core" if same else "")
    elif program.command:
        job.set(
            path,
            1,
            f"a {source.kind} without torchrun starts one process on each node; leave it out for one for each core",
        )


def asks_for_gpus(source: SourceJob) -> bool:
    """Return whether the pods of the source had GPUs."""
    return any("nvidia" in name or "amd.com" in name for name in source.pod.devices or {})


def _set_settings(job: ImportedJob, source: SourceJob) -> None:
    """Set what has a counterpart; where a number is out of its bounds, the nearest one with a comment."""
    if source.budget is not None:
        window = min(max(source.budget.window_seconds, 1), YEAR_SECONDS)
        job.set(
            "spec.recovery.budgets.process",
            {"maxFailures": source.budget.max_failures, "windowSeconds": window},
            f"{source.budget.reason}; faults of nodes and devices do not count here (budgets.infrastructure)",
        )
    settings = {name: value for name, value in source.settings.items() if value is not None}
    settings = source.pod.settings | settings
    if queue := source.labels.get(QUEUE_LABEL):
        settings["scheduling.queueName"] = queue
    if {"startupDeadlineSeconds", "activeDeadlineSeconds"} <= settings.keys():
        settings["startupDeadlineSeconds"] = min(settings["startupDeadlineSeconds"], settings["activeDeadlineSeconds"])
    spec = build_object_schema()["properties"]["spec"]
    for path in _SETTINGS:
        if path in settings:
            value = _clamp(settings[path], reduce(lambda node, name: node["properties"][name], path.split("."), spec))
            job.set(f"spec.{path}", value, f"was {settings[path]}" if value != settings[path] else "")


def _clamp(value: Any, schema: Mapping[str, Any]) -> Any:
    """Return the nearest value that the schema of a field accepts, if it is a number."""
    return min(max(value, schema["minimum"]), schema["maximum"]) if "minimum" in schema else value
