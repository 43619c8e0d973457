"""Compute the environment and the command line of a container.

Guarantees:
- Order and precedence are those of a kubelet: envFrom, env; the last value wins; $(VAR) refers to earlier variables.
  Services get no variables: pods find them by their names.
- A missing reference that is not optional stops the container with `ConfigError`, as CreateContainerConfigError does.
"""

import re
from collections.abc import Callable, Mapping

from trainium_devcluster.node.api.objects import Json, get_name, get_namespace
from trainium_devcluster.node.spec import downward_api
from trainium_devcluster.node.spec.config_data import decode_data

Lookup = Callable[[str, str], Json | None]
"""Return a ConfigMap or a Secret by plural and name; None if it does not exist."""

_REFERENCE = re.compile(r"\$(\$|\([^()]*\))")


class ConfigError(Exception):
    """The container's configuration refers to a missing object or key."""


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace $(NAME) by its value; $$ is a dollar sign; an unknown $(NAME) is unchanged."""

    def replace(match: re.Match[str]) -> str:
        token = match[1]
        return "$" if token == "$" else variables.get(token[1:-1], match[0])  # noqa: S105 - a dollar, no secret

    return _REFERENCE.sub(replace, text)


def find_references(container: Json) -> list[tuple[str, str]]:
    """Return the ConfigMaps and Secrets, as (plural, name), in the environment of a container."""
    objects: list[tuple[str, str]] = []
    for source in container.get("envFrom") or []:
        for key, plural in (("configMapRef", "configmaps"), ("secretRef", "secrets")):
            if key in source:
                objects.append((plural, source[key].get("name", "")))
    for variable in container.get("env") or []:
        source = variable.get("valueFrom") or {}
        for key, plural in (("configMapKeyRef", "configmaps"), ("secretKeyRef", "secrets")):
            if key in source:
                objects.append((plural, source[key].get("name", "")))
    return list(dict.fromkeys(objects))


def build_environment(container: Json, facts: downward_api.PodFacts, lookup: Lookup) -> dict[str, str]:
    """Return the variables of a container from the pod's spec.

    Raises:
        ConfigError: for a reference to a missing object or key.
    """
    env: dict[str, str] = {}
    for source in container.get("envFrom") or []:
        env.update(_resolve_env_from(source, facts.pod, lookup))
    for variable in container.get("env") or []:
        if "valueFrom" not in variable:
            env[variable["name"]] = expand(variable.get("value", ""), env)
            continue
        value = _resolve_value_from(variable["valueFrom"], facts, lookup)
        if value is not None:
            env[variable["name"]] = value
    return env


def expand_command(container: Json, env: Mapping[str, str]) -> list[str]:
    """Return the command line of a container with $(NAME) replaced."""
    return [expand(part, env) for part in [*(container.get("command") or []), *(container.get("args") or [])]]


def _resolve_env_from(source: Json, pod: Json, lookup: Lookup) -> dict[str, str]:
    for key, plural, kind in (("configMapRef", "configmaps", "configmap"), ("secretRef", "secrets", "secret")):
        if key not in source:
            continue
        reference = source[key]
        data_object = lookup(plural, reference.get("name", ""))
        if data_object is None:
            if reference.get("optional"):
                return {}
            raise ConfigError(f'{kind} "{reference.get("name", "")}" not found')
        prefix = source.get("prefix", "")
        return {prefix + k: v.decode(errors="replace") for k, v in decode_data(data_object, plural).items()}
    raise ConfigError(f"envFrom of pod {get_namespace(pod)}/{get_name(pod)} has neither configMapRef nor secretRef")


def _resolve_value_from(source: Json, facts: downward_api.PodFacts, lookup: Lookup) -> str | None:
    try:
        if "fieldRef" in source:
            return downward_api.resolve_field(facts, source["fieldRef"]["fieldPath"])
    except downward_api.UnknownFieldError as error:
        raise ConfigError(str(error)) from error
    for key, plural, kind in (("configMapKeyRef", "configmaps", "configmap"), ("secretKeyRef", "secrets", "secret")):
        if key in source:
            return _read_key(source[key], plural, kind, facts.pod, lookup)
    raise ConfigError(f"valueFrom has none of fieldRef, configMapKeyRef, secretKeyRef: {sorted(source)}")


def _read_key(reference: Json, plural: str, kind: str, pod: Json, lookup: Lookup) -> str | None:
    object_name, optional = reference.get("name", ""), bool(reference.get("optional"))
    data_object = lookup(plural, object_name)
    if data_object is None:
        if optional:
            return None
        raise ConfigError(f'{kind} "{object_name}" not found')
    values = decode_data(data_object, plural)
    if reference["key"] not in values:
        if optional:
            return None
        raise ConfigError(f"couldn't find key {reference['key']} in {kind} {get_namespace(pod)}/{object_name}")
    return values[reference["key"]].decode(errors="replace")
