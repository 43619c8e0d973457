"""Lock a key, so that one of the processes and nodes that share a folder compiles it.

A lock is a file that its holder makes and touches every few seconds. It is stale when its holder, on this machine, has
ended, or when it has not been touched for a minute by the folder's own clock.

Guarantees:
- A live holder's lock is never taken away.
- What two holders would do is harmless all the same (`cache` publishes atomically), so that a lock saves work and
  protects nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STALE_SECONDS = 60.0
_TOUCH_SECONDS = 10.0
_POLL_SECONDS = 1.0


@contextlib.contextmanager
def held(
    path: Path,
    *,
    unless: Callable[[], bool],
    stale_seconds: float = STALE_SECONDS,
    poll_seconds: float = _POLL_SECONDS,
) -> Iterator[bool]:
    """Hold the lock at `path`, or stop waiting for it once `unless` holds; the value is whether it is held.

    Raises OSError when the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    me = _Holder.here()
    pause = threading.Event()
    while not me.take(path):
        if unless():
            yield False
            return
        _break_if_stale(path, stale_seconds)
        pause.wait(poll_seconds)
    done = threading.Event()
    toucher = threading.Thread(target=_touch, args=(path, done), name="compile-lock", daemon=True)
    toucher.start()
    try:
        yield True
    finally:
        done.set()
        toucher.join()
        if _read(path).get("token") == me.token:
            path.unlink(missing_ok=True)


class _Holder:
    """The holder of a lock: a process of a machine, as far as another process there can know."""

    def __init__(self, place: str, pid: int, born: str, token: str) -> None:
        self.place, self.pid, self.born, self.token = place, pid, born, token

    @classmethod
    def here(cls) -> _Holder:
        return cls(_place(), os.getpid(), _born(os.getpid()), uuid.uuid4().hex)

    def take(self, path: Path) -> bool:
        """Return whether the lock was free and is now this holder's."""
        aside = path.with_name(f".{path.name}.{self.token}")
        aside.write_text(json.dumps(vars(self)), encoding="utf-8")
        try:
            os.link(aside, path)  # complete or not there, also on NFS
        except FileExistsError:
            return False
        finally:
            aside.unlink()
        return True


def _touch(path: Path, done: threading.Event) -> None:
    while not done.wait(_TOUCH_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(path)


def _break_if_stale(path: Path, stale_seconds: float) -> None:
    found = _read(path)
    if not found or not _is_stale(path, found, stale_seconds):
        return
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.rename(aside)
    except OSError:
        return  # somebody else was quicker
    if _read(aside).get("token") != found.get("token"):
        # Between the look and the move it was broken and taken by another: give it back.
        with contextlib.suppress(OSError):
            os.link(aside, path)
    aside.unlink(missing_ok=True)


def _is_stale(path: Path, found: dict[str, Any], stale_seconds: float) -> bool:
    if found.get("place") == _place():
        return _born(int(found.get("pid", 0))) != found.get("born")
    probe = path.with_name(f".now.{uuid.uuid4().hex}")
    try:
        probe.touch()
        return probe.stat().st_mtime - path.stat().st_mtime > stale_seconds
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _place() -> str:
    """Names this machine and its process numbers: a pod has its own."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    known = boot.read_text(encoding="utf-8").strip() if boot.exists() else ""
    return f"{socket.gethostname()} {known} {namespace.readlink() if namespace.is_symlink() else ''}"


def _born(pid: int) -> str:
    """Return when a process was started, by the kernel's count; empty for one that has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]
