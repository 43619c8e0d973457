"""`profile`: traces of some steps of a running job, without a restart."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainium_client.commands.options import JobName, Session, notify
from trainium_client.pod_exec import for_each_pod, parse_json_lines, query_pods, run_in_pod
from trainium_client.read import read_members
from trainium_contract.api_server.errors import ClientError
from trainium_contract.views.raw import integer, mapping, plain, text
from trainium_contract.views.status_reader import public_status
from trainium_contract.views.trace import (
    Trace,
    TraceSummary,
    format_summaries,
    merge_traces,
    parse_trace,
    summarize_trace,
)
from trainium_contract.views.workers import build_rank_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainium_client.api import Api
    from trainium_contract.views.workers import Members, RankRow

_RANKS = ("python", "-m", "trainium_agent.show_ranks")
_REQUEST = ("python", "-m", "trainium_agent.request_profile")
_LEAD_SECONDS = 3.0
"""Delay of the first recorded step, so that the request reaches all ranks in time."""
_SLACK_SECONDS = 180.0
_MOST_RANKS = 16
_MOST_WORKERS = 64
"""Most workers that are asked for the slowest rank."""


@dataclass(frozen=True, slots=True)
class RecordedRank:
    """A rank with its trace."""

    rank: int
    pod: str
    node: str
    stored: str
    """File or address of the trace in the job's storage."""
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
    from trainium_contract.trainer.monitor import MOST_PROFILED_STEPS  # noqa: PLC0415 - no other command needs pydantic

    if steps > MOST_PROFILED_STEPS:
        raise ClientError(f"--steps is {steps}: at most {MOST_PROFILED_STEPS} steps are recorded at once")
    api = session.open()
    job = api.job(name)
    phase = public_status(job).text("phase")
    if mapping(mapping(job, "spec"), "program"):
        raise ClientError(
            f"{name} runs spec.program, whose steps are not the trainer's: record them in the program with "
            f"torch.profiler; `kubectl trn stacks {name}` shows what its ranks execute"
        )
    if phase in {"Completed", "Failed"}:
        raise ClientError(f"{name} is {phase}: only the steps of a job that trains can be recorded")
    members = read_members(api, name)
    wanted = _parse_ranks(ranks, members, name) if ranks else None
    pods = [row.pod for row in members.rows[:_MOST_WORKERS]]
    if wanted is not None:
        pods = list(dict.fromkeys(_pod_of(members, rank) for rank in wanted))
    answers = query_pods(api, pods, _RANKS)
    rows = [row for row in build_rank_rows(members, answers, public_status(job), time.time()) if row.pod in answers]
    chosen = [row for row in rows if row.rank in wanted] if wanted is not None else _slowest_and_another(rows)
    for row in chosen:
        if row.step is None:
            raise ClientError(f"rank {row.rank} in {row.pod} is not training now: {row.note or row.phase or 'no rank'}")
    first = _first_step(chosen, answers, steps, name)
    each = max(row.step_seconds or 0.0 for row in chosen)
    about = f"steps {first} to {first + steps - 1}" if steps > 1 else f"step {first}"
    notify(f"recording {about} of rank{'s' * (len(chosen) > 1)} {', '.join(str(row.rank) for row in chosen)}")
    recorded, traces = _record(api, chosen, members, first, steps, seconds=_SLACK_SECONDS + 8 * steps * each)
    path = file or Path(f"{name}-steps-{first}-{first + steps - 1}.json.gz")
    try:
        path.write_bytes(merge_traces(traces))
    except OSError as error:
        raise ClientError(f"cannot write {path}: {error.strerror or error}; the traces are in "
                          f"{', '.join(recorded_rank.stored for recorded_rank in recorded)}") from error  # fmt: skip

    def page(value: Sequence[RecordedRank], _now: float, _width: int) -> Any:
        from rich.text import Text  # noqa: PLC0415 - each form loads what it needs

        return Text("\n".join(format_summaries([recorded_rank.summary for recorded_rank in value])))

    session.print_result(recorded, page)
    notify(f"{path} opens in https://ui.perfetto.dev; in the job's storage: "
           f"{', '.join(recorded_rank.stored for recorded_rank in recorded)}")  # fmt: skip


def _parse_ranks(text: str, members: Members, name: str) -> set[int]:
    parts = text.split(",")
    if not all(word.strip().isdecimal() for word in parts) or len(parts) > _MOST_RANKS:
        raise ClientError(f"--ranks {text}: give up to {_MOST_RANKS} ranks, such as 0,3")
    ranks = {int(word) for word in parts}
    absent = sorted(rank for rank in ranks if rank >= members.ranks)
    if absent:
        raise ClientError(f"there is no rank {absent[0]}: {name} has ranks 0 to {members.ranks - 1}")
    return ranks


def _pod_of(members: Members, rank: int) -> str:
    row = members.of_rank(rank)
    return "" if row is None else row.pod


def _slowest_and_another(rows: Sequence[RankRow]) -> list[RankRow]:
    """Return the slowest rank and the fastest one on another worker, if there is any."""
    known = [row for row in rows if row.step is not None] or list(rows)
    others = [row for row in known if row.pod != known[0].pod] or known[1:]
    return [known[0], *others[-1:]]


def _first_step(rows: Sequence[RankRow], answers: Mapping[str, Any], steps: int, name: str) -> int:
    """Return the first step to record: a few seconds ahead, and early enough before the end of the run."""
    newest = max(row.step or 0 for row in rows)
    step_seconds = max((row.step_seconds for row in rows if row.step_seconds), default=1.0)
    total = max(integer(record, "total_steps") for row in rows for record in answers[row.pod])
    if newest + steps > total:
        raise ClientError(
            f"{name} has completed step {newest} of {total}: --steps {steps} is more than the {max(0, total - newest)} "
            "that are left"
        )
    return min(newest + 1 + max(2, math.ceil(_LEAD_SECONDS / step_seconds)), total - steps + 1)


def _record(
    api: Api, rows: Sequence[RankRow], members: Members, first: int, steps: int, *, seconds: float
) -> tuple[list[RecordedRank], list[Trace]]:
    """Record on all ranks at once and fetch the traces. Raises ClientError if no rank recorded."""
    by_rank = {str(row.rank): row for row in rows}

    def one(rank: str) -> tuple[str, Trace]:
        pod, local = by_rank[rank].pod, int(rank) % members.processes_per_node
        asked = (*_REQUEST, str(local), str(first), str(steps))
        answer = next(iter(parse_json_lines(run_in_pod(api, pod, asked, seconds=seconds))), {})
        path = text(answer, "file")
        if not path:
            raise ClientError(text(answer, "problem") or "it gave no answer")
        try:
            return text(answer, "stored"), parse_trace(run_in_pod(api, pod, ("cat", path)).out)
        except ValueError as error:
            raise ClientError(f"the trace {path} cannot be read: {error}") from error

    found = for_each_pod(list(by_rank), one)
    problems = {rank: answer for rank, answer in found.items() if isinstance(answer, str)}
    sentences = [f"rank {rank} in {by_rank[rank].pod}: {plain(problem)}" for rank, problem in problems.items()]
    if len(problems) == len(found):
        raise ClientError(sentences[0])
    for sentence in sentences:
        notify(sentence)
    recorded, traces = [], []
    for rank, answer in found.items():
        if rank not in problems:
            row, (stored, trace) = by_rank[rank], answer
            traces.append(trace)
            recorded.append(RecordedRank(row.rank, row.pod, row.node, stored, summarize_trace(trace)))
    return recorded, traces
