"""Checks that this pod can train at all, before anybody waits for it.

Invariants: a check looks at this pod only and takes milliseconds; what fails is one sentence with the exit code that
tells the operator whom to blame (64 the job, 80 the node). The coordinator's absence never fails a pod: the operator
may be down while training goes on.
"""

from __future__ import annotations

import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_contract.exit_codes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_trainer.agent.settings import AgentSettings

_MINIMUM_FREE_BYTES = 1 << 20
_DEVICES = Path("/dev")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong with the pod; `code` is None for a warning, which stops nothing."""

    code: ExitCode | None
    sentence: str


def preflight(settings: AgentSettings, devices: Path = _DEVICES) -> tuple[Finding, ...]:
    """Everything found wrong, worst kind not first; empty when the pod is fit."""
    return (
        *_memory_directory(settings.memory_directory),
        *_config(settings.config_path),
        *_devices(settings.neuron_devices, devices),
        *_coordinator(settings),
    )


def _memory_directory(directory: Path) -> Iterator[Finding]:
    probe = directory / f".preflight-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        yield Finding(
            ExitCode.USER_ERROR,
            f"The memory directory {directory} is not writable ({error.strerror}); "
            "it must be on a memory-backed emptyDir of the pod.",
        )
        return
    free = shutil.disk_usage(directory).free
    if free < _MINIMUM_FREE_BYTES:
        yield Finding(
            ExitCode.USER_ERROR,
            f"The memory directory {directory} has {free} bytes left; give its emptyDir a larger sizeLimit.",
        )
    if _file_system_of(directory) not in ("tmpfs", "ramfs", ""):
        yield Finding(None, f"The memory directory {directory} is on a disk; snapshots will be slower than in memory.")


def _file_system_of(directory: Path) -> str:
    """Type of the file system that holds a directory; empty when the kernel does not tell."""
    best, kind = "", ""
    resolved = str(directory.resolve())
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        fields = line.split(" ")
        mount = fields[1].replace("\\040", " ")
        if len(mount) >= len(best) and (resolved == mount or resolved.startswith(mount.rstrip("/") + "/")):
            best, kind = mount, fields[2]
    return kind


def _config(path: Path) -> Iterator[Finding]:
    try:
        empty = not path.read_bytes().strip()
    except OSError as error:
        yield Finding(
            ExitCode.USER_ERROR,
            f"The trainer configuration {path} cannot be read ({error.strerror}); "
            "mount the job's config map at its folder.",
        )
        return
    if empty:
        yield Finding(ExitCode.USER_ERROR, f"The trainer configuration {path} is empty.")


def _devices(expected: int, devices: Path) -> Iterator[Finding]:
    if expected == 0:
        return
    found = [entry for entry in devices.glob("neuron*") if entry.name[len("neuron") :].isdigit()]
    if len(found) < expected:
        yield Finding(
            ExitCode.DEVICE_FAULT,
            f"{len(found)} Neuron devices are visible under {devices} but the worker was given {expected}; "
            "the node's driver or device plugin lost some.",
        )


def _coordinator(settings: AgentSettings) -> Iterator[Finding]:
    for endpoint in settings.coordinator:
        try:
            socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
        except OSError as error:
            yield Finding(None, f"The coordinator's name {endpoint.host} does not resolve yet ({error}); still trying.")
