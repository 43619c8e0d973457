"""One session of tests at a time on a cluster that is not its own: a Lease that is renewed while the session lives.

Sessions change what all of a cluster shares (the definition, the operator, nodes) and remove what others left, so two
would spoil each other. Invariants: no clocks are compared, a Lease is free when its session is seen not to renew it
for RENEWED_WITHIN seconds, at once when that was a process of this machine and is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from tests.testing.cluster.access import Access

NAME, NAMESPACE = "trainium-tests", "default"
RENEW_SECONDS = 10.0
RENEWED_WITHIN = 40.0


class TakenError(Exception):
    """Another session has the cluster; the text names it, and what to do."""


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """A process, named so that others find out whether it still lives."""

    machine: str
    process: int
    began: int
    """Unix seconds: process numbers come again."""

    @staticmethod
    def this() -> LeaseHolder:
        """The process that runs this."""
        return LeaseHolder(_machine(), os.getpid(), int(psutil.Process().create_time()))

    @staticmethod
    def read(text: str) -> LeaseHolder | None:
        """Parse the holder of a Lease; None when it is nothing of ours."""
        try:
            machine, process, began = text.rsplit("/", 2)
            return LeaseHolder(machine, int(process), int(began))
        except ValueError:
            return None

    def text(self) -> str:
        """For the Lease."""
        return f"{self.machine}/{self.process}/{self.began}"

    def has_ended(self) -> bool:
        """Return whether it is known to have ended; never of a process on another machine."""
        if self.machine != _machine():
            return False
        try:
            return abs(psutil.Process(self.process).create_time() - self.began) > 1.5
        except psutil.NoSuchProcess:
            return True


class SessionLease:
    """The Lease of this session on one cluster."""

    def __init__(self, access: Access, holder: LeaseHolder | None = None, *, within: float = RENEWED_WITHIN) -> None:
        self._access = access
        self._holder = (holder or LeaseHolder.this()).text()
        self._within = within
        self._over = threading.Event()
        self.lost = ""
        """Who has taken it over meanwhile, because it was not renewed in time; empty as long as it is held."""

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Take it, renew it, give it back. Raises TakenError."""
        self._take()
        renewing = threading.Thread(target=self._renew, name="session-lease", daemon=True)
        renewing.start()
        try:
            yield
        finally:
            self._over.set()
            renewing.join()
            if not self.lost:
                self._kubectl("delete", "lease", NAME, "--ignore-not-found")

    def _take(self) -> None:
        while True:
            made = self._kubectl("create", "-f", "-", document=self._document())
            if made.returncode == 0:
                return
            if "AlreadyExists" not in made.stderr:
                raise TakenError(f"The cluster cannot be had for this session of tests: {made.stderr.strip()}")
            found = self._found()
            if found is None:
                continue  # it was released this moment
            self._await_its_end(found)
            # Of two who want it now one is refused: the Lease has changed for the other.
            if self._kubectl("replace", "-f", "-", document=self._document(_version(found))).returncode == 0:
                return

    def _await_its_end(self, found: dict[str, Any]) -> None:
        """Return when who has it is gone; TakenError when it is renewed."""
        holder = LeaseHolder.read(found["spec"].get("holderIdentity") or "")
        if holder is None or holder.has_ended():
            return
        local = holder.machine == _machine()
        deadline = time.monotonic() + self._within
        while time.monotonic() < deadline:
            now = self._found()
            if now is None or _version(now) != _version(found) or local:
                raise TakenError(
                    f"Another session of tests uses this cluster: process {holder.process} on {holder.machine}. "
                    f"Wait for its end; one that is gone loses the cluster after {self._within:.0f} s."
                )
            time.sleep(self._within / 40)

    def _renew(self) -> None:
        while not self._over.wait(RENEW_SECONDS):
            found = self._found()
            if found is None:
                continue  # no answer, or somebody has removed it by hand
            if found["spec"].get("holderIdentity") != self._holder:
                self.lost = str(found["spec"].get("holderIdentity"))
                return
            self._kubectl("replace", "-f", "-", document=self._document(_version(found)))

    def _document(self, version: str = "") -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        metadata = {"name": NAME, "namespace": NAMESPACE} | ({"resourceVersion": version} if version else {})
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {"holderIdentity": self._holder, "leaseDurationSeconds": int(RENEWED_WITHIN), "renewTime": now},
        }

    def _found(self) -> dict[str, Any] | None:
        """The Lease; None when there is none, or no answer."""
        text = self._kubectl("get", "lease", NAME, "--ignore-not-found", "-o", "json").stdout
        found: dict[str, Any] | None = json.loads(text) if text else None
        return found

    def _kubectl(self, *arguments: str, document: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
        stdin = json.dumps(document) if document is not None else ""
        return self._access.run("kubectl", "-n", NAMESPACE, *arguments, stdin=stdin)


def _version(lease: dict[str, Any]) -> str:
    return str(lease["metadata"]["resourceVersion"])


def _machine() -> str:
    """Containers of one machine have its boot, and separate names."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{platform.node()}-{boot[:8]}"
