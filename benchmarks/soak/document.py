"""The table of docs/goodput.md: a soak beside the simulator on the same schedule; made from the kept result alone."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import yaml

from benchmarks.soak.compare import (
    GOODPUT_ALLOWED,
    MEDIAN_ALLOWED,
    Row,
    Slowness,
    Window,
    ledger_of,
    recovered_from,
    recovered_of,
    rows,
    simulated,
)
from benchmarks.soak.course import MODEL, Course, course
from trainium_simulator.stages import StageTimes, learn_stages
from trainium_simulator.virtual.failures import FaultClass

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.soak.result import SoakResult

BEGIN, END = "<!-- soak: begin, written by python -m benchmarks.soak -->", "<!-- soak: end -->"


class Comparison(NamedTuple):
    """Both sides of one soak."""

    course: Course
    stages: StageTimes
    measured: dict[str, Window]
    simulated: dict[str, Window]
    medians: list[Row]


def compare(result: SoakResult) -> Comparison:
    """Learn from the first half, simulate it all, judge the second."""
    played = course(result.seed, result.minutes, result.faults_per_hour)
    stages = learned(result)
    longer = slowness(result, stages)
    outcomes = {name: simulated(played, stages, longer, at) for name, at in result.moments.items()}
    half = result.moments["half"]
    return Comparison(
        course=played,
        stages=stages,
        measured=_windows(result.ledgers),
        simulated=_windows({name: ledger_of(outcome) for name, outcome in outcomes.items()}),
        medians=rows(
            [each for each in recovered_from(result.history, result.zero) if each.at >= half],
            [each for each in recovered_of(outcomes["end"]) if each.at >= half],
        ),
    )


def learned(result: SoakResult) -> StageTimes:
    """The stages as `simulate --learn-from` takes them.

    Besides what no ledger tells: how long new workers took to join, and agents to find an API server that is back.
    """
    base = StageTimes()
    silences = result.silences.get(FaultClass.API_OUTAGE.value, [])
    starting = result.median_of(result.joining(), base.pod_seconds + base.warm_seconds)
    given = {
        "reconnectSeconds": result.median_of(silences, base.reconnect_seconds),
        "podSeconds": min(base.pod_seconds, starting),
        "warmSeconds": max(0.0, starting - base.pod_seconds),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "first-half.yaml"
        path.write_text(yaml.safe_dump(result.first_half()), encoding="utf-8")
        return learn_stages(path, base.replaced_by(given))


def slowness(result: SoakResult, stages: StageTimes) -> Slowness:
    """What this machine took, in the first half, to bring back an operator and a node."""
    silences = result.silences.get(FaultClass.OPERATOR_LOST.value, [])
    lost = result.median_of(silences, MODEL.operator_seconds + stages.reconnect_seconds)
    return Slowness(
        operator_seconds=max(0.0, lost - stages.reconnect_seconds), node_seconds=result.median_of(result.returns, 0.0)
    )


def _windows(ledgers: dict[str, dict[str, object]]) -> dict[str, Window]:
    return {
        "first half": Window.between(ledgers["begin"], ledgers["half"]),
        "second half": Window.between(ledgers["half"], ledgers["end"]),
    }


def print_comparison(result: SoakResult) -> None:
    """For a person at a terminal."""
    for line in lines(result):
        print(line)


def write_document(result: SoakResult, path: Path) -> None:
    """Put the table between its markers. Raises ValueError where they are not."""
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} must have the lines {BEGIN!r} and {END!r}")
    path.write_text("\n".join((before + BEGIN, "", *lines(result), "", END + after)), encoding="utf-8")


def lines(result: SoakResult) -> Iterator[str]:
    """The section, line by line."""
    found = compare(result)
    interruptions = len(recovered_from(result.history, result.zero))
    wrong = "wrong is: " + "; ".join(result.wrong) if result.wrong else "nothing else is wrong"
    yield (
        f"{result.minutes:g} minutes, seed {result.seed}, at {result.commit}: {len(found.course.faults)} faults, "
        f"{interruptions} interruptions, {result.steps:,} steps. The curve is within {result.worst_difference:.1e} of "
        f"that of an undisturbed run; {wrong}."
    )
    yield ""
    yield "| | measured | simulated | | |"
    yield "|---|---|---|---|---|"
    for name, measured in found.measured.items():
        other = found.simulated[name].strict
        off = other / measured.strict - 1 if measured.strict else 0.0
        judged = "learned from" if name == "first half" else _word(abs(off) <= GOODPUT_ALLOWED)
        yield f"| strict goodput, {name} | {measured.strict:.2%} | {other:.2%} | {off:+.1%} | {judged} |"
    for row in found.medians:
        yield _line(row)


def _line(row: Row) -> str:
    times = f"{row.times[0]} and {row.times[1]} times"
    measured, simulated = (f"{each:.2f} s" if each is not None else "" for each in (row.measured, row.simulated))
    off = "" if row.off is None else f"{row.off:+.0%}"
    judged = "" if row.off is None else _word(abs(row.off) <= MEDIAN_ALLOWED)
    return f"| {row.kind} ({times}) | {measured} | {simulated} | {off} | {judged} |"


def _word(good: bool) -> str:
    return "within" if good else "**outside**"
