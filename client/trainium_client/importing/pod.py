"""Read the pod template of a foreign job: what the workers keep, and what the operator decides instead.

Fields as in core/v1 PodTemplateSpec. What is not mentioned here is kept as it is; the API server checks it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainium_client.importing.source_job import QUEUE_LABEL, Note, PodParts, Program
from trainium_client.importing.torchrun import read_command
from trainium_contract.api_server.errors import ClientError
from trainium_contract.wire.worker_env import (
    AGENT_MOUNT,
    CACHE_DIRECTORY,
    CHECKPOINT_MOUNT,
    CONFIG_DIRECTORY,
    SHARED_MEMORY_MOUNT,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainium_client.importing.fields import Fields

INSTANCE_TYPE_LABEL = "node.kubernetes.io/instance-type"
_RESERVED_VOLUMES = frozenset({"config", "token", "shared-memory", "cache", "checkpoints", "agent"})
"""Names of the operator's own volumes, with which a template's volume of the same name would be merged."""
_RESERVED_MOUNTS = (CONFIG_DIRECTORY, CACHE_DIRECTORY, AGENT_MOUNT)
RANK_VARIABLES = re.compile(
    r"MASTER_(ADDR|PORT)|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|GROUP_WORLD_SIZE|PET_\w+"
    r"|TORCHELASTIC_\w+|NEURON_RT_ROOT_COMM_ID|NEURON_PJRT_\w+"
)
_GANG_SCHEDULERS = ("volcano", "scheduler-plugins-scheduler", "kai-scheduler")
_OWN_LABEL_DOMAINS = (
    "kubeflow.org/",
    "trainer.kubeflow.org/",
    "jobset.sigs.k8s.io/",
    "kueue.x-k8s.io/",
    "batch.kubernetes.io/",
)


@dataclass(slots=True)
class _Draft:
    """Parts that the reading of a template collects."""

    notes: list[Note] = field(default_factory=list)
    storage: dict[str, Any] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    replaced_volumes: set[str] = field(default_factory=set)
    """Names of volumes that the operator mounts itself: /dev/shm, and the one of the checkpoints."""

    def note(self, text: str, place: str = "") -> None:
        self.notes.append(Note(text, place))


def read_pod(
    template: Fields, names: Sequence[str], *, overrides: Mapping[str, Any] | None = None
) -> tuple[PodParts, Program]:
    """Return the parts of a template and the program of its training container.

    `names` are those that the platform gives to the training container; `overrides` replace fields of the container.
    Raises ClientError without a container.
    """
    draft = _Draft()
    metadata, spec = template.read_child("metadata"), template.read_child("spec")
    containers = spec.read_children("containers")
    main = _choose_container(containers, names, draft, template.path)
    others = [
        {"name": container.read_text("name"), **container.read_rest()}
        for container in containers
        if container is not main
    ]
    image, command, args, environment = _read_main(main, overrides or {})
    program = read_command(command, args, environment) if command or args else Program()
    if not command:
        program = Program(args=tuple(args))
    folder = main.read_text("workingDir")
    volumes = _read_volumes(spec, main, draft)
    container, devices = _read_container(main, overrides or {}, draft)
    instance_type, selector = _read_node_selector(spec)
    body = {
        **({"nodeSelector": selector} if selector else {}),
        **_read_decided(spec, draft),
        "containers": [{"name": "worker", **container}, *others],
        **({"volumes": volumes} if volumes else {}),
    }
    if body["containers"] == [{"name": "worker"}]:
        del body["containers"]
    labels = metadata.read_text_map("labels")
    settings = {
        "scheduling.queueName": labels.get(QUEUE_LABEL),
        "scheduling.priorityClassName": spec.read_text("priorityClassName"),
        "recovery.gracePeriodSeconds": spec.read_integer("terminationGracePeriodSeconds"),
    }
    parts = PodParts(
        image=image,
        working_directory=folder,
        template=_add_metadata(labels, metadata.read_text_map("annotations"), body),
        devices=devices,
        instance_type=instance_type,
        settings={name: value for name, value in settings.items() if value not in (None, "")},
        storage=draft.storage,
        notes=tuple(draft.notes),
    )
    return parts, program


def _choose_container(containers: list[Fields], names: Sequence[str], draft: _Draft, path: str) -> Fields:
    if not containers:
        raise ClientError(f"{path}.spec.containers is empty: give the training container")
    by_name = {container.read_text("name"): container for container in containers}
    main = next((by_name[name] for name in names if name in by_name), containers[0])
    if len(containers) > 1:
        beside = ", ".join(name for name, container in by_name.items() if container is not main)
        draft.note(f"container {main.read_text('name')} trains; beside it runs {beside}", "spec.workers.template")
    return main


def _read_main(main: Fields, overrides: Mapping[str, Any]) -> tuple[str, list[str], list[str], dict[str, str]]:
    """Return image, command, args and the variables of known value of the training container."""
    command = overrides.get("command") or main.read_texts("command")
    args = overrides.get("args") or main.read_texts("args")
    for key in ("command", "args", "name"):
        main.read(key)
    variables = [*(main.read("env") or []), *overrides.get("env", [])]
    environment = {
        str(variable["name"]): str(variable.get("value") or "")
        for variable in variables
        if isinstance(variable, dict) and "name" in variable and "valueFrom" not in variable
    }
    image = overrides.get("image") or main.read_text("image")
    main.read("image")
    return image, command, args, environment


def _read_container(main: Fields, overrides: Mapping[str, Any], draft: _Draft) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what the training container keeps, and its extended resources."""
    variables: dict[str, Any] = {}
    for variable in [*(main.read("env") or []), *overrides.get("env", [])]:
        if not isinstance(variable, dict) or not isinstance(variable.get("name"), str):
            raise ClientError(f"{main.path}.env has an entry without a name: correct it")
        variables[variable["name"]] = variable
    dropped = sorted(name for name in variables if RANK_VARIABLES.fullmatch(name))
    if dropped:
        draft.note(f"env {', '.join(dropped)}: the agents set the variables of ranks, or take the launcher's place")
    kept: dict[str, Any] = {}
    if env := [variable for name, variable in variables.items() if name not in dropped]:
        kept["env"] = env
    resources, devices = _read_resources(main.read_mapping("resources"), overrides.get("resources") or {})
    if resources:
        kept["resources"] = resources
    mounts = _read_mounts(main, draft)
    if mounts:
        kept["volumeMounts"] = mounts
    if main.read("ports"):
        draft.note("ports of the container: the agents need none of them, and MASTER_PORT is chosen for each start")
    if main.read("imagePullPolicy"):
        kept["imagePullPolicy"] = main.read("imagePullPolicy")
    for key in ("terminationMessagePath", "terminationMessagePolicy"):
        main.read(key)
    return {**kept, **main.read_rest()}, devices


def _read_resources(resources: dict[str, Any], override: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the resources that the template keeps, and the extended ones."""
    kept: dict[str, Any] = {}
    devices: dict[str, str] = {}
    for part in ("requests", "limits"):
        amounts = {**(resources.get(part) or {}), **(override.get(part) or {})}
        devices |= {name: str(amount) for name, amount in amounts.items() if "/" in name}
        if plain := {name: amount for name, amount in amounts.items() if "/" not in name}:
            kept[part] = plain
    return kept, devices


def _read_volumes(spec: Fields, main: Fields, draft: _Draft) -> list[dict[str, Any]]:
    """Return the volumes that the template keeps; set what the mounts need to know."""
    mounted = {mount.get("name"): mount for mount in main.read("volumeMounts") or [] if isinstance(mount, dict)}
    kept: list[dict[str, Any]] = []
    for volume in spec.read_children("volumes"):
        name, body = volume.read_text("name"), volume.read_rest("name")
        mount = mounted.get(name, {})
        path = str(mount.get("mountPath", "")).rstrip("/")
        memory = isinstance(body.get("emptyDir"), dict) and body["emptyDir"].get("medium") == "Memory"
        if path == SHARED_MEMORY_MOUNT and memory:
            draft.replaced_volumes.add(name)
            if limit := body["emptyDir"].get("sizeLimit"):
                kept.append({"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": limit}})
            else:
                draft.note(f"volume {name}: the operator mounts {SHARED_MEMORY_MOUNT} itself")
            continue
        claim = body.get("persistentVolumeClaim")
        if path == CHECKPOINT_MOUNT and isinstance(claim, dict) and not mount.get("subPath"):
            draft.replaced_volumes.add(name)
            draft.storage = {"persistentVolumeClaim": {"claimName": claim.get("claimName")}}
            draft.note(
                f"volume {name} is mounted at {CHECKPOINT_MOUNT}, the place of this storage", "spec.checkpoint.storage"
            )
            continue
        if name in _RESERVED_VOLUMES:
            draft.renamed[name] = f"job-{name}"
            draft.note(f"volume {name} is renamed, because the operator has one of that name", "spec.workers.template")
        kept.append({"name": draft.renamed.get(name, name), **body})
    return kept


def _read_mounts(main: Fields, draft: _Draft) -> list[dict[str, Any]]:
    kept = []
    for mount in main.read("volumeMounts") or []:
        if not isinstance(mount, dict):
            raise ClientError(f"{main.path}.volumeMounts has an entry that is no object: correct it")
        path = str(mount.get("mountPath", "")).rstrip("/")
        if mount.get("name") in draft.replaced_volumes:
            continue
        if path in (*_RESERVED_MOUNTS, CHECKPOINT_MOUNT):
            draft.note(
                f"the mount at {path} takes the place of the operator's own: choose another path",
                "spec.workers.template",
            )
        kept.append({**mount, "name": draft.renamed.get(str(mount.get("name")), mount.get("name"))})
    return kept


def _read_node_selector(spec: Fields) -> tuple[str, dict[str, str]]:
    """Return the instance type that the pod selects, and the rest of its node selector."""
    selector = spec.read_text_map("nodeSelector")
    return selector.get(INSTANCE_TYPE_LABEL, ""), {k: v for k, v in selector.items() if k != INSTANCE_TYPE_LABEL}


def _read_decided(spec: Fields, draft: _Draft) -> dict[str, Any]:
    """Return the fields of the pod that are kept, and note those that the operator decides."""
    if restart := spec.read_text("restartPolicy"):
        draft.note(f"restartPolicy {restart} of the pod: the operator restarts processes in place and replaces pods")
    scheduler = spec.read_text("schedulerName")
    if scheduler in _GANG_SCHEDULERS:
        draft.note(f"schedulerName {scheduler}: scheduling.gang chooses how all workers start together")
    kept = spec.read_rest(
        "terminationGracePeriodSeconds", "priorityClassName", "activeDeadlineSeconds", "subdomain", "hostname"
    )
    if scheduler and scheduler not in _GANG_SCHEDULERS:
        kept["schedulerName"] = scheduler
    security = kept.get("securityContext")
    if not (isinstance(security, dict) and "runAsUser" in security):
        draft.note(
            "workers run as user 1000 without privileges; if the image needs root, set securityContext "
            "{runAsUser: 0, runAsNonRoot: false} in the template's spec",
            "spec.workers.template",
        )
    return kept


def _add_metadata(labels: dict[str, str], annotations: dict[str, str], body: dict[str, Any]) -> dict[str, Any]:
    metadata = {
        key: kept
        for key, values in (("labels", labels), ("annotations", annotations))
        if (kept := {name: value for name, value in values.items() if not name.startswith(_OWN_LABEL_DOMAINS)})
    }
    return {**({"metadata": metadata} if metadata else {}), **({"spec": body} if body else {})}
