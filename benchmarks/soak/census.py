"""What there is: processes with their memory, files and sockets, shared memory, files on disk, objects of the job.

Invariants: only what belongs to this cluster is counted (a mark in the environment of each process of a node, and the
family of the supervisor); a process that ends while it is looked at is left out.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.faults.api import ApiError
from benchmarks.faults.stage import NAMESPACE
from trainium_devcluster.state import MARKER

if TYPE_CHECKING:
    from benchmarks.faults.stage import Stage

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
_KEPT = ("kube-root-ca.crt",)
_NAMES = {
    "trainium-operator": "operator",
    "trainium_operator": "operator",
    "trainium-agent": "agent",
    "trainium_trainer.agent": "agent",
    "trainium_devcluster.node": "node runtime",
    "trainium_devcluster.supervisor": "supervisor",
    "kube-apiserver": "API server",
    "kube-controller-manager": "controller manager",
    "kube-scheduler": "scheduler",
}
OURS = frozenset({"operator", "agent", "node runtime", "supervisor"})
"""Whose growth is a fault of ours."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process."""

    pid: int
    began: float
    role: str
    megabytes: float
    files: int
    sockets: int
    threads: int


@dataclass(frozen=True, slots=True)
class Census:
    """One look."""

    at: float
    """Unix seconds."""
    processes: tuple[Process, ...]
    shared_memory: int
    """Entries of /dev/shm of this machine that the trainer or torch may have made."""
    node_files: int
    """Files in the folders of the nodes."""
    job_files: int
    objects: dict[str, int] = field(default_factory=dict)
    """Of the job's namespace, by kind; empty while the API server is away."""

    def roles(self) -> dict[str, int]:
        """Processes by role."""
        counted: dict[str, int] = {}
        for process in self.processes:
            counted[process.role] = counted.get(process.role, 0) + 1
        return dict(sorted(counted.items()))

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def take_census(stage: Stage, folder: Path | None) -> Census:
    """Look now; `folder`: of the job, when it has one."""
    cluster = stage.site.cluster
    assert cluster is not None
    return Census(
        at=time.time(),
        processes=tuple(_processes(f"{MARKER}={cluster.paths.root}/".encode())),
        shared_memory=_entries(_SHARED_MEMORY),
        node_files=_files(cluster.paths.root / "nodes"),
        job_files=0 if folder is None else _files(folder),
        objects=_objects(stage),
    )


def _processes(mark: bytes) -> list[Process]:
    family = {child.pid for child in psutil.Process().children(recursive=True)}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.pid not in family and mark not in Path(f"/proc/{process.pid}/environ").read_bytes():
                continue
            with process.oneshot():
                files, sockets = _descriptors(process.pid)
                found.append(
                    Process(
                        pid=process.pid,
                        began=process.create_time(),
                        role=role_of(process.cmdline()),
                        megabytes=round(process.memory_info().rss / 1e6, 1),
                        files=files,
                        sockets=sockets,
                        threads=process.num_threads(),
                    )
                )
    return found


def role_of(command: list[str]) -> str:
    """What a process is, by its program: that of a Python process is its module, or its script."""
    words = [word for word in command if word]
    if not words:
        return "nameless"
    program = Path(words[0].split()[0].rstrip(":")).name
    if program.startswith("python"):
        after = [word for word in words[1:] if word == "-m" or not word.startswith("-")]
        program = after[1] if after[:1] == ["-m"] and len(after) > 1 else Path(after[0]).name if after else program
    return _NAMES.get(program, program)


def _descriptors(pid: int) -> tuple[int, int]:
    """Open files, and how many of them are sockets."""
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


def _objects(stage: Stage) -> dict[str, int]:
    counted: dict[str, int] = {}
    for kind in _KINDS:
        try:
            items = stage.api.get("/" + kind.format(NAMESPACE))["items"]
        except (ApiError, OSError):
            return {}
        counted[kind.rpartition("/")[2]] = sum(item["metadata"]["name"] not in _KEPT for item in items)
    return counted
