"""Run the pairwise test among the agents of a generation, through its store, before an attempt starts.

Node 0 plans the waves (`pairing`) and reads the outcomes; every agent runs its part as a process (`pair_test`).

Guarantees:
- The test ends within a time limit, whatever any node does.
- An agent that must leave interrupts its part.
- Only the node that failed gets a verdict; the others wait for its replacement.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from trainium_agent.checks import pairing
from trainium_agent.checks.pairing import Group, Wave, WaveResults
from trainium_agent.ranks.processes import end_processes
from trainium_agent.ranks.standby import StartRequest
from trainium_agent.ranks.standby_manager import StandbyLostError
from trainium_agent.shared_state.state_watcher import POLL_SECONDS_PER_MEMBER
from trainium_agent.shared_state.store import StoreLostError
from trainium_contract.exit_codes import ExitCode
from trainium_contract.spec.health import PreflightCheck
from trainium_contract.wire.check_tasks import PairingResult, PairTask
from trainium_contract.wire.messages import CheckResult

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trainium_agent.ranks.standby_manager import StandbyManager
    from trainium_agent.settings import AgentSettings
    from trainium_agent.shared_state.state_watcher import StateWatcher
    from trainium_agent.shared_state.store import GenerationStore
    from trainium_agent.workload.rank_port import RankPort
    from trainium_contract.wire.messages import Membership

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.02
_START_SECONDS = 2.0
_OWN_CHECKS_SECONDS = 15.0
"""Time limit of a node's own checks; unfinished ones count as passed."""
_SECONDS_PER_NODE = 0.005


@dataclass(frozen=True, slots=True)
class PairVerdict:
    """The result of the test."""

    unhealthy: frozenset[int] = frozenset()
    disconnected: frozenset[int] = frozenset()
    link: str = ""
    """The slowest link and its bandwidth, if bandwidths were measured."""

    @property
    def bad_nodes(self) -> frozenset[int]:
        """Node ranks that must be replaced."""
        return self.unhealthy | self.disconnected


class NodeFailedPairTestError(Exception):
    """The test found this node bad."""

    def __init__(self, code: ExitCode, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class PairRound:
    """Takes part in the test for one agent; `run` is called at the rendezvous of the attempt, with no rank alive."""

    def __init__(
        self,
        settings: AgentSettings,
        membership: Membership,
        node_rank: int,
        check: PreflightCheck,
        *,
        watcher: StateWatcher,
        standby_manager: StandbyManager,
        reserve_port: Callable[[str], RankPort],
        report: Callable[[CheckResult], None],
    ) -> None:
        """`check` is Pairwise or Bandwidth; the watcher interrupts the test."""
        self._settings = settings
        self._check = check
        self._minimum = settings.minimum_bandwidth if check is PreflightCheck.BANDWIDTH else None
        self._membership = membership
        self._node_rank = node_rank
        self._seconds = settings.pair_seconds
        self._nodes = len(membership.members)
        self._watcher = watcher
        self._standby_manager = standby_manager
        self._reserve_port = reserve_port
        self._report = report

    def run(self, store: GenerationStore, attempt: int) -> PairVerdict:
        """Run all waves. Raises NodeFailedPairTestError, StoreLostError, and WaitInterruptedError."""
        if self._check is PreflightCheck.PAIRWISE:
            _log.warning("collectives failed again and nobody is known to be at fault: testing the nodes in pairs")
        self._store, self._attempt = store, attempt
        started_at = time.monotonic()
        own_results: list[PairingResult] = []
        wave_number, wave = 0, pairing.pair_neighbours(self._nodes)
        results: list[WaveResults] = []
        verdict: PairVerdict | None = None
        while verdict is None:
            group = next((group for group in wave if self._node_rank in group), None)
            if group is not None:
                outcome = self._exchange(wave_number, group)
                own_results.append(outcome)
                self._store.set(self._format_key(wave_number, "outcome", self._node_rank), outcome.encode())
                self._store.count(self._format_key(wave_number, "outcomes"), 1)
            if self._node_rank == 0:
                results.append(WaveResults(wave, self._collect(wave_number, wave)))
                self._publish_wave(wave_number + 1, results)
            wave_number += 1
            wave, verdict = self._await_wave(wave_number)
        self._report_result(verdict, own_results, time.monotonic() - started_at)
        return verdict

    # A single exchange.

    def _exchange(self, number: int, group: Group) -> PairingResult:
        reserved, port = self._open_exchange(number, group)
        if port is None:
            return PairingResult(passed=False, detail=f"node rank {group[0]} did not open the exchange")
        host = self._membership.members[group[0]].pod_ip
        result = self._settings.memory_directory / f"pairing-{self._attempt}-{number}.json"
        result.unlink(missing_ok=True)
        bandwidth = self._check is PreflightCheck.BANDWIDTH
        task = PairTask(group.index(self._node_rank), len(group), host, port, self._seconds, str(result), bandwidth)
        others = ", ".join(str(node) for node in group if node != self._node_rank)
        try:
            return self._run_exchange(task, result, others)
        finally:
            if reserved is not None:
                reserved.close()

    def _open_exchange(self, number: int, group: Group) -> tuple[RankPort | None, int | None]:
        """Return the store of the exchange, on its first node only, and the store's port."""
        key = self._format_key(number, "port", group[0])
        if self._node_rank == group[0]:
            reserved = self._reserve_port(self._settings.pod_ip)
            self._store.set(key, str(reserved.master.port))
            return reserved, reserved.master.port
        deadline = time.monotonic() + self._seconds
        while not self._store.has(key):
            self._watcher.raise_if_interrupted()
            if time.monotonic() > deadline:
                return None, None
            time.sleep(_POLL_SECONDS)
        return None, int(self._store.get(key))

    def _run_exchange(self, task: PairTask, result: Path, others: str) -> PairingResult:
        try:
            process = self._standby_manager.start(
                StartRequest(
                    (json.dumps(asdict(task)),), {}, f"trainium-pairing with {others}", self._settings.pair_entry
                ),
                rank=self._node_rank,
            )
        except StandbyLostError as loss:
            return PairingResult(passed=False, detail=str(loss))
        started_at = time.monotonic()
        try:
            while not process.ended.wait(_POLL_SECONDS):
                self._watcher.raise_if_interrupted()
                elapsed = time.monotonic() - started_at
                if elapsed > self._seconds + _START_SECONDS and not result.exists():
                    break
                if elapsed > self._seconds + _START_SECONDS + _OWN_CHECKS_SECONDS:
                    break
        finally:
            end_processes([process])
        try:
            outcome = PairingResult.decode(result.read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError):
            outcome = PairingResult(passed=False, detail="the exchange did not end in time")
        summary = outcome.detail or (f"{outcome.gigabits:.3g} Gbit/s" if outcome.gigabits else "")
        return replace(outcome, detail=f"with node rank {others}: {summary}" if summary else "")

    # On node 0.

    def _collect(self, number: int, wave: Wave) -> dict[int, PairingResult]:
        nodes = [node for group in wave for node in group]
        timeout = 2 * (self._seconds + _START_SECONDS) + _OWN_CHECKS_SECONDS + self._nodes * _SECONDS_PER_NODE
        deadline = time.monotonic() + timeout
        while self._store.count(self._format_key(number, "outcomes")) < len(nodes) and time.monotonic() < deadline:
            self._watcher.raise_if_interrupted()
            time.sleep(_POLL_SECONDS)
        keys = {node: self._format_key(number, "outcome", node) for node in nodes}
        return {node: PairingResult.decode(self._store.get(key)) for node, key in keys.items() if self._store.has(key)}

    def _publish_wave(self, number: int, results: list[WaveResults]) -> None:
        wave, slowest = pairing.plan_next_wave(self._nodes, results, self._minimum), pairing.find_slowest_link(results)
        message = {
            "wave": wave,
            "unhealthy": sorted(pairing.find_unhealthy_nodes(results)),
            "disconnected": sorted(pairing.find_disconnected_nodes(results, self._minimum)),
            "link": "" if slowest is None else self._describe_link(*slowest),
        }
        if wave is None and self._check is PreflightCheck.PAIRWISE:
            self._store.update_state(lambda state: replace(state, unexplained_failures=0))
        self._store.set(self._format_key(number, "wave"), json.dumps(message))

    # On all nodes.

    def _await_wave(self, number: int) -> tuple[Wave, PairVerdict | None]:
        key = self._format_key(number, "wave")
        while not self._store.has(key):
            self._watcher.raise_if_interrupted()
            newest = self._store.read_state()
            if newest.attempt != self._attempt or newest.stopped is not None:
                raise StoreLostError("another attempt began")
            time.sleep(max(_POLL_SECONDS, self._nodes * POLL_SECONDS_PER_MEMBER))
        message = json.loads(self._store.get(key))
        if message["wave"] is not None:
            return tuple(tuple(group) for group in message["wave"]), None
        return (), PairVerdict(frozenset(message["unhealthy"]), frozenset(message["disconnected"]), message["link"])

    def _describe_link(self, group: pairing.Group, gigabits: float) -> str:
        names = " and ".join(self._membership.members[node].node_name for node in group)
        below = f", below {self._minimum:g}" if self._minimum and gigabits < self._minimum else ""
        return f"the slowest link is that of {names}: {gigabits:.3g} Gbit/s{below}"

    def _report_result(self, verdict: PairVerdict, own_results: list[PairingResult], seconds: float) -> None:
        detail = "; ".join(filter(None, (*(outcome.detail for outcome in own_results), verdict.link)))
        is_bad = self._node_rank in verdict.bad_nodes
        self._report(CheckResult(check=self._check, passed=not is_bad, seconds=round(seconds, 3), detail=detail[:1000]))
        if is_bad:
            problem = "cannot exchange with any peer" + (f" at {self._minimum:g} Gbit/s" if self._minimum else "")
            problem = "computes wrong numbers" if self._node_rank in verdict.unhealthy else problem
            raise NodeFailedPairTestError(
                ExitCode.DEVICE_FAULT if self._node_rank in verdict.unhealthy else ExitCode.NETWORK_FAULT,
                f"check {self._check}: node {self._settings.node_name} {problem}, while others can: {detail}",
            )
        summary = f"node ranks {sorted(verdict.bad_nodes)} are bad" if verdict.bad_nodes else "no node was found bad"
        level = logging.WARNING if verdict.bad_nodes or self._check is PreflightCheck.PAIRWISE else logging.INFO
        _log.log(level, "check %s: %s%s", self._check, summary, f" ({detail})" if verdict.link else "")

    def _format_key(self, *parts: object) -> str:
        return self._store.format_key(self._attempt, self._check, *parts)
