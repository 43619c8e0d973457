"""Run by either version with its own code: writes every message as full as it can be, and reads those of the other.

`write` prints what this version may say, `read` takes that from another one and prints what this version makes of it;
`make` takes the specs of jobs and prints what this version's operator makes for their workers, `start` takes that and
prints with what this version's workers would start. Nothing else of the tests is imported: the other version has none
of it.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

FROM_AGENTS = ("RegisterRequest", "HeartbeatRequest")
FROM_COORDINATOR = ("RegisterResponse", "HeartbeatResponse", "Membership", "ErrorResponse")
STATUS = "TrainingJobStatus"
_TEXTS = {"podIp": "10.0.0.1"}


def _module(*names: str) -> Any:
    """The first of these that this version has."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise SystemExit(f"none of {names} is there")


messages = _module("trainium_contract.wire.messages", "trainium_contract.messages")
job = _module("trainium_contract.job")


def full(schema: dict[str, Any], definitions: dict[str, Any], name: str = "") -> Any:
    """A value with every field, each unlike its default; of an enumeration the last, which came last."""
    if "$ref" in schema:
        schema = {**definitions[schema["$ref"].rsplit("/", 1)[1]], **{k: v for k, v in schema.items() if k != "$ref"}}
    if "anyOf" in schema:
        chosen = next(each for each in schema["anyOf"] if each.get("type") != "null")
        return full(chosen, definitions, name)
    if "enum" in schema:
        return schema["enum"][-1]
    match schema.get("type"):
        case "object" if "properties" in schema:
            return {key: full(value, definitions, key) for key, value in schema["properties"].items()}
        case "object":
            return {"Crash": full(schema.get("additionalProperties", {"type": "integer"}), definitions)}
        case "array":
            return [full(schema["items"], definitions, name)] * schema.get("minItems", 1)
        case "string":
            return _TEXTS.get(name, "2027-01-15T08:00:00Z" if name.lower().endswith("time") else "text")
        case "integer" if name == "protocol":
            return messages.PROTOCOL
        case "integer":
            return max(schema.get("minimum", 1), 1)
        case "number":
            return min(schema.get("maximum", 0.5), 0.5)
        case "boolean":
            return not schema.get("default", False)
    raise SystemExit(f"{name}: no value for {schema}")


def model(name: str) -> Any:
    return getattr(job, name, None) or getattr(messages, name)


def write() -> dict[str, Any]:
    """Message -> a full one, as it goes over the wire."""
    said = {}
    for name in (*FROM_AGENTS, *FROM_COORDINATOR, STATUS):
        schema = model(name).model_json_schema(by_alias=True)
        said[name] = model(name).model_validate(full(schema, schema.get("$defs", {}))).to_wire()
    return said


def read(said: dict[str, Any]) -> dict[str, Any]:
    """What this version makes of it, and all that it could know."""
    reading = _module("trainium_operator.coordinator.reading")
    lenient = _module("trainium_operator.cluster.cache.lenient", "trainium_operator.cluster.lenient")
    heard = {name: reading.read_message(model(name), json.dumps(said[name]).encode()) for name in FROM_AGENTS}
    heard |= {name: model(name).model_validate_json(json.dumps(said[name])) for name in FROM_COORDINATOR}
    heard[STATUS] = lenient.readable_status(said[STATUS], "default/llama")
    return {name: value.to_wire() for name, value in heard.items()}


def make(specs: dict[str, Any]) -> dict[str, Any]:
    """Job -> the trainer's configuration and the environment of its workers, as this version's operator makes them."""
    config_maps = importlib.import_module("trainium_operator.plan.manifests.config_maps")
    worker_pod = importlib.import_module("trainium_operator.plan.manifests.worker_pod")
    observed = importlib.import_module("trainium_operator.plan.model.observed")
    settings = observed.PlanSettings(image="trainer:1", coordinator="coordinator.system.svc:8443", cluster="uid")
    made = {}
    for name, raw in specs.items():
        spec, status = job.TrainingJobSpec.model_validate(raw), job.TrainingJobStatus()
        view = observed.JobView(
            namespace="default", name="llama", uid="uid", generation=1, deleting=False, spec=spec, status=status,
            created=0.0,
        )  # fmt: skip
        (container,) = worker_pod.pod_template(view, settings)["spec"]["containers"]
        environment = {each["name"]: each.get("value", "10.0.0.1") for each in container["env"]}
        made[name] = {"configuration": config_maps.trainer_configuration(view), "environment": environment}
    return made


def start(made: dict[str, Any]) -> dict[str, Any]:
    """Job -> what the trainer understands of its configuration, and the agent of its environment."""
    trainer = _module("trainium_contract.trainer.config", "trainium_contract.trainer")
    agent = importlib.import_module("trainium_trainer.agent.settings")
    started = {}
    for name, found in made.items():
        config = trainer.TrainingConfig.model_validate(json.loads(found["configuration"]))
        settings = agent.settings_from(found["environment"])
        started[name] = {"configuration": config.to_wire(), "settings": repr(settings)}
    return started


COMMANDS = {"read": read, "make": make, "start": start}

if __name__ == "__main__":
    command = sys.argv[1]
    json.dump(write() if command == "write" else COMMANDS[command](json.load(sys.stdin)), sys.stdout)
