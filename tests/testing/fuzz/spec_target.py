"""Every field of the definition, as a person may write it: read, ruled on, planned from nothing, and written out.

A case is a job's spec and status, labels and annotations, and which gang API the cluster has. Invariants: the job is
read, or refused in one bounded sentence; its size is decided; its plans, from the first pods to the first generation,
can be carried out; the trainer's own reader takes the configuration that is written for it; and the spec reads back as
it was written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from tests.testing.api.recorded_jobs import recorded
from tests.testing.fuzz import objects
from tests.testing.fuzz.invariants import require
from tests.testing.fuzz.schemas import edges, everything
from tests.testing.fuzz.world import World
from trainium_contract.definition.crd import object_schema
from trainium_contract.job import TrainingJobSpec
from trainium_contract.trainer.config import TrainingConfig
from trainium_contract.wire.messages import HeartbeatRequest, RegisterRequest
from trainium_operator.plan.model import names
from trainium_operator.plan.model.actions import ApplyObject
from trainium_operator.plan.view.size import decide_size

if TYPE_CHECKING:
    from trainium_operator.plan.model.actions import Plan
    from trainium_operator.plan.model.observed import JobView

Json = dict[str, Any]

LONGEST_REFUSAL = 4096
ROUNDS = 2
"""From nothing: pods, then who trains; a case may ask for one more, training."""
_BETWEEN = 5.0


class SpecTarget:
    """See Target."""

    name = "spec"
    expected: frozenset[str] = frozenset()
    storable = True

    def seeds(self) -> list[Any]:
        """Return a job with few fields, the examples' kinds of jobs, and one with every field."""
        schema = object_schema()["properties"]["spec"]
        spec = recorded("job")["spec"]
        every = everything(schema)
        program = _consistent_program(every.pop("program"))
        full = _consistent(every)
        sections = [{"spec": {**spec, key: value}} for key, value in full.items() if isinstance(value, dict)]
        return [
            {"spec": {}},
            {"spec": spec, "status": recorded("job")["status"]},
            {"spec": full, "again": True},
            {"spec": {"workers": full["workers"], "recovery": full["recovery"], "program": program}},
            *sections,
            *_EXAMPLES,
        ]

    def values(self) -> dict[str, list[Any]]:
        """Further values by key."""
        found = edges(object_schema()["properties"]["spec"])
        for key, values in _TEMPLATE_VALUES.items():
            found.setdefault(key, []).extend(values)
        return found

    async def run_case(self, case: Any) -> None:
        """Raises whatever should not happen."""
        if not isinstance(case, dict):
            return
        gang = case.get("gang")
        world = World(gang if isinstance(gang, str) else "")
        await world.open()
        metadata = case.get("metadata")
        named = {**(metadata if isinstance(metadata, dict) else {}), "uid": objects.JOB_UID}
        world.see(
            "TrainingJob", {"metadata": named, "spec": _without_nulls(case.get("spec")), "status": case.get("status")}
        )
        for entry in world.caches.jobs.store.snapshot().values():
            record = entry.view
            if record.view is None:
                require(bool(record.error or record.elsewhere), "a job is refused without a word")
                require(len(record.error) <= LONGEST_REFUSAL, f"a refusal of {len(record.error)} characters")
            else:
                _ruled(record.view)
        again = case.get("again") is True
        for left in reversed(range(ROUNDS + again)):
            for job, made in world.planned():
                _configured(made, as_yaml=again)
                if left:
                    world.obey(job, made)
            world.now += _BETWEEN
            _register_all(world)
        world.check_views()


_EXAMPLES: tuple[Json, ...] = (
    {
        "gang": "Coscheduling",
        "spec": {
            "workers": {
                "replicas": 4,
                "minReplicas": 2,
                "maxReplicas": 8,
                "spares": 1,
                "accelerator": {"instanceType": "trn1.32xlarge"},
            },
            "elasticity": {"idleNodes": "Take"},
            "parallelism": {"tensor": 8, "pipeline": 2},
            "trainer": {
                "model": {"weights": "/data/base"},
                "tuning": {"method": "LoRA"},
                "data": {"source": "/data/text", "validation": {"fraction": 0.1}},
                "batch": {"globalSize": 1024, "microSize": 1, "tolerance": 0.05},
                "epochs": 2,
            },
            "checkpoint": {"storage": {"uri": "s3://bucket/prefix"}},
            "precompile": {"enabled": True, "sizes": "Background"},
            "scheduling": {"queueName": "q", "priorityClassName": "high"},
        },
    },
    {
        "gang": "SchedulingGroup",
        "spec": {
            "workers": {
                "replicas": 2,
                "accelerator": {"instanceType": "trn2u.48xlarge", "claim": {"count": 16}},
                "template": objects.TEMPLATE,
            },
            "recovery": {"rules": [{"exitCodes": [70], "cause": "Device", "action": "AvoidNode"}]},
            "trainer": {"batch": {"globalSize": 4096}},
        },
    },
)
_TEMPLATE_VALUES: dict[str, list[Any]] = {
    "name": ["worker", "precompile", "checkpoints", "config", "token", "cache"],
    "gang": ["SchedulingGroup", "WorkloadRef", "Coscheduling", ""],
    "replicas": [1, 2, 3, 64],
    "minReplicas": [1, 2, None],
    "maxReplicas": [1, 2, 64, None],
    "containers": [[{"name": "worker"}, {"name": "worker"}], [{"image": "x"}], [{}], None],
    "mountPath": ["/checkpoints", "/dev/shm", "/"],
    "$patch": ["replace", "delete"],
}


def _consistent(spec: Json) -> Json:
    """The spec with every field, without those that exclude each other."""
    model, storage = spec["trainer"]["model"], spec["checkpoint"]["storage"]
    for key in ("path", "weights"):
        model.pop(key, None)
    for key in ("uri", "persistentVolumeClaim"):
        storage.pop(key, None)
    spec["trainer"]["tuning"]["lora"].pop("adapter", None)
    data = spec["trainer"]["data"]
    for key in ("source", "hubSplit"):
        data["validation"].pop(key, None)
    data.pop("hub", None)
    (each,) = data["sources"]
    data["sources"] = [{key: each[key] for key in each if key != left_out} for left_out in ("source", "hub")]
    model["ropeScaling"] |= {"highFrequencyFactor": 4, "fastTurns": 2}
    storage["hostPath"]["path"], storage["takeOver"] = "/a", "team/other"
    spec["trainer"]["artifacts"]["push"]["repo"] = "owner/name"
    data["examples"]["function"] = "module:function"
    spec["trainer"]["neuron"]["extraCompilerFlags"] = ["--a"]
    spec["recovery"]["budgets"]["byCause"] = {"Hang": {"maxFailures": 3}}
    spec["suspend"] = False
    spec.pop("managedBy", None)
    return spec


def _consistent_program(program: Json) -> Json:
    """Every field of a program, legal together."""
    program["command"], program["warm"] = ["python", "-m", "train"], ["torch"]
    program["workingDirectory"], program["progress"]["pattern"] = "/src", r"step: (?P<step>\d+)"
    program["checkpoints"] = {"path": "/checkpoints/run", "committed": "step-{step}/.metadata"}
    program["batch"] = {"globalSize": 1024, "microSize": 1}
    return program


def _without_nulls(value: Any) -> Any:
    """The API server stores no null in a field of ours, of which none may be null; a pod template is kept as it is."""
    if not isinstance(value, dict):
        return value
    kept = {key: inner for key, inner in value.items() if inner is not None}
    return {key: inner if key == "template" else _without_nulls(inner) for key, inner in kept.items()}


def _ruled(job: JobView) -> None:
    """The rules that Python evaluates, and the wire form."""
    decide_size(job.spec)
    wire = job.spec.to_wire()
    require(TrainingJobSpec.model_validate(wire).to_wire() == wire, "a spec that reads back as another")
    try:
        job.spec.sizes_to_compile()
        job.spec.sizes_for_spares()
    except ValueError:
        return  # it contradicts itself, which SizeLegal reports


def _configured(made: Plan, *, as_yaml: bool) -> None:
    """The trainer reads what is written for it: as YAML, or, which is ten times as fast, as the JSON that it is."""
    for action in made.actions:
        if isinstance(action, ApplyObject) and names.TRAINER_KEY in action.manifest.get("data", {}):
            text = action.manifest["data"][names.TRAINER_KEY]
            if as_yaml:
                TrainingConfig.model_validate(yaml.load(text, Loader=yaml.CSafeLoader))
            else:
                TrainingConfig.model_validate_json(text)


def _register_all(world: World) -> None:
    """Agents of all pods are there, warm."""
    for seen in world.observed():
        job = seen.job
        for pod in seen.pods:
            heartbeat_changed = {"namespace": job.namespace, "job": job.name, "podName": pod.name, "podUid": pod.uid}
            world.state.register(job.id, RegisterRequest.model_validate({**objects.REGISTER, **heartbeat_changed}))
            idle = {"generation": world.state.published(job.id), "phase": "Standby", "ready": True}
            world.state.heartbeat(job.id, HeartbeatRequest.model_validate({**heartbeat_changed, **idle}))
