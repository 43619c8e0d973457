"""Investigate stalled ranks with the other agents, from the first suspicion to the finding that ends the attempt.

An agent whose rank is overdue asks all; the agents exchange their observations. Before that each asks its overdue ranks
for their stacks, because once one rank is ended the others leave too. The runner ends them.

Guarantees:
- Every agent of the generation comes to the same finding, because one of them concludes it for all.
- Only the agent of a culprit reports a failure, so victims are never blamed.
- It is used in the generation's worker only.
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from trainium_agent.hang import detection
from trainium_agent.hang.detection import Finding, FindingKind, Stall
from trainium_agent.hang.watchdog import HangWatch
from trainium_agent.lifecycle.events import HangFound, InquiryUpdated, RanksSampled
from trainium_agent.linux import stacks
from trainium_agent.workload.base import progress_file
from trainium_contract.faults.causes import Cause
from trainium_contract.wire.log_line import LogFormat
from trainium_contract.wire.messages import StuckRank

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainium_agent.exits.restart_policy import GenerationState
    from trainium_agent.generation.store import GenerationStore
    from trainium_agent.hang.detection import Calibration
    from trainium_agent.linux.stacks import Stacks
    from trainium_agent.ranks.processes import RankProcess
    from trainium_agent.settings import AgentSettings
    from trainium_agent.workload.base import Workload
    from trainium_contract.wire.messages import Membership

_log = logging.getLogger(__name__)
_REPORTED = 8
_STACK_CHARACTERS = 1000


class HangResponse:
    """One generation's answer to standstills on this pod."""

    def __init__(
        self,
        settings: AgentSettings,
        membership: Membership,
        node_rank: int,
        *,
        calibration: Calibration,
        store: GenerationStore,
        workload: Workload,
    ) -> None:
        self._settings = settings
        self._generation = membership.generation
        members = len(membership.members)
        self._watch = HangWatch(
            settings.hang,
            lambda local_rank: progress_file(settings, membership.generation, local_rank),
            workload,
            generation=membership.generation,
            world=members * membership.processes_per_node,
            calibration=calibration,
        )
        self._inquiry = Inquiry(store, node_rank, members, self._sample_stalls)
        self._living: tuple[RankProcess, ...] = ()
        self._stacks: Mapping[int, Stacks] = {}
        self._stuck: tuple[StuckRank, ...] | None = None

    def see(self, living: tuple[RankProcess, ...]) -> None:
        """Set the ranks that are alive and were not ended by the agent."""
        self._living = living
        self._stuck = None

    def sample(self) -> RanksSampled:
        """Sample the ranks without asking other agents."""
        overdue = any(still.overdue for still in self._watch.sample(self._living))
        if not (overdue and self._settings.hang.enabled):
            self._stacks = {}
            return RanksSampled(overdue=False, timing=self._watch.timing)
        return RanksSampled(overdue=True, timing=self._watch.timing)

    def ask(self, attempt: int) -> InquiryUpdated:
        """Ask all agents, because a local rank is overdue. Raises StoreLostError."""
        self._inquiry.ask(attempt)
        return self.inquired()

    def answer(self, state: GenerationState) -> InquiryUpdated:
        """Answer the question in the shared state. Raises StoreLostError."""
        self._inquiry.answer(state)
        return self.inquired()

    def inquired(self) -> InquiryUpdated:
        """Return the state of the inquiry, and the stuck ranks."""
        return InquiryUpdated(self._inquiry.open, self._stuck)

    def conclude(self, attempt: int) -> Finding | None:
        """Return the finding that ends the attempt, after publishing it; None for now. Raises StoreLostError."""
        finding = self._inquiry.conclude(attempt)
        if finding is None or finding.kind is FindingKind.MOVING:
            return None
        self._inquiry.publish(attempt, finding)
        return finding

    def published(self, attempt: int) -> Finding:
        """Return the finding of the agent that concluded. Raises StoreLostError."""
        return self._inquiry.published(attempt)

    def found(self, finding: Finding, after: GenerationState) -> HangFound:
        """Log the stalls on this pod and return the result for the runner."""
        stalled, asked = self._sample_ranks()
        own = [still for still in stalled if still.rank in finding.culprits]
        self._write_log(finding, stalled, asked)
        culprits = []
        for still in own:
            known = asked.get(still.rank)
            sentence = detection.describe(still, self._settings.pod_name)
            culprits.append((still.rank, f"{sentence}; {known.innermost}" if known is not None else sentence))
        longest = max((still.seconds for still in own or stalled), default=0.0)
        alike = finding.kind is FindingKind.COLLECTIVE
        return HangFound(
            after,
            Cause.HANG if own or alike else Cause.PEER_LOST,
            time.time() - longest,
            named=finding.kind is FindingKind.STUCK,
            culprits=tuple(culprits),
            stuck=self._stuck or (),
        )

    def forget(self) -> None:
        """Reset at the start of another attempt."""
        self._inquiry.forget()
        self._stacks = {}

    def _sample_stalls(self) -> tuple[Stall, ...]:
        return self._sample_ranks()[0]

    def _sample_ranks(self) -> tuple[tuple[Stall, ...], Mapping[int, Stacks]]:
        """Look at the local ranks, with the stacks of those that are overdue, or soon are."""
        stalled = self._watch.sample(self._living)
        suspicious = any(still.overdue for still in stalled)
        suspects = {still.rank for still in stalled if suspicious and still.seconds > still.limit / 2}
        unasked = [each for each in self._living if each.rank in suspects and each.rank not in self._stacks]
        answers = stacks.ask(
            {
                each.rank: (each.pid, progress_file(self._settings, self._generation, each.local_rank))
                for each in unasked
                if each.alive
            }
        )
        self._stacks = known = {**self._stacks, **answers}
        explained = tuple(_apply_stack(still, known.get(still.rank)) for still in stalled)
        self._stuck = tuple(_stuck(still, known.get(still.rank)) for still in explained if still.overdue)[:_REPORTED]
        return explained, known

    def _write_log(self, finding: Finding, stalled: tuple[Stall, ...], asked: Mapping[int, Stacks]) -> None:
        match finding.kind:
            case FindingKind.STUCK:
                ranks = ", ".join(map(str, finding.culprits))
                summary = f"rank {ranks} is to blame" if len(finding.culprits) == 1 else f"ranks {ranks} are to blame"
            case FindingKind.SILENT:
                summary = f"the agents of node ranks {', '.join(map(str, finding.silent))} do not answer"
            case _:
                summary = "all ranks stand alike, nobody is to blame"
        _log.error("training hangs: %s; all ranks restart in place", summary)
        for still in stalled:
            known = asked.get(still.rank)
            _log.warning(
                "%s; %s", detection.describe(still, self._settings.pod_name), known.innermost if known else "not asked"
            )
            if known is not None and known.text:
                if self._settings.log_format is LogFormat.JSON:
                    _log.warning("%s", known.text, extra={"rank": still.rank})
                else:
                    sys.stdout.write("".join(f"[rank {still.rank}] {line}\n" for line in known.text.splitlines()))
        sys.stdout.flush()


def _apply_stack(still: Stall, known: Stacks | None) -> Stall:
    if still.waiting is not None or known is None or known.in_collective is None:
        return still
    return replace(still, waiting=known.in_collective)


def _stuck(still: Stall, known: Stacks | None) -> StuckRank:
    return StuckRank(
        rank=still.rank,
        phase=still.phase,
        step=max(still.step, -1),
        seconds=still.seconds,
        waiting=still.waits,
        stack=known.innermost[:_STACK_CHARACTERS] if known is not None else "",
    )


_TIMEOUT_SECONDS = 2.0
_SECONDS_PER_MEMBER = 0.002
"""Time in which the slowest of many agents sees the question (see `StateWatcher`) and answers it."""
_TAKE_OVER_SECONDS = 10.0


class Inquiry:
    """One agent's part in the inquiries of one generation; used by the generation's worker only."""

    def __init__(
        self,
        store: GenerationStore,
        node_rank: int,
        members: int,
        sample: Callable[[], tuple[Stall, ...]],
    ) -> None:
        """`sample` gives this agent's own word."""
        self._store = store
        self._node_rank = node_rank
        self._members = members
        self._sample_ranks = sample
        self._asked = 0
        self._deadline = 0.0
        self._answered = 0
        self._inquiry_seen_at = 0.0
        self._not_before = 0.0

    @property
    def open(self) -> bool:
        """Whether this agent waits for answers."""
        return self._asked > 0

    def forget(self) -> None:
        """Reset at the start of another attempt."""
        self._asked = 0
        self._inquiry_seen_at = self._not_before = 0.0

    def ask(self, attempt: int) -> None:
        """Open an inquiry, unless one is open or all ranks were excused a moment ago.

        Raises StoreLostError.
        """
        now = time.monotonic()
        if self.open or now < self._not_before or now < self._inquiry_seen_at + _TAKE_OVER_SECONDS:
            return
        own = self._node_rank

        def asked(state: GenerationState) -> GenerationState:
            if state.attempt != attempt or state.stopped is not None:
                return state
            return replace(state, inquiry=state.inquiry + 1, asked_in=attempt, asked_by=own)

        state = self._store.change(asked)
        if (state.asked_in, state.asked_by) != (attempt, own):
            return
        self._asked = state.inquiry
        self._deadline = now + _TIMEOUT_SECONDS + self._members * _SECONDS_PER_MEMBER
        self.answer(state)

    def answer(self, state: GenerationState) -> None:
        """Answer with the samples of the local ranks, once per inquiry. Raises StoreLostError."""
        if state.inquiry <= self._answered or state.asked_in != state.attempt:
            return
        self._answered = state.inquiry
        if state.asked_by != self._node_rank:
            self._inquiry_seen_at = time.monotonic()
            self._asked = 0  # somebody else asked at the same time, or took over
        store = self._store
        store.set(
            self._key(state.attempt, self._node_rank), f"{state.inquiry} {detection.encode(self._sample_ranks())}"
        )
        store.count(self._key(state.attempt, "answers", state.inquiry), 1)

    def conclude(self, attempt: int) -> Finding | None:
        """Return the finding of the answers, when all are there or time is up; None before. Raises StoreLostError."""
        if not self.open:
            return None
        store = self._store
        answered_count = store.count(self._key(attempt, "answers", self._asked))
        if answered_count < self._members and time.monotonic() < self._deadline:
            return None
        finding = detection.find(self._read_answers(store, attempt), self._members)
        self._asked = 0
        self._not_before = time.monotonic() + finding.retry_seconds
        return finding

    def publish(self, attempt: int, finding: Finding) -> None:
        """Let all know the finding before the attempt ends. Raises StoreLostError."""
        self._store.set(self._key(attempt, "finding"), finding.encode())

    def published(self, attempt: int) -> Finding:
        """Return the finding that ended an attempt; by default that no rank is odd. Raises StoreLostError."""
        store, key = self._store, self._key(attempt, "finding")
        return Finding.decode(store.get(key)) if store.has(key) else Finding(FindingKind.COLLECTIVE)

    def _read_answers(self, store: GenerationStore, attempt: int) -> dict[int, tuple[Stall, ...]]:
        found = {}
        for node_rank in range(self._members):
            key = self._key(attempt, node_rank)
            if store.has(key):
                number, _, text = store.get(key).partition(" ")
                if int(number) == self._asked:
                    found[node_rank] = detection.decode(text)
        return found

    def _key(self, attempt: int, *parts: object) -> str:
        return self._store.key(attempt, "standstill", *parts)
