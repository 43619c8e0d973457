"""Describe a command to start in a container, with its file system. The module imports only the standard library."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# The default of container runtimes; numbers as in capabilities(7).
CAPABILITIES = {
    "CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7, "SETPCAP": 8,
    "NET_BIND_SERVICE": 10, "NET_RAW": 13, "SYS_CHROOT": 18, "MKNOD": 27, "AUDIT_WRITE": 29, "SETFCAP": 31,
}  # fmt: skip
ADDABLE_CAPABILITIES = CAPABILITIES | {
    "NET_ADMIN": 12, "IPC_LOCK": 14, "IPC_OWNER": 15, "SYS_PTRACE": 19, "SYS_NICE": 23, "SYS_RESOURCE": 24,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mount:
    """`source` on the machine is shown at `target` in the container."""

    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class ContainerCommand:
    """A command to start.

    `scratch` is the writable directory of the container, `shm` the pod's shared memory, `hidden` the node's state
    directory, which pods cannot see.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str = "/"
    hostname: str = ""
    mounts: tuple[Mount, ...] = ()
    scratch: str = ""
    shm: str = ""
    hidden: str = ""
    read_only_root: bool = False
    capabilities: tuple[int, ...] | None = None
    no_new_privileges: bool = False
    join: int | None = None  # process id of the container in which the command is to run, None for a new container
