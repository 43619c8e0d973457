"""CEL rules of `spec.roles`, and the part of a pod template's schema that they read."""

from __future__ import annotations

from typing import Any

from trainium_contract.definition.cel import RefusalReason, Rule, format_message
from trainium_contract.spec import roles
from trainium_contract.spec.roles import MAX_CONTAINERS

_CONTAINERS = "self.template.spec.containers"
_HAS_CONTAINER = f"has(self.template) && has(self.template.spec) && has({_CONTAINERS}) && size({_CONTAINERS}) > 0"
_DECLARES = "has({0}.ports) && {0}.ports.exists(p, has(p.containerPort) && p.containerPort == self.port)"
_FIRST = f"{_CONTAINERS}[0]"

ROLE_RULES: tuple[Rule, ...] = (
    Rule(
        f"!(self.name in {list(roles.RESERVED_NAMES)}) && !self.name.endsWith('-w')",
        roles.NAME_RESERVED,
        ".name",
    ),
    Rule(
        "self.minReady <= self.replicas",
        roles.MIN_READY_ABOVE_REPLICAS,
        ".minReady",
        format_message(
            "minReady %s of role %s is above its replicas %s: lower minReady or raise replicas",
            "self.minReady",
            "self.name",
            "self.replicas",
        ),
    ),
    Rule(
        "self.startupPolicy != 'BeforeWorkers' || self.minReady > 0",
        roles.BEFORE_NEEDS_MIN_READY,
        ".startupPolicy",
    ),
    Rule(_HAS_CONTAINER, roles.NO_CONTAINER, ".template", reason=RefusalReason.REQUIRED),
    Rule(
        f"""!({_HAS_CONTAINER}) || has({_FIRST}.image) || (has({_FIRST}.command) && size({_FIRST}.command) > 0)""",
        roles.NO_COMMAND,
        ".template",
        reason=RefusalReason.REQUIRED,
    ),
    Rule(
        f"""!({_HAS_CONTAINER}) || !{_CONTAINERS}.exists(c, {_DECLARES.format("c")})
        || ({_CONTAINERS}.filter(c, {_DECLARES.format("c")}).size() == 1 && {_DECLARES.format(_FIRST)})""",
        roles.PORT_TAKEN,
        ".port",
    ),
    Rule(
        "!has(self.accelerator) || !has(self.accelerator.claim)",
        roles.CLAIM_NOT_FOR_ROLES,
        ".accelerator",
        reason=RefusalReason.FORBIDDEN,
    ),
    *(
        Rule(f"!has(self.{name})", sentence, f".{name}", reason=RefusalReason.FORBIDDEN)
        for name, sentence in roles.OTHER_NAMES.items()
    ),
)
"""Rules of one entry of `spec.roles`."""

ROLE_SPEC_RULES: tuple[Rule, ...] = (
    Rule(
        "!has(self.roles) || size(self.roles) == 0 || has(self.program)",
        roles.ROLES_NEED_PROGRAM,
        ".roles",
        reason=RefusalReason.FORBIDDEN,
    ),
)
"""Rules of `spec` that concern roles."""

MAX_HOST_NAME = 55
"""Longest name of job and role together, so that `<job>-<role>-<ordinal>` is a host name."""
_SAME_NUMBER = """(has(self.spec.roles) ? size(self.spec.roles) : 0)
== (has(oldSelf.spec.roles) ? size(oldSelf.spec.roles) : 0)"""
_EACH_IS_OLD = """(!has(self.spec.roles) || !has(oldSelf.spec.roles)
|| self.spec.roles.all(r, oldSelf.spec.roles.exists(o, o.name == r.name{0})))"""
ROLE_ROOT_RULES: tuple[Rule, ...] = (
    Rule(
        f"!has(self.spec.roles) || self.spec.roles.all(r, size(self.metadata.name) + size(r.name) <= {MAX_HOST_NAME})",
        f"the names of the job and of a role have more than {MAX_HOST_NAME} characters together: shorten one, so that "
        "host names of the role's pods stay within 63",
        ".spec.roles",
    ),
    Rule(
        f"{_SAME_NUMBER} && {_EACH_IS_OLD.format('')}",
        "roles can neither be added nor removed: create the job again, and it resumes from its newest checkpoint (set "
        "replicas and minReady to 0 to stop a role)",
        ".spec.roles",
        reason=RefusalReason.FORBIDDEN,
    ),
)


def build_role_port_rule(job_not_running: str, suffix: str) -> Rule:
    """Return the rule that fixes the ports of roles while a job runs."""
    return Rule(
        f"{job_not_running} || {_EACH_IS_OLD.format(' && o.port == r.port')}",
        f"a role's port {suffix}",
        ".spec.roles",
        reason=RefusalReason.FORBIDDEN,
    )


def describe_other_names() -> dict[str, Any]:
    """Return the properties that a rule refuses with the right name; an unknown field gets no such sentence."""
    return {
        name: _build_field("string", f"Refused: {sentence}.", maxLength=64)
        for name, sentence in roles.OTHER_NAMES.items()
    }


def describe_template_schema() -> dict[str, Any]:
    """Return the properties of a role's template that rules read; other fields of a pod template may be anything."""
    port = _open_object("A port.", {"containerPort": _build_field("integer", "Number of the port.", format="int32")})
    container = _open_object(
        "A container.",
        {
            "image": _build_field("string", "Image of the container.", maxLength=1024),
            "command": _build_list(
                "Command of the container.", _build_field("string", "A word.", maxLength=32768), 256
            ),
            "ports": _build_list("Ports of the container.", port, 64),
        },
    )
    containers = _build_list("Containers of the pod; the first one serves the port.", container, MAX_CONTAINERS)
    return {"spec": _open_object("Spec of the pod.", {"containers": containers})}


def _build_field(kind: str, description: str, **bounds: Any) -> dict[str, Any]:
    return {"type": kind, "description": description, **bounds}


def _build_list(description: str, items: dict[str, Any], max_items: int) -> dict[str, Any]:
    return _build_field("array", description, items=items, maxItems=max_items, **{"x-kubernetes-list-type": "atomic"})


def _open_object(description: str, properties: dict[str, Any]) -> dict[str, Any]:
    return _build_field("object", description, properties=properties, **{"x-kubernetes-preserve-unknown-fields": True})
