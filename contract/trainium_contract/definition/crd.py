"""Generate the CustomResourceDefinition from the pydantic models of `job.py`; other files add the CEL rules.

The result is plain JSON-ready data (`scripts/generate.py` writes it as YAML).

Invariants of the schema: it is structural (no references, no alternatives), closed except for the status (an unknown
field is an error under kubectl's strict validation), and bounded (so that the cost of the rules can be estimated).
Every field has a description. A model that violates one of these stops the generation with a sentence.

Defaults of the spec are in the schema, so that they are stored with the job at its creation: an upgrade of the operator
with other defaults does not change a running job. Defaults of fields declared with `derived` are not stored.

The status is lenient where the spec is strict: its enumerations are plain strings, and its objects accept fields that
the schema does not name, so that an operator of another version can write it. The API server would refuse the whole
status because of one unknown field.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_contract.base import DERIVED, MATCHING
from trainium_contract.definition.accelerator_rules import ACCELERATOR_RULES
from trainium_contract.definition.cel import Rule
from trainium_contract.definition.program_rules import PROGRAM_RULES
from trainium_contract.definition.role_rules import ROLE_RULES, describe_other_names, describe_template_schema
from trainium_contract.definition.rules import (
    BY_CAUSE_RULES,
    RECOVERY_RULE_RULES,
    ROOT_RULES,
    SPEC_RULES,
    STORAGE_RULES,
)
from trainium_contract.job import TrainingJobSpec, TrainingJobStatus
from trainium_contract.status.conditions import ConditionType
from trainium_contract.status.internal import INTERNAL_KEY, MAX_INTERNAL_TEXT, list_internal_fields
from trainium_contract.wire.worker_env import GROUP, KIND, PLURAL, VERSION

if TYPE_CHECKING:
    from pydantic import BaseModel

SHORT_NAME = "trn"
CATEGORY = "training"

INT32_LIMIT = 2**31 - 1
MAX_UNBOUNDED_TEXT = 1024
"""Bound of a status string without one in its model (enumerations)."""

_LIST_KEYS: dict[str, list[str]] = {"status.conditions": ["type"], "spec.roles": ["name"]}
"""Lists that are maps by a key, so that several writers can own different entries; all others are atomic."""

_PINNED_LISTS = "spec.trainer."
"""Lists below which defaults are stored with the job too; elsewhere (preflight checks) a later default may apply."""

_COPIED_KEYS = ("pattern", "minLength", "maxLength", "minItems", "maxItems", "maxProperties", "minimum", "maximum")


class SchemaError(ValueError):
    """A model that cannot be written as a structural schema; the message names the field and the change."""


def build_custom_resource_definition() -> dict[str, Any]:
    """Return the CustomResourceDefinition (apiextensions.k8s.io/v1). Raises SchemaError for an unsuitable model."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": [SHORT_NAME],
                "categories": [CATEGORY],
            },
            "versions": [_build_version()],
        },
    }


def _build_version() -> dict[str, Any]:
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.workers.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": _build_printer_columns(),
        "schema": {"openAPIV3Schema": build_object_schema()},
    }


def _build_printer_columns() -> list[dict[str, Any]]:
    def build_column(name: str, kind: str, path: str, description: str, priority: int = 0) -> dict[str, Any]:
        given = {"name": name, "type": kind, "jsonPath": path, "description": description}
        return given | ({"priority": priority} if priority else {})

    ready = f'.status.conditions[?(@.type=="{ConditionType.READY}")].reason'
    return [
        build_column("Phase", "string", ".status.phase", "What the job is doing."),
        build_column("Reason", "string", ready, "Why it is in that phase."),
        build_column("Ready", "integer", ".status.readyReplicas", "Workers that are training."),
        build_column("Desired", "integer", ".spec.workers.replicas", "Requested workers."),
        build_column("Step", "integer", ".status.progress.step", "Newest finished optimizer step."),
        build_column("Loss", "number", ".status.progress.loss", "Loss of that step."),
        build_column("Ckpt", "integer", ".status.checkpoint.durableStep", "Newest step committed to storage."),
        build_column("Restarts", "integer", ".status.restarts.total", "Interruptions so far."),
        build_column("Updated", "date", ".status.progress.updated", "Time since a new step was reported."),
        build_column("Age", "date", ".metadata.creationTimestamp", "Time since the job was created."),
        build_column("Stage", "string", ".status.stage", "Train, Export or Evaluate.", 1),
        build_column("Size", "integer", ".status.replicas", "Workers in the membership.", 1),
        build_column("DP", "integer", ".status.membership.dataParallel", "Data-parallel degree.", 1),
        build_column("Tokens/s", "number", ".status.progress.tokensPerSecond", "Throughput of the whole job.", 1),
        build_column(
            "Goodput", "string", ".status.goodput.percent", "Strict goodput: productive share of the time.", 1
        ),
        build_column("Artifact", "string", ".status.artifacts[-1].path", "Path of the newest artifact.", 1),
    ]


def build_object_schema() -> dict[str, Any]:
    """Return the openAPIV3Schema of a whole TrainingJob."""
    spec = build_model_schema(TrainingJobSpec, "spec", strict=True)
    status = _replace_internal_fields(build_model_schema(TrainingJobStatus, "status", strict=False))
    _attach_rules(spec, SPEC_RULES)
    _attach_rules(spec["properties"]["workers"]["properties"]["accelerator"], ACCELERATOR_RULES)
    _attach_rules(spec["properties"]["program"], PROGRAM_RULES)
    role = spec["properties"]["roles"]["items"]
    _attach_rules(role, ROLE_RULES)
    role["properties"]["template"]["properties"] = describe_template_schema()
    role["properties"] |= describe_other_names()
    _attach_rules(spec["properties"]["checkpoint"]["properties"]["storage"], STORAGE_RULES)
    # Users set a size of 0 to stop a job: a rule explains how, and rules do not run after a schema error.
    del spec["properties"]["workers"]["properties"]["replicas"]["minimum"]
    recovery = spec["properties"]["recovery"]["properties"]
    _attach_rules(recovery["rules"]["items"], RECOVERY_RULE_RULES)
    _attach_rules(recovery["budgets"]["properties"]["byCause"], BY_CAUSE_RULES)
    root = {
        "type": "object",
        "description": "A training run on Trainium nodes that keeps going through faults and resizes.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "Version of this representation of the object."},
            "kind": {"type": "string", "description": "TrainingJob."},
            "metadata": {"type": "object", "properties": {"name": {"type": "string"}}},
            "spec": spec,
            "status": status,
        },
    }
    _attach_rules(root, ROOT_RULES)
    return root


def _replace_internal_fields(status: dict[str, Any]) -> dict[str, Any]:
    """Replace the operator's internal fields by the text that holds them."""
    for path in list_internal_fields():
        place, _, name = path.rpartition(".")
        del (status["properties"][place] if place else status)["properties"][name]
    status["properties"][INTERNAL_KEY] = {
        "type": "string",
        "description": "What the operator stores to continue after a restart. Do not depend on it and do not edit it.",
        "maxLength": MAX_INTERNAL_TEXT,
    }
    return status


def _attach_rules(schema: dict[str, Any], rules: tuple[Rule, ...]) -> None:
    schema["x-kubernetes-validations"] = [rule.to_schema() for rule in rules]


def build_model_schema(model: type[BaseModel], path: str, *, strict: bool) -> dict[str, Any]:
    """Return the structural schema of one model; `path` is its place in the object, for messages.

    `strict` keeps defaults and enumerations (the spec); otherwise they are left out (the status).
    """
    source = model.model_json_schema(by_alias=True, mode="validation")
    return _SchemaConverter(source.get("$defs", {}), strict=strict).convert_schema(source, path)


class _SchemaConverter:
    """Converts pydantic's JSON schema into a structural one."""

    def __init__(self, definitions: dict[str, Any], *, strict: bool) -> None:
        self._definitions = definitions
        self._strict = strict

    def convert_schema(self, node: dict[str, Any], path: str) -> dict[str, Any]:
        node = self._resolve_references(node, path)
        written: dict[str, Any] = {"type": node.get("type"), "description": _require_description(node, path)}
        match node.get("type"):
            case "object":
                self._convert_object(node, path, written)
            case "array":
                self._convert_array(node, path, written)
            case "integer":
                written["format"] = "int32" if node.get("maximum", INT32_LIMIT + 1) <= INT32_LIMIT else "int64"
            case "number":
                written["format"] = "double"
            case "string":
                self._convert_string(node, path, written)
            case "boolean":
                pass
            case other:
                raise SchemaError(f"{path}: type {other!r} has no structural schema; give the field one plain type")
        written |= {key: node[key] for key in _COPIED_KEYS if key in node}
        _add_exclusive_bounds(node, written)
        written["description"] += _describe_range(node)
        stored = self._strict and not node.get(DERIVED) and node.get("type") not in {"object", "array"}
        if stored and node.get("default") is not None:
            written["default"] = node["default"]
        return written

    def _resolve_references(self, node: dict[str, Any], path: str) -> dict[str, Any]:
        """Resolve references and read `X | None` as an optional X."""
        if "anyOf" in node:
            kinds = [kind for kind in node["anyOf"] if kind.get("type") != "null"]
            if len(kinds) != 1:
                raise SchemaError(f"{path}: a union of several types is not structural; choose one type")
            return self._resolve_references(
                kinds[0] | {key: value for key, value in node.items() if key != "anyOf"}, path
            )
        if "$ref" in node:
            target = self._definitions[node["$ref"].rsplit("/", 1)[1]]
            return self._resolve_references(target | {key: value for key, value in node.items() if key != "$ref"}, path)
        return node

    def _convert_object(self, node: dict[str, Any], path: str, written: dict[str, Any]) -> None:
        values = node.get("additionalProperties")
        if "properties" in node:
            children = {
                name: self.convert_schema(child, f"{path}.{name}") for name, child in node["properties"].items()
            }
            written["properties"] = children
            if "required" in node:
                written["required"] = node["required"]
            if not self._strict:
                written["x-kubernetes-preserve-unknown-fields"] = True
            elif path != "spec":
                written |= _build_object_default(node, children)
        elif isinstance(values, dict):
            if "maxProperties" not in node:
                raise SchemaError(f"{path}: the map has no bound; add Field(max_length=...)")
            described = {"description": f"An entry of {path.rsplit('.', 1)[1]}."} | values
            written["additionalProperties"] = self.convert_schema(described, f"{path}.*")
        else:
            written["x-kubernetes-preserve-unknown-fields"] = True

    def _convert_array(self, node: dict[str, Any], path: str, written: dict[str, Any]) -> None:
        if "maxItems" not in node:
            raise SchemaError(f"{path}: the list has no bound; add Field(max_length=...)")
        described = {"description": f"An entry of {path.rsplit('.', 1)[1]}."} | node["items"]
        written["items"] = self.convert_schema(described, f"{path}[]")
        if self._strict and not node.get(DERIVED) and path.startswith(_PINNED_LISTS) and node.get("default"):
            written["default"] = node["default"]
        keys = _LIST_KEYS.get(path)
        written["x-kubernetes-list-type"] = "map" if keys else "atomic"
        if keys:
            written["x-kubernetes-list-map-keys"] = keys

    def _convert_string(self, node: dict[str, Any], path: str, written: dict[str, Any]) -> None:
        if "enum" in node and self._strict:
            written["enum"] = node["enum"]
        elif "enum" in node:
            written["description"] += f" One of {', '.join(node['enum'])}."
            written["maxLength"] = MAX_UNBOUNDED_TEXT
        elif "maxLength" not in node:
            raise SchemaError(f"{path}: the text has no bound; add Field(max_length=...)")
        if MATCHING in node:
            pattern, sentence = node[MATCHING]["pattern"], node[MATCHING]["sentence"]
            written["x-kubernetes-validations"] = [Rule(f"self.matches(r'^(?:{pattern})$')", sentence).to_schema()]


def _build_object_default(node: dict[str, Any], children: dict[str, Any]) -> dict[str, Any]:
    """Return an empty object as default if it is complete, so that the defaults below it apply without it.

    Not for an object that may be None or whose default is derived, where leaving it out has a separate meaning.
    """
    if node.get("default", children) is None or node.get(DERIVED):
        return {}
    if "required" in node:
        given = {name: value for name, value in (node.get("default") or {}).items() if value is not None}
        return {"default": given} if given else {}
    has_defaults = any("default" in child for child in children.values())
    has_derived = any(child.get(DERIVED) for child in node.get("properties", {}).values())
    return {"default": {}} if has_defaults or has_derived else {}


def _add_exclusive_bounds(node: dict[str, Any], written: dict[str, Any]) -> None:
    """Convert an exclusive bound: a number in JSON schema 2020, a flag beside the bound in Kubernetes' dialect."""
    if "exclusiveMinimum" in node:
        written |= {"minimum": node["exclusiveMinimum"], "exclusiveMinimum": True}
    if "exclusiveMaximum" in node:
        written |= {"maximum": node["exclusiveMaximum"], "exclusiveMaximum": True}


def _describe_range(node: dict[str, Any]) -> str:
    """Describe a number's legal range as a second sentence of its description, for `kubectl explain`."""
    if node.get("type") not in {"integer", "number"}:
        return ""
    low, above = node.get("minimum"), node.get("exclusiveMinimum")
    high, below = node.get("maximum"), node.get("exclusiveMaximum")
    high = None if high == INT32_LIMIT else high  # a limit that no value reaches
    if low is not None and high is not None:
        return f" Range: {low} to {high}."
    ends = [
        f"{word} {bound}"
        for word, bound in (("at least", low), ("above", above), ("at most", high), ("below", below))
        if bound is not None
    ]
    return f" Range: {' and '.join(ends)}." if ends else ""


def _require_description(node: dict[str, Any], path: str) -> str:
    """Return the description in one line; a missing one stops the generation."""
    text = " ".join(str(node.get("description", "")).split())
    if not text:
        raise SchemaError(f"{path}: no description; add a docstring below the field")
    return text
