"""What a worker pod asks of its node besides devices: memory, CPU, and how much /dev/shm may take.

Invariants: whatever a template says of a resource stands, for a request above a limit would be refused; no memory and
no CPU is limited but by people, for an estimate that is too low must not end a run; nothing here depends on the size
that the job has, so a pod stays what it is when the job grows or shrinks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_contract.requirements.worker_requests import WorkerRequests, worker_requests

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobSpec

Json = dict[str, Any]

WORKER_CONTAINER = "worker"
SHARED_MEMORY = "shared-memory"
_MIB = 1 << 20


def with_worker_needs(spec: Json, job: TrainingJobSpec) -> Json:
    """The merged spec of a worker pod with what follows from the job's configuration, where no template says it."""
    found = needs_of_workers(job)
    if found is None:
        return spec
    wanted = {"memory": _mebibytes(found.memory), "cpu": _cpus(found.milli_cpu)}
    containers = spec.get("containers") or []
    if not spec.get("resources"):  # of the whole pod: whoever sets that means it so
        containers = [_asking(each, wanted) if each.get("name") == WORKER_CONTAINER else each for each in containers]
    volumes = spec.get("volumes") or []
    if found.shared_memory is not None:
        limit = _mebibytes(found.shared_memory)
        volumes = [_limited(each, limit) if each.get("name") == SHARED_MEMORY else each for each in volumes]
    return {**spec, "containers": containers, "volumes": volumes}


def needs_of_workers(job: TrainingJobSpec) -> WorkerRequests | None:
    """None while the spec contradicts itself, which is told elsewhere."""
    try:
        config = job.training_config()
        return worker_requests(config, job.workers.accelerator, job.batch_shape())
    except ValueError:
        return None


def _asking(container: Json, wanted: Json) -> Json:
    resources = container.get("resources") or {}
    said = {*(resources.get("requests") or {}), *(resources.get("limits") or {})}
    ours = {name: amount for name, amount in wanted.items() if name not in said}
    if not ours:
        return container
    return {**container, "resources": {**resources, "requests": {**ours, **(resources.get("requests") or {})}}}


def _limited(volume: Json, limit: str) -> Json:
    empty = volume.get("emptyDir")
    if not isinstance(empty, dict) or empty.get("medium") != "Memory" or "sizeLimit" in empty:
        return volume
    return {**volume, "emptyDir": {**empty, "sizeLimit": limit}}


def _mebibytes(size: int) -> str:
    return f"{-(-size // _MIB)}Mi"


def _cpus(milli: int) -> str:
    return str(milli // 1000) if milli % 1000 == 0 else f"{milli}m"
