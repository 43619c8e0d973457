"""End and remove the leftovers of a cluster whose supervisor has ended.

Invariant: nothing is killed by its name: only processes that a pid file identifies or that carry the cluster's own
marker.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
from pathlib import Path

from trainium_devcluster.processes.process_families import ProcessId, kill_family, marked
from trainium_devcluster.state import MARKER, ClusterPaths

logger = logging.getLogger(__name__)


def end_leftovers(paths: ClusterPaths) -> int:
    """Kill every process of a cluster without supervisor; returns how many were found."""
    recorded = [ProcessId.read(file) for file in sorted(paths.pids.glob("*.json"))] if paths.pids.is_dir() else []
    alive = [process for process in recorded if process is not None and process.is_alive()]
    found = {process.pid for process in alive} | set(marked(MARKER, f"{paths.root}/", prefix=True))
    for process in alive:
        process.signal(signal.SIGKILL)
    kill_family(None, MARKER, f"{paths.root}/", prefix=True)
    return len(found)


def remove_files(paths: ClusterPaths) -> bool:
    """Remove the cluster's folder; see `remove_folder`."""
    return remove_folder(paths.root)


def remove_folder(root: Path) -> bool:
    """Remove a folder of the cluster's; not when something is mounted in it, whose content is not the cluster's."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    if any(Path(mount).is_relative_to(root) for mount in mounts):
        logger.error("something is still mounted below %s, so its files stay; unmount it and run down again", root)
        return False
    shutil.rmtree(root, ignore_errors=True)
    if root.exists():
        # A pod may have taken the write permission from its own folders; they go all the same.
        for folder, _, _ in os.walk(root):
            with contextlib.suppress(OSError):
                Path(folder).chmod(0o700)
        shutil.rmtree(root, ignore_errors=True)
    return not root.exists()
