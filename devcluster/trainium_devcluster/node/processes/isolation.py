"""Find the strongest isolation of pods that this machine permits, and enter it.

Guarantees:
- The test runs in a forked child, so that a failure does not change the node process.
- `enter` must be called while the process has a single thread (the kernel's rule for user namespaces).
"""

import os
import signal
from dataclasses import dataclass
from enum import StrEnum
from tempfile import mkdtemp

from trainium_devcluster.errors import ClusterError
from trainium_devcluster.processes import syscalls as sc


class Namespaces(StrEnum):
    """The namespaces that the node can create."""

    ROOT = "root"  # mount namespaces with the privileges of root
    USER = "user"  # mount namespaces inside a user namespace of the node


@dataclass(frozen=True, slots=True)
class Isolation:
    """The isolation of the node's pods; `pid_namespace` is a process namespace with its own /proc per container."""

    namespaces: Namespaces
    pid_namespace: bool


def detect() -> Isolation:
    """Return the strongest isolation that works on this machine. Raises ClusterError if none does."""
    candidates = [Namespaces.ROOT, Namespaces.USER] if os.geteuid() == 0 else [Namespaces.USER]
    for namespaces in candidates:
        for pid_namespace in (True, False):
            if _is_supported(namespaces, pid_namespace):
                return Isolation(namespaces, pid_namespace)
    raise ClusterError(
        "This machine permits mount namespaces neither to root nor to this user, and pods need them: permit user "
        "namespaces (sysctl kernel.unprivileged_userns_clone=1, or AppArmor's restriction of them), or run as root."
    )


def enter(isolation: Isolation) -> None:
    """Move this process into a mount namespace of the node, whose mounts end with the node."""
    user = isolation.namespaces is Namespaces.USER
    sc.unshare(sc.CLONE_NEWNS | (sc.CLONE_NEWUSER if user else 0))
    if user:
        sc.map_own_user()
    sc.mount("none", "/", flags=sc.MS_REC | sc.MS_PRIVATE)


def _is_supported(namespaces: Namespaces, pid_namespace: bool) -> bool:
    folder = mkdtemp(prefix="trainium-node-probe-")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            enter(Isolation(namespaces, pid_namespace))
            sc.mount("tmpfs", folder, "tmpfs", options="size=64k")
            status = 0 if not pid_namespace else _try_pid_namespace(folder)
        except OSError:
            status = 1
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    os.rmdir(folder)  # noqa: PTH106 - no pathlib in the part that forks
    return status == 0


def _try_pid_namespace(folder: str) -> int:
    sc.unshare(sc.CLONE_NEWPID | sc.CLONE_NEWUTS)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            sc.die_with_parent(signal.SIGKILL)
            sc.mount("proc", folder, "proc")
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return 0 if status == 0 else 1
