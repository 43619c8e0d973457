"""The checks of curve, samples and leaks beside the rows of the fault table."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.curves import check_batches, compare_losses
from benchmarks.faults.leaks import MIN_SAMPLES, find_growth, find_job_files, find_leftovers
from benchmarks.faults.resource_usage import Process, ResourceUsage, find_role
from trainium_devcluster.jobs.metrics import read_samples


def test_a_curve_that_differs_or_misses_steps_is_wrong() -> None:
    reference = {1: 5.0, 2: 4.0, 3: 3.0}
    assert list(compare_losses({1: 5.0, 2: 4.0 * (1 + 5e-6)}, reference, 1e-5)) == []
    assert "at step 2" in " ".join(compare_losses({1: 5.0, 2: 4.001}, reference, 1e-5))
    assert "missing" in " ".join(compare_losses({1: 5.0, 3: 3.0}, reference, 1e-5))
    assert "differs" in " ".join(compare_losses({1: float("nan")}, reference, 1e-5))
    assert "differs" in " ".join(compare_losses({1: 5.0, 2: 4.0, 3: 3.0, 4: 2.0}, reference, 1e-5))


def test_repeated_and_missing_samples_are_reported(tmp_path: Path) -> None:
    for rank, samples in (("0", [4, 1]), ("1", [2, 2])):
        (tmp_path / f"samples-{rank}.jsonl").write_text(json.dumps({"step": 1, "samples": samples}) + "\n{torn")
    seen = read_samples(tmp_path)
    assert seen == {1: [1, 2, 2, 4]}
    assert len(list(check_batches(seen, 1, 4))) == 1
    assert list(check_batches({1: [1, 2], 2: [3, 4]}, 2, 2)) == []
    assert len(list(check_batches({1: [1, 2], 2: [2, 4]}, 2, 2))) == 1
    two_epochs = {1: [3, 0], 2: [1, 4], 3: [2, 1], 4: [0, 3], 5: [2, 4]}
    assert list(check_batches(two_epochs, 5, 2)) == []
    assert "step 2 saw [1, 3]" in check_batches({**two_epochs, 2: [1, 3]}, 5, 2)
    assert list(check_batches({**two_epochs, 4: [0, 1]}, 5, 2)) == ["step 4 saw [0, 1]"]


def resource_usage(*processes: Process, at: float = 0.0, **more: Any) -> ResourceUsage:
    return replace(ResourceUsage(at, processes, 0, 0, 0), **more)


def process(role: str = "operator", **more: Any) -> Process:
    return replace(Process(7, 1.0, role, 100.0, 20, 10, 5), **more)


def build_samples(count: int, **slope: float) -> list[ResourceUsage]:
    """Return samples of a process that grows by these amounts."""
    first = process()
    return [
        resource_usage(
            process(**{name: getattr(first, name) + each * number for name, each in slope.items()}), at=20.0 * number
        )
        for number in range(count)
    ]


def test_a_run_without_leftovers_or_growth_has_no_leak() -> None:
    assert list(find_leftovers(resource_usage(process()), resource_usage(process(pid=8)))) == []
    assert list(find_growth(build_samples(40))) == []


@pytest.mark.parametrize(
    ("what", "slope"), [("MB", {"megabytes": 2.0}), ("sockets", {"sockets": 1}), ("files", {"files": 1})]
)
def test_steady_growth_is_reported(what: str, slope: dict[str, float]) -> None:
    assert what in " ".join(find_growth(build_samples(60, **slope)))


def agents(*sockets: Callable[[int], float]) -> list[ResourceUsage]:
    """Return samples of a job's agents with these numbers of sockets."""

    def observe(number: int) -> ResourceUsage:
        those = (process("agent", pid=pid, sockets=int(of(number))) for pid, of in enumerate(sockets))
        return resource_usage(*those, at=20.0 * number)

    return [observe(number) for number in range(60)]


def test_a_spare_with_the_sockets_of_a_former_agent_has_not_grown() -> None:
    took_over = agents(lambda _: 26, lambda number: 7 if number < 40 else 26)
    assert list(find_growth(took_over)) == []


@pytest.mark.parametrize("of", [lambda number: 26 + number / 2, lambda number: 7 if number < 40 else 46])
def test_an_agent_with_more_sockets_than_any_before_has_grown(of: Callable[[int], float]) -> None:
    assert "sockets" in " ".join(find_growth(agents(lambda _: 26, of)))


def test_agents_that_all_grow_have_grown() -> None:
    assert len(list(find_growth(agents(*[lambda number: 7 + number] * 3)))) == 3


def test_a_process_with_few_samples_is_not_checked() -> None:
    assert list(find_growth(build_samples(MIN_SAMPLES - 1, megabytes=50.0))) == []


def test_growth_of_kubernetes_components_is_not_checked() -> None:
    grown = [
        resource_usage(process("API server", megabytes=100.0 + 10 * number), at=20.0 * number) for number in range(60)
    ]
    assert list(find_growth(grown)) == []


def test_all_kinds_of_leftovers_are_reported() -> None:
    before = resource_usage(process(), objects={"pods": 0, "secrets": 1})
    after = resource_usage(
        process(sockets=40), process("agent", pid=9), objects={"pods": 2, "secrets": 1}, shared_memory=3, node_files=400
    )
    shown = " ".join(find_leftovers(before, after))
    for part in ("(agent)", "2 pods", "3 entries of /dev/shm", "400 more files", "40 sockets"):
        assert part in shown
    assert "secrets" not in shown


def test_a_folder_of_the_job_that_only_grows_is_reported() -> None:
    assert "folder" in " ".join(find_job_files([resource_usage(job_files=100 + 5 * number) for number in range(60)]))
    assert list(find_job_files([resource_usage(job_files=100 + number % 7) for number in range(60)])) == []


def test_the_role_of_a_process_is_that_of_its_program() -> None:
    assert find_role(["/cache/trainium-operator/bin/etcd", "--data-dir=/x"]) == "etcd"
    assert find_role(["/venv/bin/python", "/venv/bin/trainium-agent"]) == "agent"
    assert find_role(["python3.11", "-m", "trainium_devcluster.node", "--name=a"]) == "node runtime"
    assert find_role([]) == "nameless"
