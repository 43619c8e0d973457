"""Ranks agree on the step after which they stop, or are signalled together."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trainium_worker
from tests.testing.suite.timeouts import scaled
from tests.unit.agent.fake_generation_store import FakeGenerationStore
from trainium_agent.shared_state.agreed_stop import AgreedStop
from trainium_agent.shared_state.store import StoreLostError
from trainium_worker.progress_record import ProgressWriter


class LockstepNodes:
    """Nodes with one rank each; the ranks train in step and check for a stop after each step."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.store: Any = FakeGenerationStore()
        self.records = [folder / f"g1-r{node}" for node in range(nodes)]
        self.programs = [
            trainium_worker._Reporter(ProgressWriter(path, generation=1, attempt=2)) for path in self.records
        ]
        self.signalled: list[int] = []
        self.stopped: list[int | None] = [None] * nodes
        self._steps = threading.Barrier(nodes)
        self.membership: Any = SimpleNamespace(generation=1, members=(None,) * nodes)

    def stop(self, node: int, *, attempt: int = 2, memory_remains: bool = True, timeout: float = 30.0) -> AgreedStop:
        stop = AgreedStop(
            self.membership,
            node,
            attempt,
            [self.records[node]],
            memory_remains=memory_remains,
            timeout=timeout,
            store=self.store,
        )
        stop.signal_on_failure(lambda: self.signalled.append(node))
        return stop

    def train(self, node: int) -> None:
        for step in range(1, 5000):
            self._steps.wait(scaled(30))
            if self.programs[node].should_stop():
                self.stopped[node] = step
                return


@pytest.fixture
def nodes(tmp_path: Path) -> LockstepNodes:
    return LockstepNodes(tmp_path, 3)


def run_in_threads(*functions: Any) -> None:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled(60))


def test_training_ranks_stop_after_the_same_step(nodes: LockstepNodes) -> None:
    for program in nodes.programs:
        program.should_stop()
    run_in_threads(
        *(lambda node=node: nodes.train(node) for node in range(3)), *(nodes.stop(node).run for node in range(3))
    )
    assert len(set(nodes.stopped)) == 1
    assert nodes.stopped[0] is not None
    assert nodes.signalled == []


@pytest.mark.parametrize("ending", [None, 0, 2])
def test_ranks_learn_whether_the_memory_of_all_nodes_remains(nodes: LockstepNodes, ending: int | None) -> None:
    for program in nodes.programs:
        program.should_stop()
    stops = [nodes.stop(node, memory_remains=node != ending) for node in range(3)]
    run_in_threads(*(lambda node=node: nodes.train(node) for node in range(3)), *(stop.run for stop in stops))
    for program, step in zip(nodes.programs, nodes.stopped, strict=True):
        assert step is not None
        assert not program.is_kept(step), "it is not in memory"
        program.saved(step, memory=True)
        assert program.is_kept(step) == (ending is None)
        assert not program.is_kept(step + 1)


def test_ranks_learn_that_the_memory_of_their_node_ends_after_the_stop_was_agreed(nodes: LockstepNodes) -> None:
    for program in nodes.programs:
        program.should_stop()
    stops = [nodes.stop(node) for node in range(3)]
    run_in_threads(*(lambda node=node: nodes.train(node) for node in range(3)), *(stop.run for stop in stops))
    stops[1].end_memory()
    for program, step in zip(nodes.programs, nodes.stopped, strict=True):
        assert step is not None
        program.saved(step, memory=True)
    assert [program.is_kept(nodes.stopped[0] or 0) for program in nodes.programs] == [True, False, True]


def test_an_answer_of_another_version_is_no_agreement(nodes: LockstepNodes) -> None:
    nodes.programs[0].should_stop()
    for node in (1, 2):
        nodes.store.set(nodes.store.format_key(2, "stop", node), "later")
    nodes.stop(0).run()
    assert nodes.signalled == [0]
    assert not nodes.programs[0].should_stop()


def test_ranks_that_never_check_for_a_stop_are_signalled_on_all_nodes(nodes: LockstepNodes) -> None:
    nodes.programs[0].should_stop()
    run_in_threads(*(nodes.stop(node).run for node in range(3)))
    assert sorted(nodes.signalled) == [0, 1, 2]
    assert not nodes.programs[0].should_stop(), "the rank that checked continues"


def test_checks_of_an_earlier_attempt_do_not_count(nodes: LockstepNodes) -> None:
    for program in nodes.programs:
        program.should_stop()
    run_in_threads(*(nodes.stop(node, attempt=3).run for node in range(3)))
    assert sorted(nodes.signalled) == [0, 1, 2]


def test_ranks_are_signalled_when_no_other_agent_answers(nodes: LockstepNodes) -> None:
    nodes.programs[0].should_stop()
    nodes.stop(0, timeout=0.0).run()
    assert nodes.signalled == [0]
    assert not nodes.programs[0].should_stop()


def test_an_agent_signals_its_ranks_when_it_leaves_later(nodes: LockstepNodes) -> None:
    stop = AgreedStop(nodes.membership, 0, 2, [nodes.records[0]], memory_remains=True, timeout=0.0, store=nodes.store)
    stop.run()
    assert nodes.signalled == []
    stop.signal_on_failure(lambda: nodes.signalled.append(0))
    assert nodes.signalled == [0]


def test_ranks_are_signalled_when_the_store_is_lost(nodes: LockstepNodes) -> None:
    def raise_store_lost(key: str, value: str) -> None:
        raise StoreLostError("gone")

    nodes.programs[0].should_stop()
    nodes.store.set = raise_store_lost
    nodes.stop(0).run()
    assert nodes.signalled == [0]
