"""End and remove the leftovers of a cluster whose supervisor has ended.

Guarantees:
- No process is killed by its name: only processes that a pid file identifies or that have the cluster's marker.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import stat
from pathlib import Path

from trainium_devcluster.processes.process_tree import ProcessId, find_marked, kill_tree
from trainium_devcluster.state import MARKER, ClusterPaths

logger = logging.getLogger(__name__)


def end_leftovers(paths: ClusterPaths) -> int:
    """Kill every process of a cluster without a supervisor; return the number found."""
    recorded = [ProcessId.read(file) for file in sorted(paths.pids.glob("*.json"))] if paths.pids.is_dir() else []
    alive = [process for process in recorded if process is not None and process.is_alive()]
    found = {process.pid for process in alive} | set(find_marked(MARKER, f"{paths.root}/", prefix=True))
    for process in alive:
        process.signal(signal.SIGKILL)
    kill_tree(None, MARKER, f"{paths.root}/", prefix=True)
    return len(found)


def remove_folder(root: Path) -> None:
    """Remove a folder of the cluster, unless something is mounted in it, whose content may not be the cluster's."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    if any(Path(mount).is_relative_to(root) for mount in mounts):
        logger.error("something is still mounted below %s, so its files stay; unmount it and run down again", root)
    else:
        remove_tree(root)


def remove_tree(folder: Path) -> None:
    """Remove `folder` and its contents, including unreadable directories (such as work directories of overlays)."""

    def unlock(_: object, path: str, __: object) -> None:
        with contextlib.suppress(OSError):
            os.chmod(path, stat.S_IRWXU)  # noqa: PTH101 - rmtree gives text
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)  # noqa: PTH108, PTH112

    shutil.rmtree(folder, onerror=unlock)
    with contextlib.suppress(OSError):
        shutil.rmtree(folder)
