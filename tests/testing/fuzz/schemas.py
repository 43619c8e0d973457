"""Build cases from a JSON schema: an object with every field, and the edge values of each field.

The schemas are the generated ones of the definition and of messages, so a new field needs no change here.
"""

import re
from typing import Any

Schema = dict[str, Any]
_TEXTS = ("/a", "a/b", "s3://bucket/prefix", "--a", "module:function", "2027-01-15T08:00:00Z", "topology.k8s.aws/a")
"""Texts, one of which matches each pattern."""


def example(schema: Schema) -> Any:
    """Return a mostly valid value with every field, and one entry in each list and map."""
    return _SchemaWalker(schema).example(schema)


def edge_values(schema: Schema) -> dict[str, list[Any]]:
    """Return by name of a field: its bounds, one value beyond each, and every value of an enumeration."""
    walker = _SchemaWalker(schema)
    walker.collect(schema)
    return walker.values_by_key


class _SchemaWalker:
    def __init__(self, schema: Schema) -> None:
        self._definitions: dict[str, Schema] = schema.get("$defs", {})
        self.values_by_key: dict[str, list[Any]] = {}
        self._active: set[str] = set()

    def _resolve(self, schema: Schema) -> Schema:
        if "$ref" in schema:
            return self._definitions[schema["$ref"].rpartition("/")[2]]
        choices = [choice for choice in schema.get("anyOf", ()) if choice.get("type") != "null"]
        return self._resolve(choices[0]) if choices else schema

    def example(self, schema: Schema) -> Any:
        if schema.get("default") not in (None, {}, [], ""):
            return schema["default"]
        schema = self._resolve(schema)
        if "enum" in schema:
            return schema["enum"][0]
        match schema.get("type"):
            case "object":
                fields = {key: self.example(inner) for key, inner in schema.get("properties", {}).items()}
                values = schema.get("additionalProperties")
                return fields or ({"key": self.example(values)} if isinstance(values, dict) else {})
            case "array":
                return [self.example(schema["items"])] * max(1, schema.get("minItems", 1)) if "items" in schema else []
            case "integer":
                return max(1, schema.get("minimum", 1))
            case "number":
                exclusive: Any = schema.get("exclusiveMinimum", False)  # a number, or in Kubernetes' dialect a flag
                low: Any = schema.get("minimum", exclusive)
                return max(0.5, low if exclusive is False else low + 0.5)
            case "boolean":
                return True
            case _:
                text = "a" * max(1, schema.get("minLength", 1))
                return next((value for value in (text, *_TEXTS) if re.search(schema.get("pattern", ""), value)), text)

    def collect(self, schema: Schema) -> None:
        schema = self._resolve(schema)
        for key, inner in schema.get("properties", {}).items():
            known = self.values_by_key.setdefault(key, [])
            known += [value for value in _edges_of(self._resolve(inner), inner.get("default")) if value not in known]
            self._collect_nested(inner)
        values = schema.get("additionalProperties")
        if isinstance(values, dict):
            self._collect_nested(values)
        if "items" in schema:
            self._collect_nested(schema["items"])

    def _collect_nested(self, schema: Schema) -> None:
        name = schema.get("$ref", "")
        if name not in self._active:
            self._active |= {name} - {""}
            self.collect(schema)


def _edges_of(schema: Schema, default: Any) -> list[Any]:
    values = [*schema.get("enum", ())] + ([default] if default is not None else [])
    for edge, beyond in (("minimum", -1), ("exclusiveMinimum", -1), ("maximum", 1), ("exclusiveMaximum", 1)):
        if edge in schema:
            values += [schema[edge], schema[edge] + beyond]
    if "maxLength" in schema:
        values += ["x" * schema["maxLength"], "é" * (schema["maxLength"] + 1)]
    if "maxItems" in schema:
        values.append([None] * (schema["maxItems"] + 1))
    return values
