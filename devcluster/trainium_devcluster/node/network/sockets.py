"""Cut the network of running processes without privileges, by a filter on their sockets that drops all input.

The kernel lets a process take a duplicate of a descendant's descriptor (pidfd_getfd) and attach a classic BPF program
to a socket. A program that returns 0 drops every incoming segment, so connections hang as in a network partition
instead of breaking. Output is still sent, and a listening socket accepts no connection. Repeated searches find new
sockets.

Guarantees:
- Only TCP sockets are affected.
- `heal` restores every socket that was cut and still exists.
"""

import contextlib
import ctypes
import os
import platform
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

from trainium_devcluster.processes.process_tree import list_sockets

_SYS_PIDFD_GETFD = 438
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_BPF_RET_K = 0x06

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class SocketFilter:
    """Cuts and heals sockets; keeps a duplicate of each cut socket."""

    _cut: dict[str, socket.socket] = field(default_factory=dict)

    @staticmethod
    def is_supported() -> bool:
        """Return whether this machine permits the filter, by a test with a new socket."""
        if platform.system() != "Linux":
            return False
        with socket.socket() as probe:
            try:
                duplicate = _copy_descriptor(os.getpid(), probe.fileno())
                _drop_incoming(duplicate)
            except OSError:
                return False
            duplicate.close()
            return True

    def cut(self, pids: Iterable[int]) -> None:
        """Cut every TCP socket of these processes that is not cut yet."""
        for pid in pids:
            for fd, inode in list_sockets(pid):
                if inode in self._cut:
                    continue
                with contextlib.suppress(OSError):
                    duplicate = _copy_descriptor(pid, fd)
                    if duplicate.family in {socket.AF_INET, socket.AF_INET6} and duplicate.type == socket.SOCK_STREAM:
                        _drop_incoming(duplicate)
                        self._cut[inode] = duplicate
                    else:
                        duplicate.close()

    def heal(self) -> None:
        """Remove the filters."""
        for duplicate in self._cut.values():
            with contextlib.suppress(OSError):
                duplicate.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            duplicate.close()
        self._cut.clear()


def _copy_descriptor(pid: int, fd: int) -> socket.socket:
    pidfd = os.pidfd_open(pid)
    try:
        own = _libc.syscall(_SYS_PIDFD_GETFD, pidfd, fd, 0)
        if own < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return socket.socket(fileno=own)
    finally:
        os.close(pidfd)


def _drop_incoming(target: socket.socket) -> None:
    program = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RET_K, 0, 0, 0))
    descriptor = struct.pack("HL", 1, ctypes.addressof(program))
    target.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, descriptor)
