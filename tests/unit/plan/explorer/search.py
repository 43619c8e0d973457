"""Breadth first through the small model; the first violation that is found has a shortest history."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from explorer.alphabet import NOBODY, Blamed, Letter, mend
from explorer.fingerprint import fingerprint
from explorer.memo import remembered_manifests
from explorer.oracles import BOUND_SECONDS, at_rest, check_state, check_step, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from plan_cluster import FakeCluster

_CLOSURE_STRIDE = 5.0


@dataclass(frozen=True)
class Violation:
    """A history that breaks an oracle."""

    history: tuple[str, ...]
    sentence: str

    def __str__(self) -> str:
        steps = [f"  {number}. {name}" for number, name in enumerate(self.history, start=1)]
        return "\n".join([f"{self.sentence}, after", *steps])


@dataclass
class Report:
    """Result of a search."""

    states: int = 0
    transitions: int = 0
    depth: int = 0
    """Every history of this length was tried."""
    seconds: float = 0.0
    """Processor time."""
    violation: Violation | None = None
    by_depth: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Node:
    cluster: FakeCluster
    blamed: Blamed
    history: tuple[str, ...]


class Explorer:
    """One search from some start states."""

    def __init__(
        self,
        letters: Sequence[Letter],
        *,
        must_hold: Callable[[FakeCluster], None] = lambda _cluster: None,
        ends_well: bool = True,
    ) -> None:
        """`must_hold` raises AssertionError in a state that breaks it; without `ends_well` ends are not checked."""
        self._letters = letters
        self._must_hold = must_hold
        self._checks_ends = ends_well
        self._seen: set[int] = set()
        self._live: set[int] = set()
        self.report = Report()

    def run(self, starts: Sequence[FakeCluster], depth: int) -> Report:
        """All histories of at most `depth` letters, or up to the first violation."""
        began = time.process_time()
        with remembered_manifests():
            self._levels([_Node(start, NOBODY, ()) for start in starts], depth)
        self.report.seconds = time.process_time() - began
        return self.report

    def _levels(self, frontier: list[_Node], depth: int) -> None:
        for level in range(1, depth + 1):
            following: list[_Node] = []
            for node in frontier:
                if not self._expand(node, following):
                    return
            self.report.depth, frontier = level, following
            self.report.by_depth.append(len(following))

    def _expand(self, node: _Node, following: list[_Node]) -> bool:
        """Try every letter; False when the search is over."""
        report = self.report
        for letter in self._letters:
            reached = node.cluster.clone()
            blamed = node.blamed + letter.blamed
            history = (*node.history, letter.name)
            try:
                if not letter.apply(reached):
                    continue
                report.transitions += 1
                check_step(node.cluster.status, reached)
                check_state(reached, blamed)
                self._must_hold(reached)
            except Exception as error:  # noqa: BLE001 - a plan that raises is a finding as well
                report.violation = Violation(history, _message_of(error))
                return False
            mark = fingerprint(reached)
            if mark in self._seen:
                continue
            self._seen.add(mark)
            report.states += 1
            report.violation = self._end_of(_Node(reached, blamed, history)) if self._checks_ends else None
            if report.violation is not None:
                return False
            following.append(_Node(reached, blamed, history))
        return True

    def _end_of(self, node: _Node) -> Violation | None:
        """The fair closure: nothing further goes wrong, what is broken is mended, and time passes."""
        cluster, passed = node.cluster.clone(), []
        mend(cluster)
        waited = 0.0
        while True:
            mark = fingerprint(cluster)
            if mark in self._live:
                break
            passed.append(mark)
            if at_rest(cluster):
                break
            if waited >= BOUND_SECONDS:
                sentence = f"{BOUND_SECONDS} s later, with nothing broken any more, the job is not well: "
                return Violation(node.history, sentence + describe(cluster))
            before = cluster.status
            try:
                cluster.run(_CLOSURE_STRIDE)
                check_step(before, cluster)
                check_state(cluster, node.blamed)
            except Exception as error:  # noqa: BLE001
                return Violation((*node.history, f"all is mended and {waited:g} s pass"), _message_of(error))
            waited += _CLOSURE_STRIDE
        self._live.update(passed)
        return None


def _message_of(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else ""
    return text if isinstance(error, AssertionError) and text else f"{type(error).__name__}: {text}"
