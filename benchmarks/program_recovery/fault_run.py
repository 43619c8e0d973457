"""Run one launcher through faults and resizes, and measure each by the ledger of its samples.

A node that is lost stays silent. If nothing trains after `SILENT_SECONDS`, the benchmark deletes the Node object, as an
administrator or the cloud's controller does, and counts that time.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.program_recovery.costs import FaultCost, RunCost
from trainium_contract.api_server.errors import ClientError
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.jobs.ledger import Ledger, read_ledger

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.program_recovery.launchers import Launcher
    from trainium_devcluster.program import ProgramDemo

SILENT_SECONDS = 60.0
"""Seconds after the loss of a node in which a peer may do nothing."""
_STEPS_BETWEEN = 10
_WAIT_SECONDS = 150.0
_END_SECONDS = 600.0
"""Seconds that the rest of a training may take."""
_REJOIN_SECONDS = 60.0
"""Seconds that a launcher has to use all nodes again before the next resize."""
_POLL_SECONDS = 0.2


class FaultRun:
    """Runs one launcher through the faults."""

    def __init__(self, demo: ProgramDemo, launcher: Launcher, limit_seconds: float = float("inf")) -> None:
        """`limit_seconds`: after it, all waits of the run end."""
        self.demo = demo
        self.launcher = launcher
        self.faults: list[FaultCost] = []
        self.problem = ""
        self.started_at = time.monotonic()
        self.ends_at = self.started_at + limit_seconds

    @property
    def ledger(self) -> Ledger:
        """The ledger as it is now."""
        return read_ledger(self.launcher.folder)

    def wait(self, is_done: Callable[[Ledger], bool], seconds: float = _WAIT_SECONDS) -> bool:
        """Wait for a condition of the ledger, or the end; return if it holds. Raises ClusterError if the job failed."""
        deadline = min(time.monotonic() + seconds, self.ends_at)
        while not is_done(ledger := self.ledger):
            if time.monotonic() > deadline or ledger.ended:
                return False
            self.launcher.check()
            time.sleep(_POLL_SECONDS)
        return True

    def wait_for_step(self, step: int) -> None:
        """Wait for a step; raises ClusterError if it does not come."""
        if not self.wait(lambda ledger: ledger.newest_step >= step):
            raise ClusterError(f"{self.launcher.title} did not reach step {step}. {self.launcher.describe()}")

    def wait_for_ranks(self, ranks: int) -> None:
        """Wait until the newest start has so many ranks, for a limited time."""
        self.wait(lambda ledger: ledger.newest_ranks == ranks, _REJOIN_SECONDS)

    def run_undisturbed(self) -> Ledger:
        """Run without faults; return the ledger."""
        self.launcher.start(2)
        try:
            self.wait_for_step(1)
            if not self.wait(lambda ledger: ledger.ended, _END_SECONDS):
                title, state = self.launcher.title, self.launcher.describe()
                raise ClusterError(f"{title} did not end without faults. {state}")
        finally:
            self.launcher.stop()
        return self.ledger

    def run_with_faults(self, reference: Ledger, kinds: tuple[str, ...]) -> RunCost:
        """Run with faults and resizes in the second epoch."""
        self.launcher.start(2)
        try:
            self.wait_for_step(self.launcher.first_fault)
            for kind in kinds:
                self.inject(kind)
                self.wait_for_step(self.ledger.newest_step + _STEPS_BETWEEN)
        except (ClientError, ClusterError) as error:  # a launcher may train no more
            self.problem = str(error)
            self.demo.view.log(self.problem)
        return self.finish(reference)

    def run_with_random_faults(self, reference: Ledger, count: int, seed: int) -> RunCost:
        """Run with random faults from the first step on; the order is a function of the seed."""
        launcher, chance = self.launcher, random.Random(seed)
        launcher.start(2)
        size = 2
        for _ in range(count):
            self.wait_for_step(self.ledger.newest_step + _STEPS_BETWEEN)
            kind = chance.choice(["killed rank", "stopped rank", "lost node", "killed operator", "resize"])
            if kind == "resize":
                size = 3 - size
                self.measure(f"resize to {size}", partial(launcher.resize, size))
            elif kind == "killed operator":
                with contextlib.suppress(ClusterError):  # its node still waits to restart it
                    launcher.kill_operator()
                self.measure("killed rank and operator", launcher.kill_rank)
            else:
                self.inject(kind)
        return self.finish(reference)

    def inject(self, kind: str) -> None:
        """Inject a fault or resize, and measure it."""
        launcher = self.launcher
        if kind == "lost node":
            self.lose_node()
        elif kind == "killed operator":
            self.kill_operator()
        elif kind.startswith("resize"):
            size = int(kind.removeprefix("resize to "))
            self.wait_for_ranks(3 - size)
            self.measure(kind, partial(launcher.resize, size))
        else:
            number = signal.SIGKILL if kind == "killed rank" else signal.SIGSTOP
            self.measure(kind, partial(launcher.kill_rank, number))

    def kill_operator(self) -> None:
        """Kill the operator, and wait until a new one writes the status; training goes on."""
        moment = time.time()
        self.launcher.kill_operator()
        self.wait(lambda ledger: ledger.find_first_step_after(moment) is not None)
        ledger, step = self.ledger, self.ledger.newest_step
        ended = ledger.find_first_step_after(moment)
        seconds = None if ended is None else ended - moment
        self.wait(lambda _: self.launcher.read_step() > step)
        self.add(FaultCost("killed operator", seconds, self.ledger.count_recomputed(moment)))

    def finish(self, reference: Ledger) -> RunCost:
        """Wait for the end of the training; return what all faults cost."""
        completed = False
        with contextlib.suppress(ClusterError):
            completed = self.wait(lambda ledger: ledger.ended, _END_SECONDS)
        self.launcher.stop()
        ledger = self.ledger
        missing, repeated = ledger.count_wrong_samples(reference)
        first_resized = ledger.find_first_step_at_another_size(reference)
        return RunCost(
            title=self.launcher.title,
            faults=tuple(self.faults),
            completed=completed,
            steps=ledger.newest_step,
            samples_missing=missing,
            samples_repeated=repeated,
            loss_difference=ledger.compute_max_loss_difference(reference),
            loss_difference_before_resize=ledger.compute_max_loss_difference(reference, before=first_resized),
            uses=tuple(sorted(set(reference.count_uses().values()))),
            load=os.getloadavg()[1],
            seconds=time.monotonic() - self.started_at,
            date=time.strftime("%Y-%m-%d"),
            problem=self.problem,
        )

    def measure(self, kind: str, inject: Callable[[], object]) -> None:
        """Inject a fault, and wait for the first new step; a resize counts from its request."""
        moment = time.time()
        inject()
        self.record(kind, moment, moment if "resize" in kind else time.time())

    def lose_node(self) -> None:
        """Power a node off; delete its Node object if nothing trains; power it on again."""
        moment = time.time()
        node = self.launcher.power_off_node()
        lost_at = time.time()
        deleted_after = None
        try:
            if not self.wait(lambda ledger: ledger.find_first_new_step(moment) is not None, SILENT_SECONDS):
                self.demo.cluster.kubectl("delete", "node", node)
                deleted_after = time.time() - lost_at
            self.record("lost node", moment, lost_at, deleted_after)
        finally:
            self.demo.cluster.faults.start_node(node)

    def record(self, kind: str, moment: float, counted_from: float, deleted_after: float | None = None) -> None:
        """Wait for the first new step of a start after `moment`, and record the cost."""
        self.wait(lambda ledger: ledger.find_first_new_step(moment) is not None)
        ledger = self.ledger
        ended = ledger.find_first_new_step(moment)
        seconds = None if ended is None else ended - counted_from
        self.add(FaultCost(kind, seconds, ledger.count_recomputed(moment), deleted_after))

    def add(self, cost: FaultCost) -> None:
        """Add the cost of a fault, and log it."""
        self.faults.append(cost)
        self.demo.view.log(f"{self.launcher.title}: {cost}")
