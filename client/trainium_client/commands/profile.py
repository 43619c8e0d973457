"""`profile`: traces of some steps of a running job, without a restart."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainium_client.commands.inspect import MAX_POLLED_WORKERS, SHOW_RANKS
from trainium_client.commands.options import JobName, Session, notify
from trainium_client.pod_exec import call_concurrently, parse_json_lines, query_pods, run_in_pod
from trainium_client.read import read_members
from trainium_contract.api_server.errors import ClientError
from trainium_contract.views.raw import read_integer, read_text, strip_control_characters
from trainium_contract.views.status_reader import read_public_status
from trainium_contract.views.trace import (
    Trace,
    TraceSummary,
    format_summaries,
    merge_traces,
    parse_trace,
    summarize_trace,
)
from trainium_contract.views.workers import build_rank_rows
from trainium_contract.views.workload import read_workload

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainium_client.api import Api
    from trainium_contract.views.workers import Members, RankRow

_REQUEST_PROFILE = ("python", "-m", "trainium_agent.request_profile")
_START_DELAY_SECONDS = 3.0
"""Delay of the first recorded step, so that the request reaches all ranks in time."""
_TIMEOUT_SECONDS = 180.0
_MAX_RANKS = 16


@dataclass(frozen=True, slots=True)
class RecordedRank:
    """A rank with its trace."""

    rank: int
    pod: str
    node: str
    stored: str
    """Path or URI of the trace in the job's storage."""
    summary: TraceSummary


def profile(
    session: Session,
    name: JobName,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to record, at most 20.")] = 3,
    ranks: Annotated[
        str | None, typer.Option("--ranks", help="Ranks, such as 0,3; default: the slowest one and another.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="File for the trace of these ranks; has a default.")
    ] = None,
) -> None:
    """Record steps of a running job: the largest spans, and a trace for ui.perfetto.dev; training continues."""
    from trainium_contract.trainer.monitor import MAX_PROFILED_STEPS  # noqa: PLC0415 - no other command needs pydantic

    if steps > MAX_PROFILED_STEPS:
        raise ClientError(f"--steps is {steps}: at most {MAX_PROFILED_STEPS} steps are recorded at once")
    api = session.open()
    job = api.read_job(name)
    phase = read_public_status(job).read_text("phase")
    if not read_workload(job).has_tools:
        raise ClientError(
            f"{name} runs spec.program, whose steps are not the trainer's: record them in the program with "
            f"torch.profiler; `kubectl trn stacks {name}` shows what its ranks execute"
        )
    if phase in {"Completed", "Failed"}:
        raise ClientError(f"{name} is {phase}: only the steps of a job that trains can be recorded")
    members = read_members(api, name)
    requested = _parse_ranks(ranks, members, name) if ranks else None
    pods = [row.pod for row in members.rows[:MAX_POLLED_WORKERS]]
    if requested is not None:
        pods = list(dict.fromkeys(_find_pod(members, rank) for rank in requested))
    responses = query_pods(api, pods, ("python", *SHOW_RANKS))
    rows = [
        row for row in build_rank_rows(members, responses, read_public_status(job), time.time()) if row.pod in responses
    ]
    selected = [row for row in rows if row.rank in requested] if requested is not None else _choose_ranks(rows)
    for row in selected:
        if row.step is None:
            raise ClientError(f"rank {row.rank} in {row.pod} is not training now: {row.note or row.phase or 'no rank'}")
    first = _choose_first_step(selected, responses, steps, name)
    step_seconds = max(row.step_seconds or 0.0 for row in selected)
    label = f"steps {first} to {first + steps - 1}" if steps > 1 else f"step {first}"
    notify(f"recording {label} of rank{'s' * (len(selected) > 1)} {', '.join(str(row.rank) for row in selected)}")
    recorded, traces = _record_ranks(
        api, selected, members, first, steps, timeout_seconds=_TIMEOUT_SECONDS + 8 * steps * step_seconds
    )
    path = file or Path(f"{name}-steps-{first}-{first + steps - 1}.json.gz")
    stored = ", ".join(recorded_rank.stored for recorded_rank in recorded)
    try:
        path.write_bytes(merge_traces(traces))
    except OSError as error:
        raise ClientError(f"cannot write {path}: {error.strerror or error}; the traces are in {stored}") from error

    def page(value: Sequence[RecordedRank], _now: float, _width: int) -> Any:
        from rich.text import Text  # noqa: PLC0415 - each form loads what it needs

        return Text("\n".join(format_summaries([recorded_rank.summary for recorded_rank in value])))

    session.print_result(recorded, page)
    notify(f"{path} opens in https://ui.perfetto.dev; in the job's storage: {stored}")


def _parse_ranks(text: str, members: Members, name: str) -> set[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts) or len(parts) > _MAX_RANKS:
        raise ClientError(f"--ranks {text}: give up to {_MAX_RANKS} ranks, such as 0,3")
    ranks = {int(part) for part in parts}
    absent = sorted(rank for rank in ranks if rank >= members.rank_count)
    if absent:
        raise ClientError(f"there is no rank {absent[0]}: {name} has ranks 0 to {members.rank_count - 1}")
    return ranks


def _find_pod(members: Members, rank: int) -> str:
    row = members.find_by_rank(rank)
    return "" if row is None else row.pod


def _choose_ranks(rows: Sequence[RankRow]) -> list[RankRow]:
    """Return the slowest rank and the fastest one on another worker, if there is any."""
    candidates = [row for row in rows if row.step is not None] or list(rows)
    others = [row for row in candidates if row.pod != candidates[0].pod] or candidates[1:]
    return [candidates[0], *others[-1:]]


def _choose_first_step(rows: Sequence[RankRow], responses: Mapping[str, Any], steps: int, name: str) -> int:
    """Return the first step to record: a few seconds ahead, and early enough before the end of the run."""
    newest = max(row.step or 0 for row in rows)
    step_seconds = max((row.step_seconds for row in rows if row.step_seconds), default=1.0)
    total = max(read_integer(record, "total_steps") for row in rows for record in responses[row.pod])
    if newest + steps > total:
        raise ClientError(
            f"{name} has completed step {newest} of {total}: --steps {steps} is more than the {max(0, total - newest)} "
            "that are left"
        )
    return min(newest + 1 + max(2, math.ceil(_START_DELAY_SECONDS / step_seconds)), total - steps + 1)


def _record_ranks(
    api: Api, rows: Sequence[RankRow], members: Members, first: int, steps: int, *, timeout_seconds: float
) -> tuple[list[RecordedRank], list[Trace]]:
    """Record on all ranks at once and fetch the traces. Raises ClientError if no rank recorded."""
    rows_by_rank = {str(row.rank): row for row in rows}

    def record_rank(rank: str) -> tuple[str, Trace]:
        pod, local = rows_by_rank[rank].pod, int(rank) % members.processes_per_node
        command = (*_REQUEST_PROFILE, str(local), str(first), str(steps))
        response = next(iter(parse_json_lines(run_in_pod(api, pod, command, timeout_seconds=timeout_seconds))), {})
        path = read_text(response, "file")
        if not path:
            raise ClientError(read_text(response, "problem") or "it did not respond")
        try:
            return read_text(response, "stored"), parse_trace(run_in_pod(api, pod, ("cat", path)).out)
        except ValueError as error:
            raise ClientError(f"the trace {path} cannot be read: {error}") from error

    results = call_concurrently(list(rows_by_rank), record_rank)
    problems = {rank: result for rank, result in results.items() if isinstance(result, str)}
    sentences = [
        f"rank {rank} in {rows_by_rank[rank].pod}: {strip_control_characters(problem)}"
        for rank, problem in problems.items()
    ]
    if len(problems) == len(results):
        raise ClientError(sentences[0])
    for sentence in sentences:
        notify(sentence)
    recorded, traces = [], []
    for rank, result in results.items():
        if rank not in problems:
            row, (stored, trace) = rows_by_rank[rank], result
            traces.append(trace)
            recorded.append(RecordedRank(row.rank, row.pod, row.node, stored, summarize_trace(trace)))
    return recorded, traces
