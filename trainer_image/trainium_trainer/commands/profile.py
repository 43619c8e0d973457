"""Show where the recorded steps of a trace went: `trainium-trainer profile`."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated

import typer

from trainium_contract.views.trace import format_summaries, merge_traces, parse_trace, summarize_trace
from trainium_trainer.exits import UserError


def profile(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Traces, such as steps-3-5-rank-0.json.gz.")],
    *,
    merge: Annotated[
        Path | None, typer.Option("--merge", help="Write one trace of all ranks for ui.perfetto.dev.")
    ] = None,
) -> None:
    """Print the ten largest spans of recorded steps; of two ranks with their difference."""
    traces = []
    for path in files:
        try:
            traces.append(parse_trace(path.read_bytes()))
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}): name a trace of monitor.profile") from error
        except ValueError as error:
            raise UserError(f"{path} is no trace that can be read: {error}") from error
    typer.echo("\n".join(format_summaries([summarize_trace(trace) for trace in traces])))
    if merge is not None:
        try:
            merge.write_bytes(merge_traces(traces))
        except OSError as error:
            raise UserError(f"{merge} cannot be written ({error.strerror}): name another file") from error
