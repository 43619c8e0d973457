"""Check within milliseconds whether this pod can train.

Guarantees:
- A check examines this pod only.
- A failure is one sentence with an exit code, which decides whom the operator blames (64 the job, 80 the node), or
  without one if the pod may train nevertheless.
- A missing coordinator never fails a pod: training continues while the operator is down.

Longer checks are in `node_checks`.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_contract.exit_codes import ExitCode
from trainium_contract.requirements.descriptors import explain_file_limit
from trainium_contract.spec.health import PreflightCheck
from trainium_contract.wire.messages import CheckResult
from trainium_contract.worker_process.open_files import read_limit
from trainium_contract.worker_process.write_access import FORBIDDEN, explain_forbidden

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from trainium_agent.settings import AgentSettings

_MIN_FREE_BYTES = 1 << 20
_SCRATCH_BYTES = 64 << 20
_PROCESS_BYTES = 128 << 20
"""A training process cannot start in less memory."""
_DEVICES = Path("/dev")
_MEMORY = Path("/proc/meminfo")
CLOCK_SECONDS = 5.0
"""A larger clock difference makes times in logs and status misleading; no decision depends on it."""


@dataclass(frozen=True, slots=True)
class PreflightFinding:
    """A problem of the pod; `code` is None for a warning, which stops nothing."""

    code: ExitCode | None
    sentence: str
    check: PreflightCheck | None = None
    """The check that found it; None for a check that always runs."""


def run_preflight(settings: AgentSettings, devices: Path = _DEVICES) -> tuple[PreflightFinding, ...]:
    """Return all problems of the pod, in the order of the checks; empty when the pod is fit."""
    findings = [*_check_memory_directory(settings.memory_directory)]
    for path in settings.required_files:
        findings += _check_config(path)
    # Any worker may become node rank 0, to which all others connect, so each needs the limit of node rank 0.
    nodes = settings.largest_nodes
    sentence = explain_file_limit(read_limit(), nodes * settings.processes_per_node, nodes) if nodes else ""
    if sentence:
        findings.append(PreflightFinding(ExitCode.USER_ERROR, f"Too few open files: {sentence}."))
    if PreflightCheck.DEVICES in settings.checks:
        findings += _check_devices(settings.neuron_devices, devices)
        findings += _check_versions(settings.neuron_devices)
    if PreflightCheck.MEMORY in settings.checks:
        findings += _check_memory(settings.processes_per_node)
    if PreflightCheck.DISK in settings.checks:
        findings += _check_disk(settings.scratch_directory)
    return (*findings, *_check_coordinator(settings))


def check_results(
    settings: AgentSettings, findings: Iterable[PreflightFinding], seconds: float
) -> tuple[CheckResult, ...]:
    """Return the outcome of each quick check, for the heartbeat."""
    failed = {finding.check: finding.sentence for finding in findings}
    quick = (PreflightCheck.DEVICES, PreflightCheck.MEMORY, PreflightCheck.DISK)
    return tuple(
        CheckResult(
            check=check, passed=check not in failed, seconds=round(seconds, 3), detail=failed.get(check, "")[:1024]
        )
        for check in quick
        if check in settings.checks
    )


def compare_clocks(coordinator_time: float, sent_at: float, received_at: float) -> CheckResult:
    """Compare the coordinator's clock with ours, which was read before and after the request."""
    uncertainty = max(0.0, (received_at - sent_at) / 2)
    difference = coordinator_time - (sent_at + uncertainty)
    passed = abs(difference) <= CLOCK_SECONDS + uncertainty
    where = "behind" if difference > 0 else "ahead of"
    detail = "" if passed else f"The node's clock is {abs(difference):.1f} s {where} the coordinator's; check its NTP."
    seconds = round(received_at - sent_at, 3)
    return CheckResult(check=PreflightCheck.CLOCK, passed=passed, seconds=seconds, detail=detail)


def _check_memory_directory(directory: Path) -> Iterator[PreflightFinding]:
    reason = _explain_unwritable(directory)
    if reason:
        yield PreflightFinding(
            ExitCode.USER_ERROR,
            f"The memory directory {directory} is not writable ({reason}); "
            "it must be on a memory-backed emptyDir of the pod.",
            PreflightCheck.MEMORY,
        )
        return
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < _MIN_FREE_BYTES:
        yield PreflightFinding(
            ExitCode.USER_ERROR,
            f"The memory directory {directory} has {free_bytes} bytes left; give its emptyDir a larger sizeLimit.",
            PreflightCheck.MEMORY,
        )
    if _find_file_system(directory) not in ("tmpfs", "ramfs", ""):
        yield PreflightFinding(
            None, f"The memory directory {directory} is on a disk; snapshots will be slower than in memory."
        )


def _explain_unwritable(directory: Path) -> str:
    """Return why a folder cannot be written; empty when it can."""
    probe = directory / f".preflight-{os.getpid()}-{time.monotonic_ns()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        return f"{reason}: {explain_forbidden(error.errno)}" if error.errno in FORBIDDEN else reason
    return ""


def _find_file_system(directory: Path) -> str:
    """Return the type of the file system that holds a directory; empty if unknown."""
    longest, file_system = "", ""
    resolved = str(directory.resolve())
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        fields = line.split(" ")
        mount = fields[1].replace("\\040", " ")
        if len(mount) >= len(longest) and (resolved == mount or resolved.startswith(mount.rstrip("/") + "/")):
            longest, file_system = mount, fields[2]
    return file_system


def _check_config(path: Path) -> Iterator[PreflightFinding]:
    try:
        empty = not path.read_bytes().strip()
    except OSError as error:
        yield PreflightFinding(
            ExitCode.USER_ERROR,
            f"The trainer configuration {path} cannot be read ({error.strerror}); "
            "mount the job's config map at its folder.",
        )
        return
    if empty:
        yield PreflightFinding(ExitCode.USER_ERROR, f"The trainer configuration {path} is empty.")


def _check_devices(expected: int, devices: Path) -> Iterator[PreflightFinding]:
    if expected == 0:
        return
    visible = [entry for entry in devices.glob("neuron*") if entry.name[len("neuron") :].isdigit()]
    if len(visible) < expected:
        yield PreflightFinding(
            ExitCode.DEVICE_FAULT,
            f"{len(visible)} Neuron devices are visible under {devices} but the worker was given {expected}; "
            "the node's driver, device plugin or DRA driver lost some.",
            PreflightCheck.DEVICES,
        )


def _check_versions(expected: int) -> Iterator[PreflightFinding]:
    if expected and (sentence := explain_version_mismatch(read_driver_version(), read_runtime_version())):
        yield PreflightFinding(None, f"{sentence[0].upper()}{sentence[1:]}", PreflightCheck.DEVICES)


def _check_memory(processes: int, meminfo: Path = _MEMORY) -> Iterator[PreflightFinding]:
    """Check the memory of the host; no finding if it cannot be read."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="utf-8").splitlines() if ":" in line)
        available = int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, ValueError, KeyError, IndexError):
        return
    if available < processes * _PROCESS_BYTES:
        yield PreflightFinding(
            None,
            f"The host has {available >> 20} MiB of memory left for {processes} training processes.",
            PreflightCheck.MEMORY,
        )


def _check_disk(directory: Path | None) -> Iterator[PreflightFinding]:
    if directory is None:
        return
    reason = _explain_unwritable(directory)
    if reason:
        yield PreflightFinding(None, f"The scratch folder {directory} is not writable ({reason}).", PreflightCheck.DISK)
        return
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < _SCRATCH_BYTES:
        yield PreflightFinding(
            None, f"The scratch volume of {directory} has {free_bytes >> 20} MiB left.", PreflightCheck.DISK
        )


def _check_coordinator(settings: AgentSettings) -> Iterator[PreflightFinding]:
    for endpoint in settings.coordinator:
        try:
            socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
        except OSError as error:
            yield PreflightFinding(
                None, f"The coordinator's name {endpoint.host} does not resolve yet ({error}); still trying."
            )


DRIVER = Path("/sys/module/neuron/version")
PACKAGES = Path("/var/lib/dpkg/status")
_RUNTIME = "aws-neuronx-runtime-lib"
_MAX_FILE_BYTES = 16 << 20
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})")
_STANZA = re.compile(rf"^Package: {_RUNTIME}\n(?:.+\n)*?Version: (\S+)$", re.MULTILINE)

Version = tuple[int, int]


def explain_version_mismatch(driver: Version | None, runtime: Version | None) -> str:
    """Return why driver and runtime do not work together, and the remedy; empty if they do or one is unknown."""
    if driver is None or runtime is None:
        return ""
    pair = f"the node's Neuron driver {_format_version(driver)} and the image's runtime {_format_version(runtime)}"
    if driver <= (2, 26) and runtime >= (2, 32):
        return f"{pair} do not work together: this runtime needs a driver above 2.26; update the node (its AMI)."
    if driver >= (2, 29) and runtime < (2, 33):
        return f"{pair} do not work together: this driver needs a runtime from 2.33 on; use an image that has one."
    return ""


def read_driver_version(path: Path = DRIVER) -> Version | None:
    """Return the version of the kernel module; None if it is not loaded."""
    return _parse_version(_read(path))


def read_runtime_version(path: Path = PACKAGES) -> Version | None:
    """Return the version of the image's package; None if it was installed in another way."""
    match = _STANZA.search(_read(path))
    return _parse_version(match[1]) if match else None


def _parse_version(text: str) -> Version | None:
    match = _VERSION.match(text.strip())
    return (int(match[1]), int(match[2])) if match else None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_FILE_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _format_version(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
