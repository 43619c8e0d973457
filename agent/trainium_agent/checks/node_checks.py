"""Run the node's checks in processes forked from the warm standby, and read their results.

Guarantees:
- The checks end within their budget, and none of their processes outlives them.
- A check that could not run, did not end or left an unreadable result counts as passed.
- Only wrong numbers make a node unfit.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trainium_agent.ranks.processes import end_processes
from trainium_agent.ranks.standby import StartRequest
from trainium_agent.ranks.standby_manager import StandbyLostError
from trainium_contract.spec.health import PreflightCheck
from trainium_contract.wire.check_tasks import NodeTask
from trainium_contract.wire.messages import CheckResult

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trainium_agent.ranks.processes import RankProcess
    from trainium_agent.ranks.standby_manager import StandbyManager
    from trainium_agent.settings import AgentSettings

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.02
_NAMES = {PreflightCheck.MATMUL: "matmul", PreflightCheck.LOOPBACK: "loopback"}
_WRONG = {
    PreflightCheck.MATMUL: "a matrix product is wrong on core {cores}",
    PreflightCheck.LOOPBACK: "an all-reduce among the processes of the node is wrong at process {cores}",
}


class NodeChecks:
    """Runs the checks of a node: call `run` once, in a separate thread. Ranks may start when it returns."""

    def __init__(
        self, settings: AgentSettings, standby_manager: StandbyManager, *, report: Callable[[CheckResult], None]
    ) -> None:
        self._settings = settings
        self._standby_manager = standby_manager
        self._report = report
        self._folder: Path = settings.memory_directory / "preflight"
        is_single = settings.processes_per_node == 1
        self._checks = tuple(
            check
            for check in _NAMES
            if check in settings.checks and not (is_single and check is PreflightCheck.LOOPBACK)
        )
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Stop the checks, because the pod ends or its ranks start; an unfinished check counts as passed."""
        self._cancelled.set()

    def run(self) -> str:
        """Run the checks and return the problem of the node as a sentence; empty for a healthy node."""
        if not self._checks:
            return ""
        started_at = time.monotonic()
        deadline = started_at + self._settings.check_seconds
        try:
            outcomes = self._collect_outcomes(deadline)
            return self._evaluate(outcomes, time.monotonic() - started_at)
        except OSError as error:
            _log.warning("the node's checks could not be made (%s); they count as passed", error)
            return ""
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _collect_outcomes(self, deadline: float) -> list[dict[str, Any]]:
        while not self._standby_manager.warm:  # this must not speed up the standby's imports
            if self._cancelled.wait(_POLL_SECONDS) or time.monotonic() > deadline:
                return []
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        size = self._settings.processes_per_node
        tasks = [
            NodeTask(
                index,
                size,
                str(self._folder),
                max(1.0, deadline - time.monotonic()),
                matmul=PreflightCheck.MATMUL in self._checks,
                loopback=PreflightCheck.LOOPBACK in self._checks,
                bandwidth=PreflightCheck.BANDWIDTH in self._settings.checks,
            )
            for index in range(size)
        ]
        processes: list[RankProcess] = []
        try:
            processes += [self._start(task) for task in tasks]
            while any(process.alive for process in processes) and time.monotonic() < deadline:
                if self._cancelled.wait(_POLL_SECONDS):
                    break
        except StandbyLostError as loss:
            _log.warning("the node's checks could not be started: %s", loss)
        finally:
            end_processes(processes)
        return [_read(task) for task in tasks]

    def _start(self, task: NodeTask) -> RankProcess:
        return self._standby_manager.start(
            StartRequest(
                (json.dumps(asdict(task)),), {}, f"trainium-preflight {task.index}", self._settings.check_entry
            ),
            rank=task.index,
        )

    def _evaluate(self, outcomes: list[dict[str, Any]], seconds: float) -> str:
        sentences = []
        for check in self._checks:
            reported = [outcome.get(_NAMES[check]) for outcome in outcomes]
            wrong = [index for index, value in enumerate(reported) if value is False]
            detail = ""
            measured = [value for outcome in outcomes if isinstance(value := outcome.get("bandwidth"), float)]
            slowest = min(measured) if measured and check is PreflightCheck.LOOPBACK else None
            too_slow = slowest is not None and slowest < self._settings.minimum_bandwidth
            if wrong:
                detail = _WRONG[check].format(cores=", ".join(map(str, wrong[:16])))
            elif too_slow:
                detail = (
                    f"an all-reduce among the processes of the node reaches {slowest:.3g} Gbit/s, below "
                    f"{self._settings.minimum_bandwidth:g}"
                )
            elif reported.count(True) < self._settings.processes_per_node:
                reasons = [str(outcome.get(f"{_NAMES[check]}-reason", "")) for outcome in outcomes]
                why = next((reason for reason in reasons if reason), "it did not end in time")
                detail = f"not made on all cores ({why}); counts as passed"
            elif slowest is not None:
                detail = f"{slowest:.3g} Gbit/s among {len(measured)} processes"
            failed = bool(wrong) or too_slow
            if failed:
                sentences.append(f"node {self._settings.node_name}: {detail}")
            self._report(CheckResult(check=check, passed=not failed, seconds=round(seconds, 3), detail=detail[:1024]))
            _log.log(logging.ERROR if failed else logging.INFO, "%s: %s", check.value, detail or "passed")
        return "; ".join(sentences)


def _read(task: NodeTask) -> dict[str, Any]:
    try:
        result = json.loads(task.result.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return result if isinstance(result, dict) else {}
