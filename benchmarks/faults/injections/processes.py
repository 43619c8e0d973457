"""Inject faults into training processes, while pods and nodes remain."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.faults.recovery import Run


def signal_rank(run: Run, signal: str = "KILL", rank: int | None = None) -> None:
    """Send a signal to a training process: of a random member, or of one rank."""
    victim = run.choose_member() if rank is None else run.target.list_members()[rank]
    run.measure(partial(run.target.signal_rank, victim["podName"], signal), victim)


def kill_launcher(run: Run) -> None:
    """Kill the shell that started a random rank in a separate session; one child of both attempts must be alive."""
    victim = run.choose_member()
    pod = victim["podName"]
    run.measure(partial(run.target.signal_rank, pod), victim)
    children = f"/cache/faults/{run.target.commands.name}/children-{pod}"
    script = f"for pid in $(cat {children}); do kill -0 $pid 2>/dev/null && echo $pid; done; true"
    alive = run.target.run_shell(pod, script).split()
    run.expect(len(alive) == 1, f"not one child of two attempts is alive, but: {alive}")


def mute_node(run: Run) -> None:
    """Let the all-reduces of one node send nothing."""
    victim = run.choose_member()
    with run.move_operator_off_node(victim, keep_operator=True):
        run.measure(partial(run.target.inject, "mute", victim["podName"], sticky=True), victim)


def inject_segfault(run: Run) -> None:
    """Let a rank read address 0 in an all-reduce."""
    victim = run.choose_member()
    run.measure(partial(run.target.inject, "segv", victim["podName"]), victim)


def kill_rank_during_recovery(run: Run) -> None:
    """Kill a rank, and another or the same one during the recovery."""
    victims = [run.rng.choice(run.target.list_members()) for _ in range(2)]
    fault = run.inject(partial(run.target.signal_rank, victims[0]["podName"]))
    time.sleep(run.rng.uniform(0.1, 0.8))
    run.target.signal_rank(victims[1]["podName"])
    run.follow(fault, *victims)
