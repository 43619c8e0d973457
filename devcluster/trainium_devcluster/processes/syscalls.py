"""Call Linux functions that the standard library lacks: namespaces, mounts, process control.

Guarantees:
- Each wrapper raises `OSError` with the path or the name of the call.
- No function creates threads, so all may be called in a forked child.
- Only the standard library is imported, because the launcher must stay small.
"""

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 2

_PR_SET_PDEATHSIG = 1
_PR_CAPBSET_READ = 23
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAP_LAST = 40

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def mount(source: str, target: str, fstype: str = "", flags: int = 0, options: str = "") -> None:
    """Mount `source` on `target`."""
    result = _libc.mount(
        os.fsencode(source), os.fsencode(target), fstype.encode() or None, flags, options.encode() or None
    )
    _check(result, target)


def bind(source: str, target: str, *, read_only: bool = False) -> None:
    """Bind `source` (directory or file, with its submounts) to `target`."""
    mount(source, target, flags=MS_BIND | MS_REC)
    if read_only:
        remount_read_only(target)


def remount_read_only(target: str) -> None:
    """Make the mount at `target` read-only, with the flags that an unprivileged user may not clear."""
    flags = MS_REMOUNT | MS_BIND | MS_RDONLY
    for locked in (0, MS_NOSUID, MS_NODEV, MS_NOSUID | MS_NODEV):
        try:
            mount("none", target, flags=flags | locked)
        except PermissionError:
            continue
        return
    mount("none", target, flags=flags)


def unmount(target: str) -> None:
    """Detach the mount at `target`, even when it is in use."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), target)


def unshare(flags: int) -> None:
    """Move the calling process into new namespaces."""
    _check(_libc.unshare(flags), "unshare")


def set_namespace(fd: int, kind: int) -> None:
    """Enter the namespace behind `fd`, which must be of the `kind` CLONE_NEW*."""
    _check(_libc.setns(fd, kind), "setns")


def pivot_root(new_root: str, put_old: str) -> None:
    """Make `new_root` the root of this mount namespace and mount the old one at `put_old`."""
    number = _SYS_PIVOT_ROOT[os.uname().machine]
    _check(_libc.syscall(number, os.fsencode(new_root), os.fsencode(put_old)), "pivot_root")


def set_hostname(name: str) -> None:
    """Set the host name of this UTS namespace."""
    raw = name.encode()
    _check(_libc.sethostname(raw, len(raw)), "sethostname")


def die_with_parent(signal_number: int) -> None:
    """Make the kernel send `signal_number` to this process when its parent ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "prctl PDEATHSIG")


def become_subreaper() -> None:
    """Adopt the orphans among the descendants of this process."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl SUBREAPER")


def forbid_new_privileges() -> None:
    """Forbid this process and its children to gain privileges by exec."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl NO_NEW_PRIVS")


def limit_capabilities(keep: frozenset[int]) -> None:
    """Drop every capability that is not in `keep` from the bounding set (takes effect at the next exec)."""
    for capability in range(_CAP_LAST + 1):
        if capability not in keep and _libc.prctl(_PR_CAPBSET_READ, capability, 0, 0, 0) == 1:
            _check(_libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0), "prctl CAPBSET_DROP")


def map_own_user() -> None:
    """Map the caller's user and group to themselves in its new user namespace."""
    raise_on_missing = (("setgroups", "deny"), ("uid_map", f"{_UID} {_UID} 1"), ("gid_map", f"{_GID} {_GID} 1"))
    for name, text in raise_on_missing:
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:  # noqa: PTH123 - pathlib is not worth importing
            file.write(text)


_UID, _GID = os.geteuid(), os.getegid()  # read before a new user namespace hides them
