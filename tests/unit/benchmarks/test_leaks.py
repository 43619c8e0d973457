"""The checks of curve, samples and leaks beside the rows of the fault table."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.curves import check_batches, compare_losses
from benchmarks.faults.census import Census, Process, role_of
from benchmarks.faults.leaks import MIN_SAMPLES, find_growth, find_job_files, find_leftovers
from trainium_devcluster.demos.metrics import read_samples

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_curve_is_wrong_where_it_differs_or_misses_steps() -> None:
    reference = {1: 5.0, 2: 4.0, 3: 3.0}
    assert list(compare_losses({1: 5.0, 2: 4.0 * (1 + 5e-6)}, reference, 1e-5)) == []
    assert "at step 2" in " ".join(compare_losses({1: 5.0, 2: 4.001}, reference, 1e-5))
    assert "missing" in " ".join(compare_losses({1: 5.0, 3: 3.0}, reference, 1e-5))
    assert "differs" in " ".join(compare_losses({1: float("nan")}, reference, 1e-5))
    assert "differs" in " ".join(compare_losses({1: 5.0, 2: 4.0, 3: 3.0, 4: 2.0}, reference, 1e-5))


def test_a_sample_that_was_seen_twice_or_never_is_reported(tmp_path: Path) -> None:
    for rank, samples in (("0", [4, 1]), ("1", [2, 2])):
        (tmp_path / f"samples-{rank}.jsonl").write_text(json.dumps({"step": 1, "samples": samples}) + "\n{torn")
    seen = read_samples(tmp_path)
    assert seen == {1: [1, 2, 2, 4]}
    assert len(list(check_batches(seen, 1, 4))) == 1
    assert list(check_batches({1: [1, 2], 2: [3, 4]}, 2, 2)) == []
    assert len(list(check_batches({1: [1, 2], 2: [2, 4]}, 2, 2))) == 1


def census(*processes: Process, at: float = 0.0, **more: Any) -> Census:
    return replace(Census(at, processes, 0, 0, 0), **more)


def process(role: str = "operator", **more: Any) -> Process:
    return replace(Process(7, 1.0, role, 100.0, 20, 10, 5), **more)


def reads(count: int, **slope: float) -> list[Census]:
    """A process that has so much more at each look."""
    first = process()
    return [
        census(
            process(**{name: getattr(first, name) + each * number for name, each in slope.items()}), at=20.0 * number
        )
        for number in range(count)
    ]


def test_nothing_left_and_nothing_grown_is_no_leak() -> None:
    assert list(find_leftovers(census(process()), census(process(pid=8)))) == []
    assert list(find_growth(reads(40))) == []


@pytest.mark.parametrize(
    ("what", "slope"), [("MB", {"megabytes": 2.0}), ("sockets", {"sockets": 1}), ("files", {"files": 1})]
)
def test_what_grows_steadily_is_reported(what: str, slope: dict[str, float]) -> None:
    assert what in " ".join(find_growth(reads(60, **slope)))


def agents(*sockets: Callable[[int], float], count: int = 60) -> list[Census]:
    """Agents of one job with so many sockets at each look."""

    def observe(number: int) -> Census:
        those = (process("agent", pid=pid, sockets=int(of(number))) for pid, of in enumerate(sockets))
        return census(*those, at=20.0 * number)

    return [observe(number) for number in range(count)]


def test_a_spare_that_takes_over_what_another_agent_held_has_not_grown() -> None:
    took_over = agents(lambda _: 26, lambda number: 7 if number < 40 else 26)
    assert list(find_growth(took_over)) == []


@pytest.mark.parametrize("of", [lambda number: 26 + number / 2, lambda number: 7 if number < 40 else 46])
def test_an_agent_that_has_more_than_any_before_has_grown(of: Callable[[int], float]) -> None:
    assert "sockets" in " ".join(find_growth(agents(lambda _: 26, of)))


def test_agents_that_all_grow_have_grown() -> None:
    assert len(list(find_growth(agents(*[lambda number: 7 + number] * 3)))) == 3


def test_a_process_that_was_seen_a_few_times_is_not_judged() -> None:
    assert list(find_growth(reads(MIN_SAMPLES - 1, megabytes=50.0))) == []


def test_growth_of_the_programs_of_kubernetes_is_not_judged() -> None:
    grown = [census(process("API server", megabytes=100.0 + 10 * number), at=20.0 * number) for number in range(60)]
    assert list(find_growth(grown)) == []


def test_whatever_is_left_is_reported() -> None:
    before = census(process(), objects={"pods": 0, "secrets": 1})
    after = census(
        process(sockets=40),
        process("agent", pid=9),
        objects={"pods": 2, "secrets": 1},
        shared_memory=3,
        node_files=400,
    )
    shown = " ".join(find_leftovers(before, after))
    for part in ("(agent)", "2 pods", "3 entries of /dev/shm", "400 more files", "40 sockets"):
        assert part in shown
    assert "secrets" not in shown


def test_a_folder_of_the_job_that_only_grows_is_reported() -> None:
    assert "folder" in " ".join(find_job_files([census(job_files=100 + 5 * number) for number in range(60)]))
    assert list(find_job_files([census(job_files=100 + number % 7) for number in range(60)])) == []


def test_a_process_is_known_by_its_program_not_by_a_path_in_its_arguments() -> None:
    assert role_of(["/cache/trainium-operator/bin/etcd", "--data-dir=/x"]) == "etcd"
    assert role_of(["/venv/bin/python", "/venv/bin/trainium-agent"]) == "agent"
    assert role_of(["python3.11", "-m", "trainium_devcluster.node", "--name=a"]) == "node runtime"
    assert role_of([]) == "nameless"
