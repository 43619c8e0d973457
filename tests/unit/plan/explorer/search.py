"""Breadth-first search of the small models: the first violation has a shortest history."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.unit.plan.explorer.fingerprint import fingerprint
from tests.unit.plan.explorer.memo import cached_manifests
from tests.unit.plan.explorer.oracles import BOUND_SECONDS, check_state, check_step, describe, has_converged
from tests.unit.plan.explorer.transitions import NO_BUDGET, Transition, UsedBudgets, repair
from tests.unit.plan.plan_cluster import FakeCluster

_CLOSURE_STRIDE = 5.0


@dataclass(frozen=True)
class Violation:
    """A history after which an oracle does not hold."""

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
    used_budgets: UsedBudgets
    history: tuple[str, ...]


class Explorer:
    """One search from some start states."""

    def __init__(
        self,
        transitions: Sequence[Transition],
        *,
        must_hold: Callable[[FakeCluster], None] = lambda _cluster: None,
        ends_well: bool = True,
    ) -> None:
        """`must_hold` asserts a further invariant; without `ends_well` convergence is not checked."""
        self._transitions = transitions
        self._must_hold = must_hold
        self._checks_ends = ends_well
        self._seen: set[int] = set()
        self._live: set[int] = set()
        self.report = Report()

    def run(self, starts: Sequence[FakeCluster], depth: int) -> Report:
        """Explore all histories of at most `depth` transitions, or up to the first violation."""
        began = time.process_time()
        with cached_manifests():
            self._levels([_Node(start, NO_BUDGET, ()) for start in starts], depth)
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
        """Apply every transition; return False after a violation."""
        report = self.report
        for transition in self._transitions:
            reached = node.cluster.clone()
            used_budgets = node.used_budgets + transition.used_budgets
            history = (*node.history, transition.name)
            try:
                if not transition.apply(reached):
                    continue
                report.transitions += 1
                check_step(node.cluster.status, reached)
                check_state(reached, used_budgets)
                self._must_hold(reached)
            except Exception as error:  # noqa: BLE001 - a plan that raises is a finding as well
                report.violation = Violation(history, _describe_error(error))
                return False
            mark = fingerprint(reached)
            if mark in self._seen:
                continue
            self._seen.add(mark)
            report.states += 1
            report.violation = (
                self._find_liveness_violation(_Node(reached, used_budgets, history)) if self._checks_ends else None
            )
            if report.violation is not None:
                return False
            following.append(_Node(reached, used_budgets, history))
        return True

    def _find_liveness_violation(self, node: _Node) -> Violation | None:
        """Repair everything, let time pass, and return a violation if the job does not converge."""
        cluster, passed = node.cluster.clone(), []
        repair(cluster)
        waited = 0.0
        while True:
            mark = fingerprint(cluster)
            if mark in self._live:
                break
            passed.append(mark)
            if has_converged(cluster):
                break
            if waited >= BOUND_SECONDS:
                sentence = f"{BOUND_SECONDS} s later, with all faults repaired, the job has not converged: "
                return Violation(node.history, sentence + describe(cluster))
            before = cluster.status
            try:
                cluster.run(_CLOSURE_STRIDE)
                check_step(before, cluster)
                check_state(cluster, node.used_budgets)
            except Exception as error:  # noqa: BLE001
                return Violation(
                    (*node.history, f"everything is repaired and {waited:g} s pass"), _describe_error(error)
                )
            waited += _CLOSURE_STRIDE
        self._live.update(passed)
        return None


def _describe_error(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else ""
    return text if isinstance(error, AssertionError) and text else f"{type(error).__name__}: {text}"
