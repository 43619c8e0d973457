"""Run the pairwise test among the agents of a generation, through its store, before an attempt starts.

Node 0 plans the waves (`pairing`) and reads the outcomes; every agent runs its part as a process (`pair_test`).

Guarantees:
- It ends within a bound, whatever any node does.
- An agent that must leave leaves.
- Only the node that failed learns so as a verdict; the others wait for its replacement.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from trainium_agent.checks import pairing
from trainium_agent.checks.pairing import Group, PairingResult, Wave, WaveResults
from trainium_agent.generation.store import StoreLostError
from trainium_agent.ranks.standby import StartRequest
from trainium_agent.ranks.standby_keeper import StandbyLostError
from trainium_contract.exit_codes import ExitCode
from trainium_contract.spec.health import PreflightCheck
from trainium_contract.wire.messages import CheckResult

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trainium_agent.generation.store import GenerationStore
    from trainium_agent.ranks.processes import RankProcess
    from trainium_agent.ranks.standby_keeper import StandbyKeeper
    from trainium_agent.settings import AgentSettings
    from trainium_agent.workload.base import RankPort
    from trainium_contract.wire.messages import Membership

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.02
_START_SECONDS = 2.0
_OWN_CHECKS_SECONDS = 15.0
"""Limit of a node's own checks; those that have not ended by then count as passed."""
_SECONDS_PER_NODE = 0.005


@dataclass(frozen=True, slots=True)
class PairTask:
    """The task of one process of an exchange."""

    index: int
    """Its place in the group."""
    size: int
    host: str
    port: int
    seconds: float
    """Longest wait for the others, seconds."""
    result: str
    """Path of the file for its outcome."""
    bandwidth: bool = False
    """Measure the bandwidth of the job's own collectives, and nothing else."""

    def encode(self) -> str:
        """Return the value as text."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class PairVerdict:
    """The result of the test."""

    unhealthy: frozenset[int] = frozenset()
    disconnected: frozenset[int] = frozenset()
    link: str = ""
    """The slowest link and its bandwidth, where bandwidths were measured."""

    @property
    def bad(self) -> frozenset[int]:
        """Node ranks that cannot stay."""
        return self.unhealthy | self.disconnected


class NodeFailedPairTestError(Exception):
    """This very node was found bad."""

    def __init__(self, code: ExitCode, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class PairRound:
    """One agent's part; `run` is called at the rendezvous of the attempt, with no rank alive."""

    def __init__(
        self,
        settings: AgentSettings,
        membership: Membership,
        node_rank: int,
        keeper: StandbyKeeper,
        *,
        check: PreflightCheck,
        reserve_port: Callable[[str], RankPort],
        interrupted: Callable[[], None],
        report: Callable[[CheckResult], None],
    ) -> None:
        """`check` is Pairwise or Bandwidth; `interrupted` raises when the agent must leave."""
        self._check = check
        self._minimum = settings.minimum_bandwidth if check is PreflightCheck.BANDWIDTH else None
        self._settings = settings
        self._membership = membership
        self._node_rank = node_rank
        self._seconds = settings.pair_seconds
        self._nodes = len(membership.members)
        self._keeper = keeper
        self._reserve_port = reserve_port
        self._interrupted = interrupted
        self._report = report

    def run(self, store: GenerationStore, attempt: int) -> PairVerdict:
        """Hold all waves. Raises NodeFailedPairTestError, StoreLostError, and what `interrupted` raises."""
        if self._check is PreflightCheck.PAIRWISE:
            _log.warning("collectives failed again and nobody is known to be at fault: testing the nodes in pairs")
        began = time.monotonic()
        own: list[PairingResult] = []
        number, wave = 0, pairing.first_wave(self._nodes)
        held: list[WaveResults] = []
        verdict: PairVerdict | None = None
        while verdict is None:
            group = next((group for group in wave if self._node_rank in group), None)
            if group is not None:
                outcome = self._exchange(store, attempt, number, group)
                own.append(outcome)
                store.set(self._key(store, attempt, number, "outcome", self._node_rank), outcome.encode())
                store.count(self._key(store, attempt, number, "outcomes"), 1)
            if self._node_rank == 0:
                held.append(WaveResults(wave, self._collect(store, attempt, number, wave)))
                self._announce(store, attempt, number + 1, held)
            number += 1
            wave, verdict = self._announced(store, attempt, number)
        self._conclude(verdict, own, time.monotonic() - began)
        return verdict

    # One exchange.

    def _exchange(self, store: GenerationStore, attempt: int, number: int, group: Group) -> PairingResult:
        served, port = self._meet(store, attempt, number, group)
        if port is None:
            return PairingResult(passed=False, detail=f"node rank {group[0]} did not open the exchange")
        host = self._membership.members[group[0]].pod_ip
        result = self._settings.memory_directory / f"pairing-{attempt}-{number}.json"
        result.unlink(missing_ok=True)
        bandwidth = self._check is PreflightCheck.BANDWIDTH
        task = PairTask(group.index(self._node_rank), len(group), host, port, self._seconds, str(result), bandwidth)
        others = ", ".join(str(node) for node in group if node != self._node_rank)
        try:
            return self._outcome_of(task, result, others)
        finally:
            del served  # the store of the exchange ends with it

    def _meet(
        self, store: GenerationStore, attempt: int, number: int, group: Group
    ) -> tuple[RankPort | None, int | None]:
        """Return a store for the exchange at its first node, and the store's port."""
        key = self._key(store, attempt, number, "port", group[0])
        if self._node_rank == group[0]:
            served = self._reserve_port(self._settings.pod_ip)
            store.set(key, str(served.port))
            return served, int(served.port)
        deadline = time.monotonic() + self._seconds
        while not store.has(key):
            self._interrupted()
            if time.monotonic() > deadline:
                return None, None
            time.sleep(_POLL_SECONDS)
        return None, int(store.get(key))

    def _outcome_of(self, task: PairTask, result: Path, others: str) -> PairingResult:
        ended = threading.Event()
        try:
            process = self._keeper.start(
                StartRequest((task.encode(),), {}, f"trainium-pairing with {others}", self._settings.pair_entry),
                local_rank=0,
                rank=self._node_rank,
                attempt=-1,
                on_exit=lambda _: ended.set(),
            )
        except StandbyLostError as loss:
            return PairingResult(passed=False, detail=str(loss))
        began = time.monotonic()
        try:
            while not ended.wait(_POLL_SECONDS):
                self._interrupted()
                passed = time.monotonic() - began
                if passed > self._seconds + _START_SECONDS and not result.exists():
                    break
                if passed > self._seconds + _START_SECONDS + _OWN_CHECKS_SECONDS:
                    break
        finally:
            _end(process)
        try:
            outcome = PairingResult.decode(result.read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError):
            outcome = PairingResult(passed=False, detail="the exchange did not end in time")
        found = outcome.detail or (f"{outcome.gigabits:.3g} Gbit/s" if outcome.gigabits else "")
        return replace(outcome, detail=f"with node rank {others}: {found}" if found else "")

    # Node 0.

    def _collect(self, store: GenerationStore, attempt: int, number: int, wave: Wave) -> dict[int, PairingResult]:
        nodes = [node for group in wave for node in group]
        timeout = 2 * (self._seconds + _START_SECONDS) + _OWN_CHECKS_SECONDS + self._nodes * _SECONDS_PER_NODE
        deadline = time.monotonic() + timeout
        while store.count(self._key(store, attempt, number, "outcomes")) < len(nodes) and time.monotonic() < deadline:
            self._interrupted()
            time.sleep(_POLL_SECONDS)
        keys = {node: self._key(store, attempt, number, "outcome", node) for node in nodes}
        return {node: PairingResult.decode(store.get(key)) for node, key in keys.items() if store.has(key)}

    def _announce(self, store: GenerationStore, attempt: int, number: int, held: list[WaveResults]) -> None:
        wave, slowest = pairing.next_wave(self._nodes, held, self._minimum), pairing.slowest_link(held)
        word = {
            "wave": wave,
            "unhealthy": sorted(pairing.unhealthy(held)),
            "disconnected": sorted(pairing.disconnected(held, self._minimum)),
            "link": "" if slowest is None else self._describe_link(*slowest),
        }
        if wave is None and self._check is PreflightCheck.PAIRWISE:
            store.change(lambda state: replace(state, unexplained=0))
        store.set(self._key(store, attempt, number, "wave"), json.dumps(word))

    # All.

    def _announced(self, store: GenerationStore, attempt: int, number: int) -> tuple[Wave, PairVerdict | None]:
        key = self._key(store, attempt, number, "wave")
        while not store.has(key):
            self._interrupted()
            newest = store.state()
            if newest.attempt != attempt or newest.stopped is not None:
                raise StoreLostError("another attempt began")
            time.sleep(max(_POLL_SECONDS, self._nodes * 0.0008))
        word = json.loads(store.get(key))
        if word["wave"] is not None:
            return tuple(tuple(group) for group in word["wave"]), None
        return (), PairVerdict(frozenset(word["unhealthy"]), frozenset(word["disconnected"]), word["link"])

    def _describe_link(self, group: pairing.Group, gigabits: float) -> str:
        names = " and ".join(self._membership.members[node].node_name for node in group)
        below = f", below {self._minimum:g}" if self._minimum and gigabits < self._minimum else ""
        return f"the slowest link is that of {names}: {gigabits:.3g} Gbit/s{below}"

    def _conclude(self, verdict: PairVerdict, own: list[PairingResult], seconds: float) -> None:
        detail = "; ".join(filter(None, (*(outcome.detail for outcome in own), verdict.link)))
        bad = self._node_rank in verdict.bad
        self._report(CheckResult(check=self._check, passed=not bad, seconds=round(seconds, 3), detail=detail[:1000]))
        if bad:
            what = "cannot exchange with any peer" + (f" at {self._minimum:g} Gbit/s" if self._minimum else "")
            what = "computes wrong numbers" if self._node_rank in verdict.unhealthy else what
            raise NodeFailedPairTestError(
                ExitCode.DEVICE_FAULT if self._node_rank in verdict.unhealthy else ExitCode.NETWORK_FAULT,
                f"check {self._check}: node {self._settings.node_name} {what}, while others can: {detail}",
            )
        found = f"node ranks {sorted(verdict.bad)} are bad" if verdict.bad else "no node was found bad"
        level = logging.WARNING if verdict.bad or self._check is PreflightCheck.PAIRWISE else logging.INFO
        _log.log(level, "check %s: %s%s", self._check, found, f" ({detail})" if verdict.link else "")

    def _key(self, store: GenerationStore, attempt: int, *parts: object) -> str:
        return store.key(attempt, self._check, *parts)


def _end(process: RankProcess) -> None:
    """No process of the test outlives it."""
    process.signal(signal.SIGKILL)
    deadline = time.monotonic() + 5.0
    while process.alive and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
