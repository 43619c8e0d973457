"""Investigate stalled ranks with the other agents, from the first suspicion to the finding that ends the attempt.

An agent with an overdue rank asks all agents, and each answers with its observations. Before its answer an agent
requests the stacks of its overdue ranks, because the others exit as soon as one rank is ended. The runner ends the
ranks.

Guarantees:
- All agents of the generation use the same finding, which one of them publishes.
- Only the agent of a rank to blame reports a failure, so victims are never blamed.
- The module is used in the worker thread only.
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from trainium_agent.hang import detection
from trainium_agent.hang.detection import Finding, FindingKind, Stall
from trainium_agent.hang.rank_sampler import RankSampler
from trainium_agent.lifecycle.events import HangFound, InquiryUpdated, RanksSampled
from trainium_agent.linux import stacks
from trainium_agent.workload.attempt import find_progress_file
from trainium_contract.faults.causes import Cause
from trainium_contract.wire.log_line import LogFormat
from trainium_contract.wire.messages import StuckRank

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainium_agent.exits.restart_policy import GenerationState
    from trainium_agent.hang.detection import Calibration
    from trainium_agent.linux.stacks import StackDump
    from trainium_agent.ranks.processes import RankProcess
    from trainium_agent.settings import AgentSettings
    from trainium_agent.shared_state.store import GenerationStore
    from trainium_agent.workload.workload import Workload
    from trainium_contract.wire.messages import Membership

_log = logging.getLogger(__name__)
_REPORTED = 8
_STACK_CHARACTERS = 1000


class HangResponse:
    """Responds to stalls on this pod during one generation."""

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
        self._sampler = RankSampler(settings, membership, workload, calibration)
        self.inquiry = Inquiry(store, node_rank, len(membership.members), self._sample_ranks)
        self._living: tuple[RankProcess, ...] = ()
        self._stacks: Mapping[int, StackDump] = {}
        self._stuck: tuple[StuckRank, ...] | None = None

    def set_living_ranks(self, living: tuple[RankProcess, ...]) -> None:
        """Set the ranks that are alive and were not ended by the agent."""
        self._living = living
        self._stuck = None

    def sample(self) -> RanksSampled:
        """Sample the local ranks without asking other agents."""
        stalls = self._sampler.sample(self._living)
        overdue = self._settings.hang.enabled and any(stall.overdue for stall in stalls)
        if not overdue:
            self._stacks = {}
        return RanksSampled(overdue, self._sampler.timing)

    def build_inquiry_update(self) -> InquiryUpdated:
        """Return the state of the inquiry and the stuck ranks."""
        return InquiryUpdated(self.inquiry.is_open, self._stuck)

    def apply_finding(self, finding: Finding, state: GenerationState) -> HangFound:
        """Log the stalls on this pod and return the result for the runner."""
        stalled = self._sample_ranks()
        own_stalls = [stall for stall in stalled if stall.rank in finding.culprits]
        self._write_log(finding, stalled)
        culprits = []
        for stall in own_stalls:
            stack = self._stacks.get(stall.rank)
            sentence = detection.describe_stall(stall, self._settings.pod_name)
            culprits.append((stall.rank, f"{sentence}; {stack.innermost}" if stack is not None else sentence))
        longest = max((stall.seconds for stall in own_stalls or stalled), default=0.0)
        is_collective = finding.kind is FindingKind.COLLECTIVE
        return HangFound(
            state,
            Cause.HANG if own_stalls or is_collective else Cause.PEER_LOST,
            time.time() - longest,
            culprit_known=finding.kind is FindingKind.STUCK,
            culprits=tuple(culprits),
            stuck=self._stuck or (),
        )

    def reset(self) -> None:
        """Reset at the start of an attempt."""
        self.inquiry.reset()
        self._stacks = {}

    def _sample_ranks(self) -> tuple[Stall, ...]:
        """Sample the local ranks, and request the stacks of those that are overdue or soon will be."""
        stalled = self._sampler.sample(self._living)
        suspicious = any(stall.overdue for stall in stalled)
        suspects = {stall.rank for stall in stalled if suspicious and stall.seconds > stall.limit / 2}
        without_stack = {
            process.rank: (process.pid, find_progress_file(self._settings, self._generation, process.local_rank))
            for process in self._living
            if process.rank in suspects and process.rank not in self._stacks and process.alive
        }
        self._stacks = dumps = {**self._stacks, **stacks.request_stacks(without_stack)}
        explained = tuple(_apply_stack(stall, dumps.get(stall.rank)) for stall in stalled)
        overdue = (stall for stall in explained if stall.overdue)
        self._stuck = tuple(_build_stuck_rank(stall, dumps.get(stall.rank)) for stall in overdue)[:_REPORTED]
        return explained

    def _write_log(self, finding: Finding, stalled: tuple[Stall, ...]) -> None:
        match finding.kind:
            case FindingKind.STUCK:
                ranks = ", ".join(map(str, finding.culprits))
                summary = f"rank {ranks} is to blame" if len(finding.culprits) == 1 else f"ranks {ranks} are to blame"
            case FindingKind.SILENT:
                summary = f"the agents of node ranks {', '.join(map(str, finding.silent))} do not answer"
            case _:
                summary = "all ranks are in the same state, none is to blame"
        _log.error("training hangs: %s; all ranks restart in place", summary)
        for stall in stalled:
            stack = self._stacks.get(stall.rank)
            _log.warning(
                "%s; %s",
                detection.describe_stall(stall, self._settings.pod_name),
                stack.innermost if stack else "not asked",
            )
            if stack is not None and stack.text:
                if self._settings.log_format is LogFormat.JSON:
                    _log.warning("%s", stack.text, extra={"rank": stall.rank})
                else:
                    sys.stdout.write("".join(f"[rank {stall.rank}] {line}\n" for line in stack.text.splitlines()))
        sys.stdout.flush()


def _apply_stack(stall: Stall, stack: StackDump | None) -> Stall:
    if stall.reported_waiting is not None or stack is None or stack.in_collective is None:
        return stall
    return replace(stall, reported_waiting=stack.in_collective)


def _build_stuck_rank(stall: Stall, stack: StackDump | None) -> StuckRank:
    return StuckRank(
        rank=stall.rank,
        phase=stall.phase,
        step=max(stall.step, -1),
        seconds=stall.seconds,
        waiting=stall.is_waiting,
        stack=stack.innermost[:_STACK_CHARACTERS] if stack is not None else "",
    )


_TIMEOUT_SECONDS = 2.0
_SECONDS_PER_MEMBER = 0.002
"""Time for the slowest of many agents to receive an inquiry (see `StateWatcher`) and answer it, per member."""
_TAKE_OVER_SECONDS = 10.0


class Inquiry:
    """Takes part in the inquiries of one generation for one agent; used in the worker thread only."""

    def __init__(
        self,
        store: GenerationStore,
        node_rank: int,
        members: int,
        sample: Callable[[], tuple[Stall, ...]],
    ) -> None:
        """`sample` returns the stalls of the local ranks."""
        self._store = store
        self._node_rank = node_rank
        self._members = members
        self._sample_ranks = sample
        self._own_inquiry = 0
        self._deadline = 0.0
        self._answered = 0
        self._inquiry_seen_at = 0.0
        self._not_before = 0.0

    @property
    def is_open(self) -> bool:
        """Whether this agent waits for answers."""
        return self._own_inquiry > 0

    def reset(self) -> None:
        """Reset at the start of an attempt."""
        self._own_inquiry = 0
        self._inquiry_seen_at = self._not_before = 0.0

    def open(self, attempt: int) -> None:
        """Open an inquiry, unless one is open or all ranks were just excused.

        Raises StoreLostError.
        """
        now = time.monotonic()
        if self.is_open or now < self._not_before or now < self._inquiry_seen_at + _TAKE_OVER_SECONDS:
            return
        node_rank = self._node_rank

        def open_inquiry(state: GenerationState) -> GenerationState:
            if state.attempt != attempt or state.stopped is not None:
                return state
            return replace(state, inquiry=state.inquiry + 1, inquiry_attempt=attempt, inquiry_node_rank=node_rank)

        state = self._store.update_state(open_inquiry)
        if (state.inquiry_attempt, state.inquiry_node_rank) != (attempt, node_rank):
            return
        self._own_inquiry = state.inquiry
        self._deadline = now + _TIMEOUT_SECONDS + self._members * _SECONDS_PER_MEMBER
        self.answer(state)

    def answer(self, state: GenerationState) -> None:
        """Answer with the samples of the local ranks, once per inquiry. Raises StoreLostError."""
        if state.inquiry <= self._answered or state.inquiry_attempt != state.attempt:
            return
        self._answered = state.inquiry
        if state.inquiry_node_rank != self._node_rank:
            self._inquiry_seen_at = time.monotonic()
            self._own_inquiry = 0  # another agent asked at the same time, or took over
        store = self._store
        store.set(
            self._format_key(state.attempt, self._node_rank),
            f"{state.inquiry} {detection.encode_stalls(self._sample_ranks())}",
        )
        store.count(self._format_key(state.attempt, "answers", state.inquiry), 1)

    def conclude(self, attempt: int) -> Finding | None:
        """Publish and return the finding that ends the attempt; None before the answers, and if a rank has time left.

        Raises StoreLostError.
        """
        if not self.is_open:
            return None
        store = self._store
        answered_count = store.count(self._format_key(attempt, "answers", self._own_inquiry))
        if answered_count < self._members and time.monotonic() < self._deadline:
            return None
        finding = detection.find_culprits(self._read_answers(store, attempt), self._members)
        self._own_inquiry = 0
        self._not_before = time.monotonic() + finding.retry_seconds
        if finding.kind is FindingKind.PROGRESSING:
            return None
        store.set(self._format_key(attempt, "finding"), finding.encode())
        return finding

    def read_finding(self, attempt: int) -> Finding:
        """Return the published finding of an attempt; without one, that no rank differs. Raises StoreLostError."""
        store, key = self._store, self._format_key(attempt, "finding")
        return Finding.decode(store.get(key)) if store.has(key) else Finding(FindingKind.COLLECTIVE)

    def _read_answers(self, store: GenerationStore, attempt: int) -> dict[int, tuple[Stall, ...]]:
        answers = {}
        for node_rank in range(self._members):
            key = self._format_key(attempt, node_rank)
            if store.has(key):
                number, _, text = store.get(key).partition(" ")
                if int(number) == self._own_inquiry:
                    answers[node_rank] = detection.decode_stalls(text)
        return answers

    def _format_key(self, attempt: int, *parts: object) -> str:
        return self._store.format_key(attempt, "hang", *parts)
