"""Who goes first on a machine that carries everything: what is measured, before what only has to be there.

In a cluster the API server, etcd and the nodes have machines of their own; here their work in the background would
otherwise be measured as the operator's.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_devcluster.processes.process_families import descendants

if TYPE_CHECKING:
    from trainium_devcluster.cluster import Cluster

_LAST = 19
_FIRST = -10


def go_first(*pids: int, level: int = _FIRST) -> bool:
    """Before whatever else the machine does, where that is allowed (it is to root); whether it was.

    Where the kernel gives each session a share of its own, a priority counts within the session alone; so its session
    goes first too.
    """
    try:
        for pid in pids:
            group = Path(f"/proc/{pid}/autogroup")
            if group.exists():
                group.write_text(str(level))
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.setpriority(os.PRIO_PROCESS, int(thread.name), level)
    except OSError:
        return False
    return True


def give_way(cluster: Cluster) -> None:
    """The control plane and the fake fleet get what others leave of the processors; for as long as they run."""
    for pid in descendants(cluster.status()["supervisor"]["pid"]):
        with contextlib.suppress(OSError):  # it has ended
            # A priority is a thread's own; threads that are started later take their starter's.
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.setpriority(os.PRIO_PROCESS, int(thread.name), _LAST)
