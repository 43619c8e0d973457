"""Kill servers and ranks of a launcher in turn, and measure what each kill costs."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass

from benchmarks.harness.launchers import wait_for
from benchmarks.rollouts.launchers import SERVERS, Launcher
from benchmarks.rollouts.rewards import read_rewards
from trainium_devcluster.node.api.objects import is_ready

_WAIT_SECONDS = 120.0
_KILLS = 2
"""Faults of each kind."""
_STEPS_BETWEEN = 30


@dataclass(frozen=True, slots=True)
class KillCost:
    """Cost of one kill."""

    kind: str
    pause_seconds: float
    """Longest time between two new steps."""
    steps_recomputed: int
    whole_seconds: float
    """Seconds until all servers were ready and training went on."""
    servers_replaced: int


@dataclass(frozen=True, slots=True)
class LauncherCost:
    """Cost of the kills of a launcher."""

    title: str
    step_seconds: float
    """Median time between two steps before the first kill."""
    faults: tuple[KillCost, ...]


def measure_kills(launcher: Launcher) -> LauncherCost:
    """Kill servers and ranks in turn, each after the recovery from the last kill."""
    launcher.start()
    wait_for(
        "the start",
        lambda: read_rewards(launcher.folder).newest_step >= _STEPS_BETWEEN and _count_ready(launcher) == SERVERS,
        _WAIT_SECONDS,
    )
    times = [item.ended_at for item in read_rewards(launcher.folder).computations.values()]
    step_seconds = statistics.median(after - before for before, after in itertools.pairwise(times))
    faults = []
    for _ in range(_KILLS):
        faults += [_measure_kill(launcher, kind) for kind in ("killed server", "killed rank")]
    launcher.stop()
    return LauncherCost(launcher.title, step_seconds, tuple(faults))


def _measure_kill(launcher: Launcher, kind: str) -> KillCost:
    servers = [pod for pod in launcher.list_servers() if is_ready(pod)]
    before = {pod["metadata"]["uid"] for pod in servers}
    if kind == "killed rank":
        launcher.kill_rank()
    else:
        launcher.kill_process(servers[0])
    moment = time.time()
    newest = read_rewards(launcher.folder).newest_step

    restarts = kind == "killed rank" or launcher.restarts_all

    def is_whole() -> bool:
        ledger = read_rewards(launcher.folder)
        has_restarted = ledger.find_first_new_step(moment) is not None
        is_training = ledger.newest_step > newest + 2 and (has_restarted or not restarts)
        return is_training and _count_ready(launcher, kind == "killed server", before) == SERVERS

    wait_for(f"the recovery from {kind}", is_whole, _WAIT_SECONDS)
    whole = time.time()
    steps = read_rewards(launcher.folder).newest_step
    wait_for(
        "further steps", lambda: read_rewards(launcher.folder).newest_step >= steps + _STEPS_BETWEEN, _WAIT_SECONDS
    )
    ledger = read_rewards(launcher.folder)
    after = {pod["metadata"]["uid"] for pod in launcher.list_servers()}
    cost = KillCost(
        kind,
        ledger.find_longest_pause(moment - 1),
        ledger.count_recomputed(moment),
        whole - moment,
        len(before - after),
    )
    launcher.demo.view.log(f"{launcher.title}: {cost}")
    return cost


def _count_ready(launcher: Launcher, is_one_new: bool = False, before: set[str] | None = None) -> int:
    """Return the number of ready servers; 0 while none of them is new, if one must be."""
    ready = {pod["metadata"]["uid"] for pod in launcher.list_servers() if is_ready(pod)}
    return 0 if is_one_new and not ready - (before or set()) else len(ready)
