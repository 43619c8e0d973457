"""What the soak plays, how it judges what is left over, and how it stands beside the simulator; without a cluster."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.soak.census import Census, Process, role_of
from benchmarks.soak.compare import (
    Slowness,
    Window,
    ledger_of,
    recovered_from,
    recovered_of,
    rows,
    simulated,
)
from benchmarks.soak.course import CALM_SECONDS, PLACES, course
from benchmarks.soak.curve import samples_of, wrong_curve, wrong_samples
from benchmarks.soak.document import BEGIN, END, compare, learned, write_document
from benchmarks.soak.leaks import LEAST_LOOKS, wrong_growth, wrong_job_files, wrong_leftovers
from benchmarks.soak.result import SoakResult
from trainium_simulator.stages import StageTimes
from trainium_simulator.virtual.failures import OF_THE_CLUSTER, FaultClass
from trainium_simulator.virtual.schedule import Fault

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ZERO = 1_900_000_000.0
AS_IT_IS = Slowness(operator_seconds=8.0, node_seconds=0.0)


# --- the schedule ---------------------------------------------------------------------------------------------------


def test_a_seed_and_a_length_are_one_schedule() -> None:
    assert course(3, 60.0, 50.0) == course(3, 60.0, 50.0)
    assert course(3, 60.0, 50.0) != course(4, 60.0, 50.0)


def test_a_long_soak_plays_every_class_that_the_cluster_can_play() -> None:
    played = {fault.kind for fault in course(1, 600.0, 50.0).faults}
    assert played == set(FaultClass) - {FaultClass.CORRUPTION, FaultClass.TAKEN}


def test_faults_are_on_places_that_are_there_and_leave_a_calm_beginning_and_end() -> None:
    found = course(1, 600.0, 50.0)
    for fault in found.faults:
        assert CALM_SECONDS <= fault.at <= found.seconds - CALM_SECONDS
        assert fault.slot in (range(PLACES) if fault.kind not in OF_THE_CLUSTER else (-1,))


def test_of_the_whole_cluster_one_thing_happens_at_once() -> None:
    free = 0.0
    for fault in course(1, 1200.0, 50.0).faults:
        if fault.kind in {FaultClass.RESIZE, *OF_THE_CLUSTER}:
            assert fault.at >= free
            free = fault.at + fault.lasts


# --- curve and samples ----------------------------------------------------------------------------------------------


def test_a_curve_is_wrong_where_it_differs_or_misses_steps() -> None:
    calm = {1: 5.0, 2: 4.0, 3: 3.0}
    assert list(wrong_curve({1: 5.0, 2: 4.0 * (1 + 5e-6)}, calm)) == []
    assert "at step 2" in " ".join(wrong_curve({1: 5.0, 2: 4.001}, calm))
    assert "missing" in " ".join(wrong_curve({1: 5.0, 3: 3.0}, calm))
    assert "differs" in " ".join(wrong_curve({1: float("nan")}, calm))


def test_a_sample_that_was_seen_twice_or_never_is_told(tmp_path: Path) -> None:
    for rank, samples in (("0", [4, 1]), ("1", [2, 2])):
        (tmp_path / f"samples-{rank}.jsonl").write_text(json.dumps({"step": 1, "samples": samples}) + "\n{torn")
    seen = samples_of(tmp_path)
    assert seen == {1: [1, 2, 2, 4]}
    assert list(wrong_samples(seen, {1: [1, 2, 2, 4]}, 1)) == []
    assert len(list(wrong_samples(seen, {1: [1, 2, 3, 4]}, 1))) == 1
    assert len(list(wrong_samples({}, {1: [1]}, 1))) == 1


# --- leaks ----------------------------------------------------------------------------------------------------------


def census(*processes: Process, at: float = 0.0, **more: Any) -> Census:
    return replace(Census(at, processes, 0, 0, 0), **more)


def process(role: str = "operator", **more: Any) -> Process:
    return replace(Process(7, 1.0, role, 100.0, 20, 10, 5), **more)


def looks(count: int, **slope: float) -> list[Census]:
    """A process that has so much more at each look."""
    first = process()
    return [
        census(
            process(**{name: getattr(first, name) + each * number for name, each in slope.items()}), at=20.0 * number
        )
        for number in range(count)
    ]


def test_nothing_left_and_nothing_grown_is_no_leak() -> None:
    assert list(wrong_leftovers(census(process()), census(process(pid=8)))) == []
    assert list(wrong_growth(looks(40))) == []


@pytest.mark.parametrize(
    ("what", "slope"), [("MB", {"megabytes": 2.0}), ("sockets", {"sockets": 1}), ("files", {"files": 1})]
)
def test_what_grows_steadily_is_told(what: str, slope: dict[str, float]) -> None:
    assert what in " ".join(wrong_growth(looks(60, **slope)))


def agents(*sockets: Callable[[int], float], count: int = 60) -> list[Census]:
    """Agents of one job with so many sockets at each look."""

    def look(number: int) -> Census:
        those = (process("agent", pid=pid, sockets=int(of(number))) for pid, of in enumerate(sockets))
        return census(*those, at=20.0 * number)

    return [look(number) for number in range(count)]


def test_a_spare_that_takes_over_what_another_agent_held_has_not_grown() -> None:
    took_over = agents(lambda _: 26, lambda number: 7 if number < 40 else 26)
    assert list(wrong_growth(took_over)) == []


@pytest.mark.parametrize("of", [lambda number: 26 + number / 2, lambda number: 7 if number < 40 else 46])
def test_an_agent_that_has_more_than_any_before_has_grown(of: Callable[[int], float]) -> None:
    assert "sockets" in " ".join(wrong_growth(agents(lambda _: 26, of)))


def test_agents_that_all_grow_have_grown() -> None:
    assert len(list(wrong_growth(agents(*[lambda number: 7 + number] * 3)))) == 3


def test_a_process_that_was_seen_a_few_times_is_not_judged() -> None:
    assert list(wrong_growth(looks(LEAST_LOOKS - 1, megabytes=50.0))) == []


def test_growth_of_the_programs_of_kubernetes_is_not_judged() -> None:
    grown = [census(process("API server", megabytes=100.0 + 10 * number), at=20.0 * number) for number in range(60)]
    assert list(wrong_growth(grown)) == []


def test_whatever_is_left_is_told() -> None:
    before = census(process(), objects={"pods": 0, "secrets": 1})
    after = census(
        process(sockets=40),
        process("agent", pid=9),
        objects={"pods": 2, "secrets": 1},
        shared_memory=3,
        node_files=400,
    )
    told = " ".join(wrong_leftovers(before, after))
    for part in ("(agent)", "2 pods", "3 entries of /dev/shm", "400 more files", "40 sockets"):
        assert part in told
    assert "secrets" not in told


def test_a_folder_of_the_job_that_only_grows_is_told() -> None:
    assert "folder" in " ".join(wrong_job_files([census(job_files=100 + 5 * number) for number in range(60)]))
    assert list(wrong_job_files([census(job_files=100 + number % 7) for number in range(60)])) == []


def test_a_process_is_known_by_its_program_not_by_a_path_in_its_arguments() -> None:
    assert role_of(["/cache/trainium-operator/bin/etcd", "--data-dir=/x"]) == "etcd"
    assert role_of(["/venv/bin/python", "/venv/bin/trainium-agent"]) == "agent"
    assert role_of(["python3.11", "-m", "trainium_devcluster.node", "--name=a"]) == "node runtime"
    assert role_of([]) == "nameless"


# --- beside the simulator -------------------------------------------------------------------------------------------


def made_by_the_simulator() -> SoakResult:
    """What a soak would find on a cluster that is as the simulator thinks."""
    played = course(3, 20.0, 60.0)
    stages = StageTimes(step_seconds=0.5, restart_seconds=0.9, load_memory_seconds=0.3, rendezvous_seconds=0.0)
    moments = {"begin": 50.0, "half": played.half, "end": played.seconds}
    outcomes = {name: simulated(played, stages, AS_IT_IS, at) for name, at in moments.items()}
    history = [
        {
            "generation": number,
            "time": "2030-01-01T00:00:00Z",
            "cause": each.cause,
            "rung": each.rung,
            "failedAt": ZERO + each.at,
            "recoveredSeconds": each.seconds,
            "detectedSeconds": each.stages.get("Detect", 0.0),
            "stepsLost": each.steps_lost,
            "stages": {name.lower(): seconds for name, seconds in each.stages.items()},
        }
        for number, each in enumerate(outcomes["end"].recoveries)
        if each.seconds is not None
    ]
    return SoakResult(
        seed=3,
        minutes=20.0,
        faults_per_hour=60.0,
        commit="abc",
        zero=ZERO,
        moments=moments,
        ledgers={name: ledger_of(outcome) for name, outcome in outcomes.items()},
        history=history,
        played=[],
        silences={"OperatorLost": [[100.0, 9.0]]},
        pods=[[100.0, 5.5]],
        returns=[],
        steps=4000,
        worst_difference=1e-7,
    )


@pytest.fixture(scope="module")
def soaked() -> SoakResult:
    return made_by_the_simulator()


def test_the_simulator_agrees_with_itself_when_it_learns_from_the_first_half(soaked: SoakResult) -> None:
    found = compare(soaked)

    assert found.simulated["second half"].strict == pytest.approx(found.measured["second half"].strict, rel=0.03)
    often = [row for row in found.medians if min(row.times) >= 2]
    assert often
    for row in often:
        assert row.off == pytest.approx(0.0, abs=0.2), row


def test_nothing_of_the_second_half_is_learnt_from(soaked: SoakResult) -> None:
    spoilt = [
        entry if entry["failedAt"] < ZERO + soaked.moments["half"] else {**entry, "stages": {"restart": 500.0}}
        for entry in soaked.history
    ]
    assert learned(replace(soaked, history=spoilt)) == learned(soaked)


def test_how_long_a_worker_takes_to_join_is_told_by_the_growth_after_a_resize(soaked: SoakResult) -> None:
    asked = {"kind": "Resize", "at": 100.0}
    history = [{"cause": "Resize", "failedAt": ZERO + at} for at in (100.0, 157.0, 190.0)]
    assert replace(soaked, played=[asked], history=history).joining() == [[145.0, 12.0]]
    assert replace(soaked, played=[asked], history=history[:1]).joining() == []


def test_a_median_that_one_side_lacks_is_shown_and_not_judged(soaked: SoakResult) -> None:
    measured = recovered_from(soaked.history, ZERO)
    found = rows(measured, [])
    assert all(row.off is None and row.simulated is None for row in found)
    assert sum(row.times[0] for row in found) == len(measured)
    assert len(recovered_of(simulated(course(3, 20.0, 60.0), StageTimes(), AS_IT_IS, 60.0))) == 0


def test_a_window_is_what_came_between_two_looks() -> None:
    window = Window.between(
        {"productiveSeconds": 10.0, "wallSeconds": 20.0}, {"productiveSeconds": 100.0, "wallSeconds": 120.0}
    )
    assert window.strict == pytest.approx(0.9)


def test_what_a_machine_takes_longer_is_added_to_what_it_brings_back() -> None:
    slow = Slowness(operator_seconds=30.0, node_seconds=4.0)
    lasts = {kind: slow.of(Fault(at=0.0, slot=0, kind=kind, lasts=10.0)).lasts for kind in FaultClass}
    assert lasts[FaultClass.OPERATOR_LOST] == 30.0
    assert lasts[FaultClass.NODE_LOST] == lasts[FaultClass.RACK] == 14.0
    assert lasts[FaultClass.STRAGGLER] == lasts[FaultClass.RESIZE] == 10.0


def test_a_result_is_read_back_and_the_table_goes_between_its_markers(soaked: SoakResult, tmp_path: Path) -> None:
    soaked.save(tmp_path / "soak.json")
    result = SoakResult.load(tmp_path / "soak.json")
    document = tmp_path / "page.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_document(result, document)
    text = document.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    assert text.count("strict goodput, second half") == 1


def test_a_page_without_markers_is_refused(soaked: SoakResult, tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("nothing\n")
    with pytest.raises(ValueError, match="must have the lines"):
        write_document(soaked, document)
