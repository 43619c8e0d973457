"""`spec.roles`: pods beside the workers that serve the training program, for instance generate or judge answers."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from trainium_contract.base import ContractModel, MatchesPattern
from trainium_contract.sizes import MAX_ROLE_REPLICAS
from trainium_contract.spec.pod_template import PodTemplate
from trainium_contract.spec.workers import AcceleratorSpec

MAX_ROLE_NAME = 20
MAX_CONTAINERS = 8
RESERVED_NAMES = ("evaluation", "spare", "w", "worker", "workers")
"""Names of the operator's other pods, in their labels or names."""
NAME_RESERVED = (
    "a role's name must be none of evaluation, spare, w, worker and workers, and must not end with -w, because "
    "workers have these names: choose another"
)
ROLES_NEED_PROGRAM = "roles serve a training program, and the job has spec.trainer: give program, or leave roles out"
NO_CONTAINER = "a role needs a container: give template.spec.containers with an image or a command"
NO_COMMAND = (
    "the first container of a role needs an image, or a command that runs in the program's image: give "
    "template.spec.containers[0].image or command"
)
PORT_TAKEN = "another container of the template declares the role's port: give the role a port of its first container"
MIN_READY_ABOVE_REPLICAS = "minReady must not be above replicas: lower minReady or raise replicas"
BEFORE_NEEDS_MIN_READY = (
    "startupPolicy BeforeWorkers needs minReady of at least 1: give the number of ready pods after which the workers "
    "start, or set startupPolicy to WithWorkers"
)
OTHER_NAMES = {
    "startBefore": "startBefore is not a field: set startupPolicy to BeforeWorkers or WithWorkers",
    "restart": "restart is not a field: set restartPolicy to Always, or leave it out",
}
"""Fields that users expect, and the sentence that names the right one."""
CLAIM_NOT_FOR_ROLES = (
    "accelerator.claim is for workers: leave it out, and the device plugin allocates the devices of a role"
)


class RoleStartupPolicy(StrEnum):
    """Start of a role relative to the workers."""

    BEFORE_WORKERS = "BeforeWorkers"
    """Workers are created when minReady pods of the role are ready, so that they do not hold nodes while it starts."""
    WITH_WORKERS = "WithWorkers"
    """Both start at once; training begins when minReady pods of the role are ready."""


class RoleRestartPolicy(StrEnum):
    """Reaction to the end of a role's pod."""

    ALWAYS = "Always"
    """A pod that ends, also with code 0, is replaced alone, with a back-off while replacements do not get ready."""


def _check_name(name: str) -> str:
    if name in RESERVED_NAMES or name.endswith("-w"):
        raise ValueError(NAME_RESERVED)
    return name


class RoleSpec(ContractModel):
    """Pods that serve the training program and are no members of it: they have no rank and no generation."""

    name: Annotated[
        str,
        Field(max_length=MAX_ROLE_NAME),
        MatchesPattern(
            r"[a-z]([-a-z0-9]*[a-z0-9])?",
            "a role's name begins with a lowercase letter and has only lowercase letters, digits and '-', because a "
            "Service has it",
        ),
        AfterValidator(_check_name),
    ]
    """Name of the role: of its Service (`<job>-<role>`), its pods, and its variable in workers (TRAINIUM_ROLE_<ROLE>).
    """
    replicas: Annotated[int, Field(ge=0, le=MAX_ROLE_REPLICAS)] = 1
    """Pods of the role; `kubectl trn scale JOB --role ROLE N`."""
    accelerator: AcceleratorSpec | None = None
    """Devices and kind of the nodes of the role; omitted: no devices, any node."""
    template: PodTemplate = {}
    """PodTemplateSpec of the role. Its first container serves `port`; without an image it has the program's."""
    port: Annotated[int, Field(ge=1, le=65535)]
    """Port at which each pod serves. Without a readinessProbe a pod is ready when the port accepts connections."""
    min_ready: Annotated[int, Field(ge=0, le=MAX_ROLE_REPLICAS)] = 1
    """Training waits to start while fewer pods are ready, and is not restarted for a hang; 0: it never waits."""
    startup_policy: RoleStartupPolicy = RoleStartupPolicy.WITH_WORKERS
    """Start of the role relative to the workers."""
    restart_policy: RoleRestartPolicy = RoleRestartPolicy.ALWAYS
    """Reaction to the end of a pod; never that of the training."""

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and (
            name := next((other_name for other_name in OTHER_NAMES if other_name in fields), "")
        ):
            raise ValueError(f"role {fields.get('name', '')}: {OTHER_NAMES[name]}")
        return fields

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = (
            (self.min_ready > self.replicas, MIN_READY_ABOVE_REPLICAS),
            (
                self.startup_policy is RoleStartupPolicy.BEFORE_WORKERS and self.min_ready == 0,
                BEFORE_NEEDS_MIN_READY,
            ),
            (self.accelerator is not None and self.accelerator.claim is not None, CLAIM_NOT_FOR_ROLES),
            *self._check_containers(),
        )
        if sentence := next((sentence for applies, sentence in problems if applies), ""):
            raise ValueError(f"role {self.name}: {sentence}")
        return self

    def _check_containers(self) -> tuple[tuple[bool, str], ...]:
        containers = self.containers
        if not containers:
            return ((True, NO_CONTAINER),)
        declaring = [number for number, container in enumerate(containers) if self.port in _list_ports(container)]
        return (
            (not containers[0].get("image") and not containers[0].get("command"), NO_COMMAND),
            (declaring not in ([], [0]), PORT_TAKEN),
        )

    @property
    def containers(self) -> list[dict[str, Any]]:
        """Return the containers of the template; the first one serves the port."""
        return (self.template.get("spec") or {}).get("containers") or []


def _list_ports(container: dict[str, Any]) -> list[Any]:
    ports = container.get("ports")
    return [port.get("containerPort") for port in ports if isinstance(port, dict)] if isinstance(ports, list) else []
