"""Exclude concurrent sessions of tests on an existing cluster by a Lease, which a session renews until its end.

Sessions change the definition, the operator and nodes, and remove leftovers of others, so two would disturb each other.

Guarantees:
- No clocks of different machines are compared.
- A Lease is free once its session has not renewed it for LEASE_SECONDS.
- The Lease of an ended process of this machine is free at once.
"""

import contextlib
import json
import os
import platform
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import psutil

from tests.testing.cluster.access import Access

LEASE_NAME, LEASE_NAMESPACE = "trainium-tests", "default"
RENEW_SECONDS = 10.0
LEASE_SECONDS = 40.0


class LeaseHeldError(Exception):
    """Report that another session has the Lease; the message names it and the remedy."""


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """A process, with a name from which others can find out whether it is alive."""

    machine: str
    process: int
    started: int
    """Start in Unix seconds, because pids are reused."""

    @classmethod
    def current(cls) -> Self:
        """Return the holder for this process."""
        return cls(_machine_id(), os.getpid(), int(psutil.Process().create_time()))

    @classmethod
    def read(cls, text: str) -> Self | None:
        """Parse the holder of a Lease; return None if it is not a session of tests."""
        try:
            machine, process, started = text.rsplit("/", 2)
            return cls(machine, int(process), int(started))
        except ValueError:
            return None

    def text(self) -> str:
        """Return the value of the Lease's holderIdentity."""
        return f"{self.machine}/{self.process}/{self.started}"

    def has_ended(self) -> bool:
        """Return whether the process has ended; False for one on another machine."""
        if self.machine != _machine_id():
            return False
        try:
            return abs(psutil.Process(self.process).create_time() - self.started) > 1.5
        except psutil.NoSuchProcess:
            return True


class SessionLease:
    """The Lease of this session on one cluster."""

    def __init__(self, access: Access, holder: LeaseHolder | None = None, *, within: float = LEASE_SECONDS) -> None:
        self._access = access
        self._holder = (holder or LeaseHolder.current()).text()
        self._within = within
        self._ended = threading.Event()
        self.lost = ""
        """The holder that acquired the Lease meanwhile; empty as long as this session has it."""

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Acquire, renew and release the Lease; raise LeaseHeldError when another session has it."""
        self._acquire()
        renewal = threading.Thread(target=self._renew, name="session-lease", daemon=True)
        renewal.start()
        try:
            yield
        finally:
            self._ended.set()
            renewal.join()
            if not self.lost:
                self._kubectl("delete", "lease", LEASE_NAME, "--ignore-not-found")

    def _acquire(self) -> None:
        while True:
            created = self._kubectl("create", "-f", "-", document=self._manifest())
            if created.returncode == 0:
                return
            if "AlreadyExists" not in created.stderr:
                raise LeaseHeldError(
                    f"The cluster cannot be reserved for this session of tests: {created.stderr.strip()}"
                )
            lease = self._find()
            if lease is None:
                continue  # it was released meanwhile
            self._wait_for_expiry(lease)
            # Of two concurrent requests one is refused: its version of the Lease is old.
            if self._kubectl("replace", "-f", "-", document=self._manifest(_resource_version(lease))).returncode == 0:
                return

    def _wait_for_expiry(self, lease: dict[str, Any]) -> None:
        """Wait until the holder has ended; raise LeaseHeldError when it renews the Lease."""
        holder = LeaseHolder.read(lease["spec"].get("holderIdentity") or "")
        if holder is None or holder.has_ended():
            return
        is_local = holder.machine == _machine_id()
        deadline = time.monotonic() + self._within
        while time.monotonic() < deadline:
            current = self._find()
            if current is None or _resource_version(current) != _resource_version(lease) or is_local:
                raise LeaseHeldError(
                    f"Another session of tests uses this cluster: process {holder.process} on {holder.machine}. "
                    f"Wait for its end; one that is gone loses the cluster after {self._within:.0f} s."
                )
            time.sleep(self._within / 40)

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            lease = self._find()
            if lease is None:
                continue  # no answer, or the Lease was deleted
            if lease["spec"].get("holderIdentity") != self._holder:
                self.lost = str(lease["spec"].get("holderIdentity"))
                return
            self._kubectl("replace", "-f", "-", document=self._manifest(_resource_version(lease)))

    def _manifest(self, version: str = "") -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        metadata = {"name": LEASE_NAME, "namespace": LEASE_NAMESPACE} | (
            {"resourceVersion": version} if version else {}
        )
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {"holderIdentity": self._holder, "leaseDurationSeconds": int(LEASE_SECONDS), "renewTime": now},
        }

    def _find(self) -> dict[str, Any] | None:
        """Return the Lease, or None if it does not exist or the API server does not answer."""
        text = self._kubectl("get", "lease", LEASE_NAME, "--ignore-not-found", "-o", "json").stdout
        lease: dict[str, Any] | None = json.loads(text) if text else None
        return lease

    def _kubectl(self, *arguments: str, document: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
        stdin = json.dumps(document) if document is not None else ""
        return self._access.run("kubectl", "-n", LEASE_NAMESPACE, *arguments, stdin=stdin)


def _resource_version(lease: dict[str, Any]) -> str:
    return str(lease["metadata"]["resourceVersion"])


def _machine_id() -> str:
    """Return an identity of this machine or container: containers share the boot id, not the host name."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{platform.node()}-{boot[:8]}"
