"""Run `trainium-devcluster binaries`, or `python -m trainium_devcluster.binaries` before packages are installed.

Guarantees:
- Only the standard library is needed, because `scripts/setup.sh` runs this while it installs packages.
- Ctrl-C and SIGTERM end all started processes; one sentence reports that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_devcluster.binaries import interrupts
from trainium_devcluster.binaries.cache import ensure_binaries
from trainium_devcluster.binaries.catalog import CLUSTER_PROGRAMS, OPTIONAL_PROGRAMS, Program
from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from pathlib import Path


def prepare(*, kubernetes: str | None = None, helm: bool = False, **optional: bool) -> Path:
    """Fill the cache, with the cluster's programs first, and return their folder; raises ClusterError.

    `kubernetes` is the version of the cluster's programs, as for `find_kubernetes`. `helm` prepares only that program.
    `optional` are options of `OPTIONAL_PROGRAMS`, which add their programs.
    """
    if unknown := optional.keys() - OPTIONAL_PROGRAMS.keys():
        raise TypeError(f"options of optional programs are {sorted(OPTIONAL_PROGRAMS)}, not {sorted(unknown)}")
    sets = [frozenset({Program.HELM}) if helm else CLUSTER_PROGRAMS]
    sets += [programs for option, programs in OPTIONAL_PROGRAMS.items() if optional.get(option)]
    try:
        with interrupts.catch_interrupts():
            folders = [ensure_binaries(programs=programs, kubernetes=kubernetes).folder for programs in sets]
    except KeyboardInterrupt:
        raise ClusterError(
            "The programs of the development cluster are not all there: their preparation was interrupted. What is "
            "downloaded and compiled is kept, and the next run goes on from there."
        ) from None
    return folders[0]
