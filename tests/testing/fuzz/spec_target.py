"""Fuzz target: every field of the definition, as a user may write it.

A case is spec, status, labels and annotations of a job, and the gang API of the cluster.

Invariants:
- The job is read, or refused in one bounded sentence, and its size is decided.
- Its plans, from the first pods to the first generation, can be executed.
- The trainer accepts the configuration that is written for it.
- The spec round-trips.
"""

from typing import Any

import yaml

from tests.testing.api.recorded_jobs import recorded_object
from tests.testing.fuzz import objects
from tests.testing.fuzz.invariants import require
from tests.testing.fuzz.operator_harness import OperatorHarness
from tests.testing.fuzz.schemas import edge_values, example
from trainium_contract.definition.crd import build_object_schema
from trainium_contract.job import JOB_REQUIREMENTS, TrainingJobSpec
from trainium_contract.spec.roles import OTHER_NAMES
from trainium_contract.trainer.config import TrainingConfig
from trainium_contract.trainer.effects import TRAINER_REQUIREMENTS
from trainium_contract.wire.messages import HeartbeatRequest, RegisterRequest
from trainium_operator.plan.model import names
from trainium_operator.plan.model.actions import ApplyObject, Plan
from trainium_operator.plan.model.observed import JobView
from trainium_operator.plan.view.size import decide_size

Json = dict[str, Any]

LONGEST_REFUSAL = 4096
ROUNDS = 2
"""Plans of a case: pods, then the first generation; with `again` one more, while it trains."""
_PLAN_INTERVAL_SECONDS = 5.0


class SpecTarget:
    """See Target."""

    name = "spec"
    expected: frozenset[str] = frozenset()
    storable = True

    def seeds(self) -> list[Any]:
        """Return valid cases: a minimal job, the kinds of the examples, and one with every field."""
        schema = build_object_schema()["properties"]["spec"]
        spec = recorded_object("job")["spec"]
        fields = example(schema)
        program = _consistent_program(fields.pop("program"))
        roles = _consistent_roles(fields.pop("roles"))
        full = _consistent_spec(fields)
        sections = [{"spec": {**spec, key: value}} for key, value in full.items() if isinstance(value, dict)]
        return [
            {"spec": {}},
            {"spec": spec, "status": recorded_object("job")["status"]},
            {"spec": full, "again": True},
            {"spec": {"workers": full["workers"], "recovery": full["recovery"], "program": program, "roles": roles}},
            *sections,
            *_EXAMPLES,
        ]

    def values(self) -> dict[str, list[Any]]:
        """Return further values by key."""
        values_by_key = edge_values(build_object_schema()["properties"]["spec"])
        for key, values in _TEMPLATE_VALUES.items():
            values_by_key.setdefault(key, []).extend(values)
        return values_by_key

    async def run_case(self, case: Any) -> None:
        """Run a case; raise an error for a broken invariant."""
        if not isinstance(case, dict):
            return
        gang = case.get("gang")
        operator = OperatorHarness(gang if isinstance(gang, str) else "")
        await operator.open()
        metadata = case.get("metadata")
        job_metadata = {**(metadata if isinstance(metadata, dict) else {}), "uid": objects.JOB_UID}
        operator.deliver(
            "TrainingJob",
            {"metadata": job_metadata, "spec": _without_nulls(case.get("spec")), "status": case.get("status")},
        )
        for entry in operator.caches.jobs.store.snapshot().values():
            record = entry.view
            if record.view is None:
                require(bool(record.error or record.managed_elsewhere), "a job is refused without a reason")
                require(len(record.error) <= LONGEST_REFUSAL, f"a refusal of {len(record.error)} characters")
            else:
                _check_sizes_and_wire_form(record.view)
        again = case.get("again") is True
        for remaining in reversed(range(ROUNDS + again)):
            for job, plan in operator.plan_jobs():
                _check_trainer_configuration(plan, as_yaml=again)
                if remaining:
                    operator.apply_plan(job, plan)
            operator.now += _PLAN_INTERVAL_SECONDS
            _register_all(operator)
        operator.check_views()


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


def _consistent_spec(spec: Json) -> Json:
    """Return the spec with every field but those that exclude each other."""
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
    (source,) = data["sources"]
    data["sources"] = [{key: source[key] for key in source if key != left_out} for left_out in ("source", "hub")]
    model["ropeScaling"] |= {"highFrequencyFactor": 4, "fastTurns": 2}
    storage["hostPath"]["path"], storage["takeOver"] = "/a", "team/other"
    spec["trainer"]["artifacts"]["push"]["repo"] = "owner/name"
    data["examples"]["function"], data["examples"]["chat"]["date"] = "module:function", "2026-01-31"
    spec["trainer"]["neuron"]["extraCompilerFlags"] = ["--a"]
    spec["recovery"]["budgets"]["byCause"] = {"Hang": {"maxFailures": 3}}
    spec["suspend"] = False
    spec.pop("managedBy", None)
    return _with_effect(spec)


def _consistent_roles(roles: list[Json]) -> list[Json]:
    """Return the roles without the fields that only workers have, and without refused ones."""
    for role in roles:
        role["accelerator"].pop("claim", None)
    return [{name: value for name, value in role.items() if name not in OTHER_NAMES} for role in roles]


def _with_effect(spec: Json) -> Json:
    """Return the spec without the fields that another one leaves without effect."""
    trainer = {**spec["trainer"], "parallelism": spec["parallelism"], "checkpoint": spec["checkpoint"]}
    for table, root in ((TRAINER_REQUIREMENTS, trainer), (JOB_REQUIREMENTS, spec)):
        for requirement in table:
            if not any(switch.is_on(_find_value(root, switch.field)) for switch in requirement.switches):
                folder, _, name = requirement.field.rpartition(".")
                parent = _find_value(root, folder) if folder else spec["trainer"]
                if isinstance(parent, dict):
                    parent.pop(name, None)
    return spec


def _find_value(document: Json, path: str) -> Any:
    value: Any = document
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _consistent_program(program: Json) -> Json:
    """Return a program with every field, valid together."""
    program["command"], program["warm"] = ["python", "-m", "train"], "Never"
    program["workingDirectory"], program["progress"]["pattern"] = "/src", r"step: (?P<step>\d+)"
    program["checkpoints"] = {"path": "/checkpoints/run", "committed": "step-{step}/.metadata"}
    program["batch"] = {"globalSize": 1024, "microSize": 1}
    return program


def _without_nulls(value: Any) -> Any:
    """Remove nulls, which the API server does not store outside of the pod template."""
    if not isinstance(value, dict):
        return value
    kept = {key: inner for key, inner in value.items() if inner is not None}
    return {key: inner if key == "template" else _without_nulls(inner) for key, inner in kept.items()}


def _check_sizes_and_wire_form(job: JobView) -> None:
    """Check the rules that Python evaluates, and that the spec round-trips."""
    decide_size(job.spec)
    wire = job.spec.to_wire()
    require(TrainingJobSpec.model_validate(wire).to_wire() == wire, "a spec that does not round-trip")
    try:
        job.spec.sizes_to_compile()
        job.spec.sizes_for_spares()
    except ValueError:
        return  # the condition SizeLegal reports contradictory sizes


def _check_trainer_configuration(plan: Plan, *, as_yaml: bool) -> None:
    """Check that the trainer accepts its configuration, read as YAML or, ten times as fast, as JSON."""
    for action in plan.actions:
        if isinstance(action, ApplyObject) and names.TRAINER_KEY in action.manifest.get("data", {}):
            text = action.manifest["data"][names.TRAINER_KEY]
            if as_yaml:
                TrainingConfig.model_validate(yaml.load(text, Loader=yaml.CSafeLoader))
            else:
                TrainingConfig.model_validate_json(text)


def _register_all(operator: OperatorHarness) -> None:
    """Register a warm agent of each pod."""
    for observed in operator.observe_jobs():
        job = observed.job
        for pod in observed.pods:
            identity = {"namespace": job.namespace, "job": job.name, "podName": pod.name, "podUid": pod.uid}
            operator.state.register(job.id, RegisterRequest.model_validate({**objects.REGISTER, **identity}))
            idle = {"generation": operator.state.get_published_generation(job.id), "phase": "Standby", "ready": True}
            operator.state.record_heartbeat(job.id, HeartbeatRequest.model_validate({**identity, **idle}))
