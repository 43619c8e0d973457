"""Count processes, their memory, files and sockets, shared memory, files on disk, and objects of the jobs.

Guarantees:
- Only processes of this cluster are counted: those with its marker in the environment, and child processes.
- A process that ends during the count is skipped.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from benchmarks.faults.environment import NAMESPACE
from trainium_contract.api_server.errors import ApiError
from trainium_devcluster.state import MARKER

if TYPE_CHECKING:
    from benchmarks.faults.environment import FaultEnvironment

_SHARED_MEMORY = Path("/dev/shm")
_OBJECT_PATHS = (
    "api/v1/namespaces/{}/pods",
    "api/v1/namespaces/{}/configmaps",
    "api/v1/namespaces/{}/services",
    "api/v1/namespaces/{}/secrets",
    "apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    "apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "apis/coordination.k8s.io/v1/namespaces/{}/leases",
    "apis/resource.k8s.io/v1/namespaces/{}/resourceclaims",
)
_IGNORED_OBJECTS = ("kube-root-ca.crt",)
_ROLE_BY_PROGRAM = {
    "trainium-operator": "operator",
    "trainium_operator": "operator",
    "trainium-agent": "agent",
    "trainium_agent": "agent",
    "trainium_devcluster.node": "node runtime",
    "trainium_devcluster.supervisor": "supervisor",
    "kube-apiserver": "API server",
    "kube-controller-manager": "controller manager",
    "kube-scheduler": "scheduler",
}
PROJECT_ROLES = frozenset({"operator", "agent", "node runtime", "supervisor"})
"""Roles whose growth would be a defect of this project."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process and its resources."""

    pid: int
    started_at: float
    role: str
    megabytes: float
    files: int
    sockets: int
    threads: int


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """Resources of the cluster and of the jobs at one time."""

    measured_at: float
    """Unix seconds."""
    processes: tuple[Process, ...]
    shared_memory: int
    """Entries of /dev/shm that the trainer or torch may have created."""
    node_files: int
    """Files in the folders of the nodes."""
    job_files: int
    """Files in the folders of the jobs."""
    objects: dict[str, int] = field(default_factory=dict)
    """Objects in the namespace of the jobs, by kind; empty while there is no API server."""

    def count_roles(self) -> dict[str, int]:
        """Return the number of processes by role."""
        return dict(sorted(Counter(process.role for process in self.processes).items()))


def measure_usage(env: FaultEnvironment) -> ResourceUsage:
    """Measure all resources now."""
    cluster = env.cluster.devcluster
    assert cluster is not None
    return ResourceUsage(
        measured_at=time.time(),
        processes=tuple(_list_processes(f"{MARKER}={cluster.paths.root}/".encode())),
        shared_memory=_count_shared_memory(_SHARED_MEMORY),
        node_files=_count_files(cluster.paths.root / "nodes"),
        job_files=_count_files(env.cluster.shared / NAMESPACE),
        objects=_count_objects(env),
    )


def _list_processes(marker: bytes) -> list[Process]:
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.pid not in children and marker not in Path(f"/proc/{process.pid}/environ").read_bytes():
                continue
            with process.oneshot():
                files, sockets = _count_descriptors(process.pid)
                processes.append(
                    Process(
                        pid=process.pid,
                        started_at=process.create_time(),
                        role=find_role(process.cmdline()),
                        megabytes=round(process.memory_info().rss / 1e6, 1),
                        files=files,
                        sockets=sockets,
                        threads=process.num_threads(),
                    )
                )
    return processes


def find_role(command: list[str]) -> str:
    """Return the role of a process: its program, or the module or script of a Python process."""
    arguments = [argument for argument in command if argument]
    if not arguments:
        return "nameless"
    program = Path(arguments[0].split()[0].rstrip(":")).name
    if program.startswith("python"):
        rest = [argument for argument in arguments[1:] if argument == "-m" or not argument.startswith("-")]
        program = rest[1] if rest[:1] == ["-m"] and len(rest) > 1 else Path(rest[0]).name if rest else program
    return _ROLE_BY_PROGRAM.get(program, program)


def _count_descriptors(pid: int) -> tuple[int, int]:
    """Return the number of open files, and of the sockets among them."""
    files = sockets = 0
    for entry in os.scandir(f"/proc/{pid}/fd"):
        files += 1
        with contextlib.suppress(OSError):
            sockets += str(Path(entry).readlink()).startswith("socket:")
    return files, sockets


def _count_shared_memory(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(path.name.startswith(("trainium", "torch_", "sem.", "psm_")) for path in folder.iterdir())
    return 0


def _count_files(folder: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(folder))


def _count_objects(env: FaultEnvironment) -> dict[str, int]:
    counts: dict[str, int] = {}
    for path in _OBJECT_PATHS:
        try:
            items = env.cluster.api.get("/" + path.format(NAMESPACE))["items"]
        except ApiError:
            return {}
        counts[path.rpartition("/")[2]] = sum(item["metadata"]["name"] not in _IGNORED_OBJECTS for item in items)
    return counts
