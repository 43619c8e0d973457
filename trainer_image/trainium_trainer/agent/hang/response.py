"""What one agent does about ranks that stand still, from the first doubt to the restart in place.

The watch calls when a local rank is overdue; the agents exchange what they see; before that each asks its
overdue ranks for their stacks, because once one rank is ended the others leave too. Ending them is the run loop's.

Invariants: every agent of the generation comes to the same finding, because one of them concludes it for all; only the
agent of a culprit reports a failure, so victims are never blamed.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from trainium_contract.exit_codes import ExitCode
from trainium_contract.faults.causes import Cause
from trainium_contract.wire.messages import StuckRank
from trainium_trainer.agent.hang import detection
from trainium_trainer.agent.hang.detection import Finding, Kind, Standstill
from trainium_trainer.agent.hang.group_diagnosis import Inquiry
from trainium_trainer.agent.hang.watchdog import HangWatch
from trainium_trainer.agent.linux import stacks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainium_contract.wire.messages import Membership
    from trainium_trainer.agent.coordinator.report import Report
    from trainium_trainer.agent.exits.restart_policy import GenerationState
    from trainium_trainer.agent.generation.generation_store import GenerationStore
    from trainium_trainer.agent.hang.detection import Calibration
    from trainium_trainer.agent.linux.stacks import Stacks
    from trainium_trainer.agent.ranks.rank_group import LocalRanks
    from trainium_trainer.agent.settings import AgentSettings

_log = logging.getLogger(__name__)
_REPORTED = 8
_STACK_CHARACTERS = 1000
_TOLD_SECONDS = 2.5


class HangResponse:
    """One generation's answer to standstills on this pod; used from the run loop's thread.

    What was told and the stacks that go with it are shared with the watch's thread, which takes them back.
    """

    def __init__(
        self,
        settings: AgentSettings,
        membership: Membership,
        node_rank: int,
        *,
        ranks: LocalRanks,
        report: Report,
        calibration: Calibration,
        store: Callable[[], GenerationStore],
        on_overdue: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._ranks = ranks
        self._report = report
        members = len(membership.members)
        self._watch = HangWatch(
            settings.hang,
            ranks,
            ranks.progress_file,
            generation=membership.generation,
            world=members * membership.processes_per_node,
            calibration=calibration,
            on_overdue=on_overdue,
            on_none_overdue=self._none_overdue,
        )
        self._inquiry = Inquiry(store, node_rank, members, self._testify)
        self._telling = threading.Lock()
        self._stacks: Mapping[int, Stacks] = {}
        """Replaced and never changed, so whoever has taken it keeps what was in it."""
        self._told_at = 0.0
        report.step_timing = lambda: self._watch.timing

    def start(self) -> None:
        """Begin to watch."""
        self._watch.start()

    def stop(self) -> None:
        """End."""
        self._watch.stop()
        self._report.stuck(())

    @property
    def concluding(self) -> bool:
        """Whether answers are awaited, so that `conclude` is to be called soon."""
        return self._inquiry.open

    def ask(self, attempt: int) -> None:
        """A local rank is overdue. Raises StoreLostError."""
        self._inquiry.ask(attempt)

    def answer(self, state: GenerationState) -> None:
        """The shared state changed: answer a question in it. Raises StoreLostError."""
        self._inquiry.answer(state)

    def conclude(self, attempt: int) -> Finding | None:
        """The finding that ends the attempt, known to all; None while nothing is to be done. Raises StoreLostError."""
        finding = self._inquiry.conclude(attempt)
        if finding is None:
            return None
        if finding.kind is Kind.MOVING:
            return None
        self._inquiry.publish(attempt, finding)
        return finding

    def published(self, attempt: int) -> Finding:
        """The finding of the agent that concluded. Raises StoreLostError."""
        return self._inquiry.published(attempt)

    def end_attempt(self, finding: Finding, generation: int) -> tuple[Cause, float]:
        """Log and report what stood still here; the restart's cause and the time of the failure (Unix seconds)."""
        standing, asked = self._look()
        own = [still for still in standing if still.rank in finding.culprits]
        self._write_log(finding, standing, asked)
        for still in own:
            process = next(each for each in self._ranks if each.rank == still.rank)
            known = asked.get(still.rank)
            sentence = detection.describe(still, self._settings.pod_name)
            if known is not None:
                sentence += f"; {known.innermost}"
            self._report.hung(generation, process, ExitCode.HUNG, sentence)
        longest = max((still.seconds for still in own or standing), default=0.0)
        alike = finding.kind is Kind.COLLECTIVE
        self.forget()
        return Cause.HANG if own or alike else Cause.PEER_LOST, time.time() - longest

    def forget(self) -> None:
        """Another attempt begins."""
        self._inquiry.forget()
        with self._telling:
            self._stacks = {}

    def _none_overdue(self) -> None:
        """From the watch's thread; what was told stays long enough for a heartbeat to carry it."""
        with self._telling:
            self._stacks = {}
            if self._told_at and time.monotonic() > self._told_at + _TOLD_SECONDS:
                self._told_at = 0.0
                self._report.stuck(())

    def _testify(self) -> tuple[Standstill, ...]:
        return self._look()[0]

    def _look(self) -> tuple[tuple[Standstill, ...], Mapping[int, Stacks]]:
        """Look at the local ranks, with the stacks of those that are overdue, or soon are; the heartbeats tell too."""
        standing = self._watch.look()
        suspicious = any(still.overdue for still in standing)
        doubtful = {still.rank for still in standing if suspicious and still.seconds > still.limit / 2}
        processes = {each.rank: each for each in self._ranks if each.rank in doubtful and each.alive}
        known = self._stacks
        unasked = [rank for rank in processes if rank not in known]
        answers = stacks.ask(
            {rank: (processes[rank].pid, self._ranks.progress_file(processes[rank].local_rank)) for rank in unasked}
        )
        known = {**known, **answers}
        told = tuple(_told_by_stack(still, known.get(still.rank)) for still in standing)
        stuck = tuple(_stuck(still, known.get(still.rank)) for still in told if still.overdue)[:_REPORTED]
        with self._telling:
            self._stacks = known
            self._told_at = time.monotonic()
            self._report.stuck(stuck)
        return told, known

    def _write_log(self, finding: Finding, standing: tuple[Standstill, ...], asked: Mapping[int, Stacks]) -> None:
        match finding.kind:
            case Kind.STUCK:
                summary = f"ranks {', '.join(map(str, finding.culprits))} are to blame"
            case Kind.SILENT:
                summary = f"the agents of node ranks {', '.join(map(str, finding.silent))} do not answer"
            case _:
                summary = "all ranks stand alike, nobody is to blame"
        _log.error("training stands still: %s; all ranks restart in place", summary)
        for still in standing:
            known = asked.get(still.rank)
            _log.warning(
                "%s; %s", detection.describe(still, self._settings.pod_name), known.innermost if known else "not asked"
            )
            if known is not None and known.text:
                sys.stdout.write("".join(f"[rank {still.rank}] {line}\n" for line in known.text.splitlines()))
        sys.stdout.flush()


def _told_by_stack(still: Standstill, known: Stacks | None) -> Standstill:
    if still.waiting is not None or known is None or known.in_collective is None:
        return still
    return replace(still, waiting=known.in_collective)


def _stuck(still: Standstill, known: Stacks | None) -> StuckRank:
    return StuckRank(
        rank=still.rank,
        phase=still.phase,
        step=max(still.step, -1),
        seconds=still.seconds,
        waiting=still.waits,
        stack=known.innermost[:_STACK_CHARACTERS] if known is not None else "",
    )
