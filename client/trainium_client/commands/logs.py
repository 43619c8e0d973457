"""`logs`: show the lines of one rank on any node; with --follow across restarts and pods."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import TYPE_CHECKING, Annotated

import typer

from trainium_client.api import Api, Request, Unreadable
from trainium_client.commands.options import Format, JobName, Session, notify
from trainium_client.pod_exec import call_concurrently
from trainium_client.read import decode_members, find_member, read_members
from trainium_client.views.log_lines import parse_log_line
from trainium_contract.api_server.errors import ClientError
from trainium_contract.views.interruptions import read_interruptions
from trainium_contract.views.raw import strip_control_characters
from trainium_contract.views.status_reader import read_public_status
from trainium_contract.views.workers import parse_pod_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from trainium_contract.api_server.connection import LineStream
    from trainium_contract.views.interruptions import InterruptionView
    from trainium_contract.views.workers import MemberRow, Members

_POLL_SECONDS = 2.0
_MAX_FORMER_PODS = 8
"""Number of former pods in which lines of a rank are searched."""


def split_line(raw: bytes) -> tuple[str, str]:
    """Return the text and its time stamp: RFC 3339 with fractions, comparable as text within one pod."""
    stamp, _, text = raw.decode(errors="replace").rstrip("\r").partition(" ")
    return text, stamp


def logs(
    session: Session,
    name: JobName,
    rank: Annotated[int, typer.Option("--rank", min=0, help="Which rank.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue, into its next pod as well.")] = False,
    previous: Annotated[bool, typer.Option("--previous", "-p", help="The pod that had this rank before.")] = False,
    all_lines: Annotated[
        bool, typer.Option("--all", help="All lines of its pod: other ranks and the agent too.")
    ] = False,
    tail: Annotated[int, typer.Option("--tail", min=-1, help="Only the last lines of the pod; -1 for all.")] = -1,
    timestamps: Annotated[bool, typer.Option("--timestamps", help="Write the time before each line.")] = False,
) -> None:
    """Show the lines of one rank, followed across restarts and pods."""
    api = session.open()
    members = read_members(api, name)
    member = find_member(members, rank, name)
    as_json = session.output is Format.JSON
    printer = _RankLogPrinter(rank, as_json=as_json, timestamps=timestamps, all_lines=all_lines)
    if previous:
        _print_previous(api, name, rank, members, printer)
    elif follow:
        _follow_rank(api, name, member, printer, tail)
    else:
        query = {"timestamps": "true", **({"tailLines": str(tail)} if tail >= 0 else {})}
        for line in _read_log(api, member, query):
            printer.write(*line, member.pod)


class _RankLogPrinter:
    """Writes the lines of one rank."""

    def __init__(self, rank: int, *, as_json: bool, timestamps: bool, all_lines: bool) -> None:
        self.rank, self._as_json, self._timestamps, self._all_lines = rank, as_json, timestamps, all_lines
        self._is_terminal = sys.stdout.isatty()

    def write(self, line: str, stamp: str, pod: str) -> bool:
        """Write a line of the rank, or of any rank with `all_lines`; return whether it was written."""
        parsed = parse_log_line(line)
        if not self._all_lines and parsed.rank != self.rank:
            return False
        text = parsed.shown if self._all_lines else parsed.text
        if self._as_json:
            # The prefix of the rank is in `rank`, null for the agent's own lines; `record` is a line of a JSON log.
            fields = {"time": stamp, "pod": pod, "rank": parsed.rank, "line": parsed.text}
            text = json.dumps(fields | ({} if parsed.record is None else {"record": parsed.record}), ensure_ascii=False)
        else:
            # A program's output must not control the terminal; a file receives it unchanged.
            text = strip_control_characters(text) if self._is_terminal else text
            text = "\n".join(f"{stamp} {part}" for part in text.split("\n")) if self._timestamps else text
        sys.stdout.write(f"{text}\n")
        return True


def _open_log(api: Api, member: MemberRow, query: dict[str, str]) -> AbstractContextManager[LineStream]:
    path = Request("get", "pods/log", api.namespace, member.pod).path
    return api.connection.stream(path, query={"container": "worker", **query})


def _read_log(api: Api, member: MemberRow, query: dict[str, str]) -> Iterator[tuple[str, str]]:
    with _open_log(api, member, query) as stream:
        if stream.status >= 400:
            raise ClientError(_explain_missing_log(stream.status, member, api.namespace))
        yield from map(split_line, stream.read_lines())


def _explain_missing_log(status: int, member: MemberRow, namespace: str) -> str:
    if status == 403:
        return f"you may not get pods/log in namespace {namespace}; ask for a Role with verb 'get' on 'pods/log'"
    if status == 404:
        return f"{member.pod} was deleted, and its log with it; its last output is in `kubectl trn why`"
    location = f" on node {member.node}" if member.node else ""
    return (
        f"the log of {member.pod}{location} cannot be read (the API server answered {status}): "
        "its node may be down or deleted"
    )


def list_previous_pods_of_rank(entries: Sequence[InterruptionView], rank: int, members: Members) -> list[str]:
    """Return former pods of the rank that are no longer members, newest first."""
    member_pods = {row.pod for row in members.rows}
    processes_per_node = members.processes_per_node
    pods = [
        entry.pod
        for entry in entries
        if entry.rank is not None and entry.rank <= rank < entry.rank + processes_per_node
    ]
    return [pod for pod in dict.fromkeys(reversed(pods)) if pod and pod not in member_pods]


def _print_previous(api: Api, name: str, rank: int, members: Members, printer: _RankLogPrinter) -> None:
    """Print the pod that had the rank before, by the history; else the newest one whose log has lines of the rank."""
    table = api.read_pod_table(name)
    if isinstance(table, Unreadable):
        raise ClientError(table.reason)
    member_pods = {row.pod for row in members.rows}
    former_pods = [row.name for row in parse_pod_table(table) if row.name not in member_pods]
    former_pods.sort(
        key=lambda pod: int(pod.rpartition("-")[2]) if pod.rpartition("-")[2].isdigit() else -1, reverse=True
    )
    pods_of_rank = list_previous_pods_of_rank(read_interruptions(read_public_status(api.read_job(name))), rank, members)
    # Deleted pods have no log; if the rank has moved since, the remaining pods have its lines.
    former_pods = (
        [pod for pod in pods_of_rank if pod in former_pods] + [pod for pod in former_pods if pod not in pods_of_rank]
    )[:_MAX_FORMER_PODS]
    logs_by_pod = call_concurrently(former_pods, lambda pod: api.read_log(pod, query={"timestamps": "true"}))
    for pod in former_pods:
        log = logs_by_pod[pod]
        lines = [] if not isinstance(log, str) else [split_line(line.encode()) for line in log.splitlines()]
        if sum(printer.write(*line, pod) for line in lines):
            notify(f"-- that was {pod}")
            return
    if pods_of_rank:
        raise ClientError(
            f"rank {rank} was in {pods_of_rank[0]} before, which was deleted with its log: its last output is in "
            f"`kubectl trn why {name}` (`kubectl trn history {name}` has its number for --entry)"
        )
    raise ClientError(
        "no pod is left that had this rank before: earlier attempts in the same pod are in its log "
        f"(`kubectl trn logs {name}` without --previous), the last output of a deleted pod is in `kubectl trn why "
        f"{name}`"
    )


def _follow_rank(api: Api, name: str, member: MemberRow, printer: _RankLogPrinter, tail: int) -> None:
    """Print the rank's lines, pod after pod, until the job has ended."""
    last, current = "", member
    rank = printer.rank
    while True:
        query = {"timestamps": "true", "follow": "true"}
        query |= {"sinceTime": _truncate_to_seconds(last)} if last else {"tailLines": str(tail)} if tail >= 0 else {}
        last = _follow_pod(api, name, current, query, last, printer)
        next_member = _find_next_member(api, name, rank, current)
        if next_member is None:
            return
        if next_member.pod != current.pod:
            notify(f"-- rank {rank} is now in {next_member.pod} on {next_member.node}")
            last, tail = "", -1
        current = next_member


def _follow_pod(
    api: Api, name: str, member: MemberRow, query: dict[str, str], last: str, printer: _RankLogPrinter
) -> str:
    """Print lines until the pod ends or the rank leaves it; return the time stamp of the newest line."""
    rank, stopped = printer.rank, threading.Event()
    with _open_log(api, member, query) as stream:
        if stream.status >= 400:
            # The pod may be starting or deleted: the caller looks up the next pod of the rank.
            if stream.status == 403:
                raise ClientError(_explain_missing_log(403, member, api.namespace))
            time.sleep(_POLL_SECONDS)
            return last

        def close_when_rank_moves() -> None:
            while not stopped.wait(_POLL_SECONDS):
                members = decode_members(api.read_membership(name))
                row = members.find_by_rank(rank) if members else None
                if row is not None and row.pod != member.pod:
                    stream.close()
                    return

        watcher = threading.Thread(target=close_when_rank_moves, daemon=True)
        watcher.start()
        try:
            for raw in stream.read_lines():
                line, stamp = split_line(raw)
                if stamp > last:
                    last = stamp
                    printer.write(line, stamp, member.pod)
                    sys.stdout.flush()
        finally:
            stopped.set()
    return last


def _find_next_member(api: Api, name: str, rank: int, current: MemberRow) -> MemberRow | None:
    """Return the member that has the rank now; None once the job has ended or is deleted."""
    while True:
        status = read_public_status(api.read_job(name))
        phase = status.read_text("phase")
        if phase in {"Completed", "Failed"}:
            notify(f"-- the job has {'failed' if phase == 'Failed' else 'completed'}")
            return None
        members = decode_members(api.read_membership(name))
        row = members.find_by_rank(rank) if members else None
        if row is not None:
            if row.pod == current.pod:
                time.sleep(_POLL_SECONDS)
            return row
        if members is not None and members.rows:
            notify(f"-- there is no rank {rank} at this size ({members.rank_count} ranks); waiting for it")
        time.sleep(_POLL_SECONDS)


def _truncate_to_seconds(stamp: str) -> str:
    """Format a time stamp for `sinceTime`."""
    return f"{stamp[:19]}Z"
