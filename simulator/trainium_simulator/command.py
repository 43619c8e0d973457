"""Run `trainium-operator simulate`: the expected goodput of a job, and the gain of each spare.

All input is checked before the first simulation starts, and refused with a sentence and exit code 64.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import Progress

from trainium_contract.exit_codes import ExitCode
from trainium_contract.spec.workers import MAX_NODES
from trainium_simulator.errors import InputError, describe_errors
from trainium_simulator.job import make_spec, parse_variation, read_job
from trainium_simulator.report import document, draw_picture, show
from trainium_simulator.stages import StageTimes, learn_stages, read_stages, read_yaml
from trainium_simulator.study import Case, study
from trainium_simulator.virtual.failures import FailureModel, Mix
from trainium_simulator.virtual.schedule import read_trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MOST_DAYS = 366.0
MOST_CASES = 200

app = typer.Typer(name="trainium-operator simulate", add_completion=False, pretty_exceptions_enable=False)

_File = Path | None


@app.command()
def simulate(
    job: Annotated[Path, typer.Argument(help="The manifest of a TrainingJob.", show_default=False)],
    nodes: Annotated[int | None, typer.Option(help="Nodes that train; default: the job's replicas.")] = None,
    spares: Annotated[str, typer.Option(help="Spares to try: 2, 0,2,4 or 0..4; default: the job's.")] = "",
    idle_nodes: Annotated[
        int, typer.Option(help="Nodes beside those that others use half of the time; for elasticity.idleNodes.")
    ] = 0,
    failures: Annotated[
        str, typer.Option("--failures-per-1000-node-days", help="Rates to try (docs/simulate.md).")
    ] = "4,22",
    days: Annotated[float, typer.Option(help="Days to simulate.")] = 30.0,
    seeds: Annotated[int, typer.Option(help="Simulations of each case.")] = 20,
    trace: Annotated[
        _File, typer.Option(help="CSV of faults: seconds,class,node[,duration]; in place of rates.")
    ] = None,
    stages: Annotated[_File, typer.Option(help="YAML with the seconds of the stages of a recovery.")] = None,
    learn_from: Annotated[_File, typer.Option(help="A job with its status, to take the stages from.")] = None,
    model: Annotated[_File, typer.Option(help="YAML that changes the failure model.")] = None,
    mix: Annotated[Mix, typer.Option(help="Which causes the failures have.")] = Mix.AUTO,
    vary: Annotated[list[str] | None, typer.Option(help="FIELD=VALUE,VALUE: fields of the spec to try.")] = None,
    goal: Annotated[float | None, typer.Option(help="Strict goodput to judge by, for instance 0.999.")] = None,
    price: Annotated[float | None, typer.Option("--price-per-node-hour", help="Also costs, in your currency.")] = None,
    output: Annotated[str, typer.Option("--output", "-o", help="table or json")] = "table",
    picture: Annotated[_File, typer.Option(help="Also draw a picture (PNG).")] = None,
) -> None:
    """Simulate a job's month with the operator's own plan: goodput, where the time goes, what each spare buys."""
    _check(days, seeds, goal, output, idle_nodes, price)
    raw = read_job(job)
    times = StageTimes() if learn_from is None else learn_stages(learn_from, StageTimes())
    cases = tuple(
        _cases(
            job,
            raw,
            tuple(map(parse_variation, vary or ())),
            nodes=nodes,
            spares=parse_counts(spares) if spares else (None,),
            rates=parse_rates(failures) if trace is None else (0.0,),
            trace=trace,
            stages=times if stages is None else read_stages(stages, times),
            model=FailureModel() if model is None else read_model(model),
            mix=mix,
            days=days,
            shared=idle_nodes,
        )
    )
    # Plans make many short-lived objects and no circles: the collector would only search without effect.
    gc.set_threshold(100_000, 20, 20)
    rounds = 1 if trace is not None else seeds
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("simulating", total=len(cases) * rounds)
        results = [study(case, rounds, done=lambda: bar.advance(task)) for case in cases]
    if output == "json":
        typer.echo(json.dumps(document(results, goal=goal, price=price), indent=2))
    else:
        show(Console(width=None if sys.stdout.isatty() else 150), results, goal=goal, price=price)
    if picture is not None:
        draw_picture(picture, results)


def _cases(
    path: Path,
    raw: dict[str, Any],
    choices: Sequence[tuple[str, Sequence[Any]]],
    *,
    nodes: int | None,
    spares: Sequence[int | None],
    rates: Sequence[float],
    trace: Path | None,
    **same: Any,
) -> Iterator[Case]:
    """Yield a case for each choice of fields, rate and spares; `same`: what all of them have."""
    count = math.prod(len(values) for _, values in choices) * len(rates) * len(spares)
    if count > MOST_CASES:
        raise InputError(f"these are {count} cases, more than {MOST_CASES}: give fewer spares, rates or values")
    for chosen in itertools.product(*([(place, value) for value in values] for place, values in choices)):
        for rate, waiting in itertools.product(rates, spares):
            spec = make_spec(path, raw, nodes=nodes, spares=waiting, changes=dict(chosen))
            places = spec.workers.replicas + spec.workers.spares + same["shared"]
            faults = None if trace is None else read_trace(trace, slots=places, model=same["model"])
            variation = ", ".join(f"{place}={value}" for place, value in chosen)
            yield Case(spec=spec, rate=rate, trace=faults, variation=variation, **same)


def _check(days: float, seeds: int, goal: float | None, output: str, idle_nodes: int, price: float | None) -> None:
    if not 0 < days <= MOST_DAYS:
        raise InputError(f"--days must be above 0 and at most {MOST_DAYS:g}, not {days:g}")
    if not 1 <= seeds <= 10_000:
        raise InputError(f"--seeds must be from 1 to 10,000, not {seeds}")
    if goal is not None and not 0 < goal < 1:
        raise InputError(f"--goal must be between 0 and 1, for instance 0.999, not {goal:g}")
    if price is not None and not 0 <= price < math.inf:
        raise InputError(f"--price-per-node-hour must be 0 or more, not {price:g}")
    if not 0 <= idle_nodes <= MAX_NODES:
        raise InputError(f"--idle-nodes must be from 0 to {MAX_NODES:,}, not {idle_nodes}")
    if output not in ("table", "json"):
        raise InputError(f"--output must be table or json, not {output!r}")


def read_model(path: Path) -> FailureModel:
    """Return the failure model with what a YAML file changes. Raises InputError."""
    document = read_yaml(path)
    try:
        return FailureModel.model_validate({} if document is None else document)
    except ValidationError as error:
        known = ", ".join(sorted(field.alias or name for name, field in FailureModel.model_fields.items()))
        raise InputError(f"{path}: {describe_errors(error)}. Known are {known}") from error


def parse_counts(text: str) -> tuple[int, ...]:
    """`2`, `0,2,4` or `0..4`. Raises InputError."""
    found: list[int] = []
    for part in text.split(","):
        first, dots, last = part.strip().partition("..")
        try:
            found += range(int(first), int(last) + 1) if dots else [int(first)]
        except ValueError as error:
            raise InputError(f"--spares must be like 2, 0,2,4 or 0..4, not {text!r}") from error
    if not found or min(found) < 0:
        raise InputError(f"--spares must be 0 or more, and a range must rise: {text!r}")
    return tuple(dict.fromkeys(found))


def parse_rates(text: str) -> tuple[float, ...]:
    """`4,22`. Raises InputError."""
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(f"--failures-per-1000-node-days must be numbers such as 4,22, not {text!r}") from error
    if any(not 0 <= rate <= 100_000 for rate in rates):
        raise InputError(f"--failures-per-1000-node-days must be from 0 to 100,000, not {text!r}")
    return rates


def main(arguments: Sequence[str]) -> int:
    """TrainingRanks the command; its exit code."""
    try:
        app(args=list(arguments), prog_name="trainium-operator simulate", standalone_mode=False)
    except InputError as error:
        typer.echo(f"trainium-operator simulate: {error}", err=True)
        return int(ExitCode.USER_ERROR)
    except typer.Exit as asked:
        return asked.exit_code
    except typer.Abort:
        return 130
    except Exception as error:
        if hasattr(error, "format_message"):  # click's own: an option that does not exist, a value of no use
            typer.echo(f"trainium-operator simulate: {error.format_message()}", err=True)
            return int(ExitCode.USER_ERROR)
        raise
    return 0
