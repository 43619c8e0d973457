"""Count processes, their memory, files and sockets, shared memory, files on disk, and objects of the jobs.

Guarantees:
- Only processes of this cluster are counted: those with its marker in the environment, and child processes.
- A process that ends during the count is skipped.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from benchmarks.faults.environment import NAMESPACE
from trainium_devcluster.controlplane.client import ControlPlaneError
from trainium_devcluster.state import MARKER

if TYPE_CHECKING:
    from benchmarks.faults.environment import FaultEnvironment

_SHARED_MEMORY = Path("/dev/shm")
_KINDS = (
    "api/v1/namespaces/{}/pods",
    "api/v1/namespaces/{}/configmaps",
    "api/v1/namespaces/{}/services",
    "api/v1/namespaces/{}/secrets",
    "apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    "apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "apis/coordination.k8s.io/v1/namespaces/{}/leases",
    "apis/resource.k8s.io/v1/namespaces/{}/resourceclaims",
)
_IGNORED = ("kube-root-ca.crt",)
_NAMES = {
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
OURS = frozenset({"operator", "agent", "node runtime", "supervisor"})
"""Roles whose growth would be a defect of this project."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process and its resources."""

    pid: int
    started: float
    role: str
    megabytes: float
    files: int
    sockets: int
    threads: int


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """All counts at one time."""

    at: float
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

    def roles(self) -> dict[str, int]:
        """Return the number of processes by role."""
        counted: dict[str, int] = {}
        for process in self.processes:
            counted[process.role] = counted.get(process.role, 0) + 1
        return dict(sorted(counted.items()))


def measure_usage(env: FaultEnvironment) -> ResourceUsage:
    """Take all counts now."""
    cluster = env.site.devcluster
    assert cluster is not None
    return ResourceUsage(
        at=time.time(),
        processes=tuple(_processes(f"{MARKER}={cluster.paths.root}/".encode())),
        shared_memory=_entries(_SHARED_MEMORY),
        node_files=_files(cluster.paths.root / "nodes"),
        job_files=_files(env.site.shared / NAMESPACE),
        objects=_objects(env),
    )


def _processes(marker: bytes) -> list[Process]:
    family = {child.pid for child in psutil.Process().children(recursive=True)}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.pid not in family and marker not in Path(f"/proc/{process.pid}/environ").read_bytes():
                continue
            with process.oneshot():
                files, sockets = _descriptors(process.pid)
                found.append(
                    Process(
                        pid=process.pid,
                        started=process.create_time(),
                        role=role_of(process.cmdline()),
                        megabytes=round(process.memory_info().rss / 1e6, 1),
                        files=files,
                        sockets=sockets,
                        threads=process.num_threads(),
                    )
                )
    return found


def role_of(command: list[str]) -> str:
    """Return the role of a process: its program, or the module or script of a Python process."""
    words = [word for word in command if word]
    if not words:
        return "nameless"
    program = Path(words[0].split()[0].rstrip(":")).name
    if program.startswith("python"):
        after = [word for word in words[1:] if word == "-m" or not word.startswith("-")]
        program = after[1] if after[:1] == ["-m"] and len(after) > 1 else Path(after[0]).name if after else program
    return _NAMES.get(program, program)


def _descriptors(pid: int) -> tuple[int, int]:
    """Return the number of open files, and of the sockets among them."""
    files = sockets = 0
    for entry in os.scandir(f"/proc/{pid}/fd"):
        files += 1
        with contextlib.suppress(OSError):
            sockets += str(Path(entry).readlink()).startswith("socket:")
    return files, sockets


def _entries(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(path.name.startswith(("trainium", "torch_", "sem.", "psm_")) for path in folder.iterdir())
    return 0


def _files(folder: Path) -> int:
    count = 0
    for _, _, files in os.walk(folder):
        count += len(files)
    return count


def _objects(env: FaultEnvironment) -> dict[str, int]:
    counted: dict[str, int] = {}
    for kind in _KINDS:
        try:
            items = env.api.get("/" + kind.format(NAMESPACE))["items"]
        except ControlPlaneError:
            return {}
        counted[kind.rpartition("/")[2]] = sum(item["metadata"]["name"] not in _IGNORED for item in items)
    return counted
