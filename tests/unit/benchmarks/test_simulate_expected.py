"""The pages that the simulator's figures stand on: commands that it takes, goals that are judged by the interval."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.simulate import expected, sweeps
from trainium_operator.simulate.command import main
from trainium_operator.simulate.job import make_spec, parse_variation, read_job

ROOT = Path(__file__).parents[3]

COMMANDS = {table.name: table.arguments for table in expected.tables(20)} | {
    # One value: each other is one more simulation like it.
    sweep.field: sweeps.arguments(replace(sweep, values=sweep.values[-1:], spares="2"), 10)
    for sweep in sweeps.SWEEPS
}


def result(mean: float, margin: float, *, nodes: int = 128, spares: int = 2, rate: float = 22.0) -> dict[str, object]:
    figure = {"mean": mean, "margin95": margin}
    shared = {"strict": figure, "uptime": figure, "work": figure, "worstDay": mean, "days": 30.0, "seeds": 20}
    return {"nodes": nodes, "spares": spares, "failuresPer1000NodeDays": rate, **shared}


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_the_simulator_takes_each_command(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    short = [*arguments, "--days", "0.005", "--seeds", "1", "--output", "json"]
    assert main(short) == 0
    assert '"strict"' in capsys.readouterr().out


@pytest.mark.parametrize("sweep", sweeps.SWEEPS, ids=lambda sweep: sweep.field)
def test_each_value_of_a_sweep_makes_a_job(sweep: sweeps.Sweep) -> None:
    job = ROOT / sweeps.arguments(sweep, 1)[0]
    place, values = parse_variation(f"{sweep.field}={','.join(sweep.values)}")
    specs = [make_spec(job, read_job(job), nodes=None, spares=2, changes={place: value}) for value in values]
    assert len(specs) == len(sweep.values)
    assert len({spec.model_dump_json() for spec in specs}) == len(specs)


def test_a_goal_is_reached_when_the_whole_interval_is_above_it() -> None:
    assert expected.row("trn1", result(0.9980, 0.0005)).endswith("| 99.7 %, reached |")
    assert expected.row("trn1", result(0.9971, 0.0005)).endswith("| 99.7 %, mean reaches it |")
    assert expected.row("trn1", result(0.9969, 0.0005)).endswith("| 99.7 %, missed |")
    assert expected.row("trn1", result(0.9969, 0.0005, spares=0)).endswith("|  |")
    assert expected.row("trn1", result(0.9949, 0.0, nodes=1000, spares=8)).endswith("| 99.5 %, missed |")


def test_the_page_has_a_place_for_the_table_and_keeps_what_is_around_it() -> None:
    page = expected.PAGE.read_text(encoding="utf-8")
    part = expected.section([expected.row("trn1", result(0.998, 0.001))])
    renewed = expected.placed(page, part)
    assert part in renewed
    assert expected.placed(renewed, part) == renewed
    assert renewed.partition(expected.BEGIN)[0] == page.partition(expected.BEGIN)[0]
    assert renewed.partition(expected.END)[2] == page.partition(expected.END)[2]
    with pytest.raises(ValueError, match="lacks"):
        expected.placed("nothing here", part)
