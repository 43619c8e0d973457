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

from trainium_contract.command_line import describe_usage_error
from trainium_contract.exit_codes import ExitCode
from trainium_contract.spec.workers import MAX_NODES
from trainium_simulator.errors import InputError, describe_errors
from trainium_simulator.job import build_spec, parse_variation, read_job
from trainium_simulator.report import draw_picture, print_report, report_document
from trainium_simulator.stages import StageTimes, learn_stages, read_stages, read_yaml
from trainium_simulator.study import Case, run_study
from trainium_simulator.virtual.failures import FailureModel, Mix
from trainium_simulator.virtual.schedule import read_trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_DAYS = 366.0
MAX_CASES = 200

_NAME = "trainium-operator simulate"
app = typer.Typer(
    name=_NAME,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_OptionalPath = Path | None


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
        _OptionalPath, typer.Option(help="CSV of faults: seconds,class,node[,duration]; in place of rates.")
    ] = None,
    stages: Annotated[_OptionalPath, typer.Option(help="YAML with the seconds of the stages of a recovery.")] = None,
    learn_from: Annotated[_OptionalPath, typer.Option(help="A job with its status, to take the stages from.")] = None,
    model: Annotated[_OptionalPath, typer.Option(help="YAML that changes the failure model.")] = None,
    mix: Annotated[Mix, typer.Option(help="Which causes the failures have.")] = Mix.AUTO,
    vary: Annotated[list[str] | None, typer.Option(help="FIELD=VALUE,VALUE: fields of the spec to try.")] = None,
    goal: Annotated[float | None, typer.Option(help="Strict goodput to judge by, for instance 0.999.")] = None,
    price: Annotated[float | None, typer.Option("--price-per-node-hour", help="Also costs, in your currency.")] = None,
    output: Annotated[str, typer.Option("--output", "-o", help="table or json")] = "table",
    picture: Annotated[_OptionalPath, typer.Option(help="Also draw a picture (PNG).")] = None,
) -> None:
    """Simulate a job with the operator's own plan: goodput, where the time goes, what each spare buys."""
    _validate(days, seeds, goal, output, idle_nodes, price)
    raw_spec = read_job(job)
    learned_stages = StageTimes() if learn_from is None else learn_stages(learn_from, StageTimes())
    cases = tuple(
        _build_cases(
            job,
            raw_spec,
            tuple(map(parse_variation, vary or ())),
            nodes=nodes,
            spares=parse_counts(spares) if spares else (None,),
            rates=parse_rates(failures) if trace is None else (0.0,),
            trace=trace,
            stages=learned_stages if stages is None else read_stages(stages, learned_stages),
            model=FailureModel() if model is None else read_failure_model(model),
            mix=mix,
            days=days,
            shared_nodes=idle_nodes,
        )
    )
    # Plans create many short-lived objects and no cycles, so the collector would find nothing.
    gc.set_threshold(100_000, 20, 20)
    seed_count = 1 if trace is not None else seeds
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("simulating", total=len(cases) * seed_count)
        results = [run_study(case, seed_count, on_seed_done=lambda: progress.advance(task)) for case in cases]
    if output == "json":
        typer.echo(json.dumps(report_document(results, goal=goal, price=price), indent=2))
    else:
        print_report(Console(width=None if sys.stdout.isatty() else 150), results, goal=goal, price=price)
    if picture is not None:
        draw_picture(picture, results)


def _build_cases(
    job_path: Path,
    raw_spec: dict[str, Any],
    variations: Sequence[tuple[str, Sequence[Any]]],
    *,
    nodes: int | None,
    spares: Sequence[int | None],
    rates: Sequence[float],
    trace: Path | None,
    **common: Any,
) -> Iterator[Case]:
    """Yield a case for each combination of changed fields, rate and spares; all share the values in `common`."""
    count = math.prod(len(values) for _, values in variations) * len(rates) * len(spares)
    if count > MAX_CASES:
        raise InputError(f"these are {count} cases, more than {MAX_CASES}: give fewer spares, rates or values")
    for changes in itertools.product(*([(field_path, value) for value in values] for field_path, values in variations)):
        for rate, spare_count in itertools.product(rates, spares):
            spec = build_spec(job_path, raw_spec, nodes=nodes, spares=spare_count, changes=dict(changes))
            slots = spec.workers.replicas + spec.workers.spares + common["shared_nodes"]
            faults = None if trace is None else read_trace(trace, slots=slots, model=common["model"])
            variation = ", ".join(f"{field_path}={value}" for field_path, value in changes)
            yield Case(spec=spec, rate=rate, trace=faults, variation=variation, **common)


def _validate(days: float, seeds: int, goal: float | None, output: str, idle_nodes: int, price: float | None) -> None:
    if not 0 < days <= MAX_DAYS:
        raise InputError(f"--days must be above 0 and at most {MAX_DAYS:g}, not {days:g}")
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


def read_failure_model(path: Path) -> FailureModel:
    """Return the failure model with the changes of a YAML file. Raises InputError."""
    document = read_yaml(path)
    try:
        return FailureModel.model_validate({} if document is None else document)
    except ValidationError as error:
        known_fields = ", ".join(sorted(field.alias or name for name, field in FailureModel.model_fields.items()))
        raise InputError(f"{path}: {describe_errors(error)}. Known are {known_fields}") from error


def parse_counts(text: str) -> tuple[int, ...]:
    """Parse `2`, `0,2,4` or `0..4`. Raises InputError."""
    counts: list[int] = []
    for part in text.split(","):
        first, dots, last = part.strip().partition("..")
        try:
            counts += range(int(first), int(last) + 1) if dots else [int(first)]
        except ValueError as error:
            raise InputError(f"--spares must be like 2, 0,2,4 or 0..4, not {text!r}") from error
    if not counts or min(counts) < 0:
        raise InputError(f"--spares must be 0 or more, and a range must ascend: {text!r}")
    return tuple(dict.fromkeys(counts))


def parse_rates(text: str) -> tuple[float, ...]:
    """Parse `4,22`. Raises InputError."""
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(f"--failures-per-1000-node-days must be numbers such as 4,22, not {text!r}") from error
    if any(not 0 <= rate <= 100_000 for rate in rates):
        raise InputError(f"--failures-per-1000-node-days must be from 0 to 100,000, not {text!r}")
    return rates


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    try:
        app(args=list(arguments), prog_name=_NAME, standalone_mode=False)
    except InputError as error:
        typer.echo(f"error: {error}", err=True)
        return int(ExitCode.USER_ERROR)
    except typer.Exit as request:
        return request.exit_code
    except typer.Abort:
        return 130
    except Exception as error:
        sentence = describe_usage_error(error, _NAME)
        if sentence is None:
            raise
        typer.echo(f"error: {sentence}", err=True)
        return int(ExitCode.USER_ERROR)
    return 0
