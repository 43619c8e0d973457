"""Ranks agree on the step after which they stop, or are signalled together."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trainium_worker
from tests.testing.suite.timeouts import scaled
from tests.unit.agent.shared_store import Shared
from trainium_agent.generation.agreed_stop import AgreedStop
from trainium_agent.generation.store import StoreLostError


class AgreementStore(Shared):
    """The shared store, with checks for several keys at once."""

    def has(self, *keys: str) -> bool:  # type: ignore[override]
        return all(key in self.values for key in keys)

    def close(self) -> None:
        pass


class Job:
    """Nodes with one rank each; the ranks train in step and check for a stop after each step."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.store: Any = AgreementStore()
        self.records = [folder / f"g1-r{node}" for node in range(nodes)]
        self.programs = [
            trainium_worker._Program(trainium_worker.ProgressWriter(path, generation=1, attempt=2))
            for path in self.records
        ]
        self.signalled: list[int] = []
        self.stopped: list[int | None] = [None] * nodes
        self._steps = threading.Barrier(nodes)
        self._membership: Any = SimpleNamespace(generation=1, members=(None,) * nodes)

    def stop(self, node: int, *, attempt: int = 2, timeout: float = 30.0) -> AgreedStop:
        stop = AgreedStop(self._membership, node, attempt, [self.records[node]], timeout=timeout, store=self.store)
        stop.signal_on_failure(lambda: self.signalled.append(node))
        return stop

    def train(self, node: int) -> None:
        for step in range(1, 5000):
            self._steps.wait(scaled(30))
            if self.programs[node].should_stop():
                self.stopped[node] = step
                return


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path, 3)


def run(*parts: Any) -> None:
    threads = [threading.Thread(target=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled(60))


def test_training_ranks_stop_after_the_same_step(job: Job) -> None:
    for program in job.programs:
        program.should_stop()
    run(*(lambda node=node: job.train(node) for node in range(3)), *(job.stop(node).run for node in range(3)))
    assert len(set(job.stopped)) == 1
    assert job.stopped[0] is not None
    assert job.signalled == []


def test_ranks_that_never_check_for_a_stop_are_signalled_on_all_nodes(job: Job) -> None:
    job.programs[0].should_stop()
    run(*(job.stop(node).run for node in range(3)))
    assert sorted(job.signalled) == [0, 1, 2]
    assert not job.programs[0].should_stop(), "the rank that checked continues"


def test_checks_of_an_earlier_attempt_do_not_count(job: Job) -> None:
    for program in job.programs:
        program.should_stop()
    run(*(job.stop(node, attempt=3).run for node in range(3)))
    assert sorted(job.signalled) == [0, 1, 2]


def test_ranks_are_signalled_when_no_other_agent_answers(job: Job) -> None:
    job.programs[0].should_stop()
    job.stop(0, timeout=0.0).run()
    assert job.signalled == [0]
    assert not job.programs[0].should_stop()


def test_an_agent_signals_its_ranks_when_it_leaves_later(job: Job) -> None:
    stop = AgreedStop(job._membership, 0, 2, [job.records[0]], timeout=0.0, store=job.store)
    stop.run()
    assert job.signalled == []
    stop.signal_on_failure(lambda: job.signalled.append(0))
    assert job.signalled == [0]


def test_ranks_are_signalled_when_the_store_is_lost(job: Job) -> None:
    def lost(key: str, value: str) -> None:
        raise StoreLostError("gone")

    job.programs[0].should_stop()
    job.store.set = lost
    job.stop(0).run()
    assert job.signalled == [0]
