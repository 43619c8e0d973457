"""`logs`: the lines of one rank, wherever it runs; with --follow across restarts and pods."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from trainium_client.api import Api, Missing
from trainium_client.commands.options import Format, JobName, Session, notify
from trainium_client.pod_exec import for_each_pod
from trainium_client.read import decode_members, read_members
from trainium_client.views.log_lines import parse_log_line
from trainium_contract.api_server.errors import ClientError
from trainium_contract.views.interruptions import interruptions
from trainium_contract.views.raw import plain
from trainium_contract.views.status_reader import public_status
from trainium_contract.views.workers import pod_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trainium_client.views.log_lines import PodLogLine
    from trainium_contract.views.interruptions import InterruptionView
    from trainium_contract.views.workers import MemberRow, Members

_POLL_SECONDS = 2.0
_OLD_PODS = 8
"""Pods that are searched for earlier lines of a rank."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a pod's log."""

    stamp: str
    """RFC 3339 with fractions, as the kubelet writes it; comparable as text within one pod."""
    words: str


def split_line(raw: bytes) -> Line:
    """Time stamp and words."""
    stamp, _, words = raw.decode(errors="replace").rstrip("\r").partition(" ")
    return Line(stamp, words)


def logs(
    session: Session,
    name: JobName,
    rank: Annotated[int, typer.Option("--rank", min=0, help="Which rank.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue, into its next pod as well.")] = False,
    previous: Annotated[bool, typer.Option("--previous", "-p", help="The pod that had this rank before.")] = False,
    every: Annotated[bool, typer.Option("--all", help="All lines of its pod: other ranks and the agent too.")] = False,
    tail: Annotated[int, typer.Option("--tail", min=-1, help="Only the last lines of the pod; -1 for all.")] = -1,
    timestamps: Annotated[bool, typer.Option("--timestamps", help="Write the time before each line.")] = False,
) -> None:
    """Show the lines of one rank, followed across restarts and pods."""
    api = session.open()
    members = read_members(api, name)
    member = members.of_rank(rank)
    if member is None:
        raise ClientError(f"there is no rank {rank}: {name} has ranks 0 to {members.ranks - 1}")
    form = _json_line if session.output is Format.JSON else _stamped if timestamps else _bare
    printer = _Printer(rank, form, every=every)
    if previous:
        _previous(api, name, rank, members, printer)
    elif follow:
        _follow(api, name, member, printer, tail)
    else:
        query = {"timestamps": "true", **({"tailLines": str(tail)} if tail >= 0 else {})}
        for line in _read(api, member, query):
            printer.write(line, member.pod)


class _Printer:
    """Writes the lines of one rank."""

    def __init__(self, rank: int, form: Callable[[str, PodLogLine, str, str], str], *, every: bool) -> None:
        """`form(stamp, said, words, pod)`: what is written of a line; `words`: those of `said` that were asked for."""
        self.rank, self._form, self._every = rank, form, every
        self._safe = sys.stdout.isatty()

    def write(self, line: Line, pod: str) -> bool:
        """Return whether it was a line of the rank."""
        each = parse_log_line(line.words)
        if not self._every and each.rank != self.rank:
            return False
        words = each.shown if self._every else each.text
        # A program's output must not steer the person's terminal; a file gets it as it is.
        words = plain(words) if self._safe else words
        sys.stdout.write(self._form(line.stamp, each, words, pod) + "\n")
        return True


def _bare(_: str, __: PodLogLine, words: str, ___: str) -> str:
    return words


def _stamped(stamp: str, _: PodLogLine, words: str, __: str) -> str:
    return "\n".join(f"{stamp} {line}" for line in words.split("\n"))


def _json_line(stamp: str, each: PodLogLine, _: str, pod: str) -> str:
    """Format a line as JSON: without the mark of the rank, which is in `rank`; null for the agent's own lines.

    `record` is the pod's own line, where the log of the pod is JSON.
    """
    fields = {"time": stamp, "pod": pod, "rank": each.rank, "line": each.text}
    return json.dumps(fields | ({} if each.record is None else {"record": each.record}), ensure_ascii=False)


def _read(api: Api, member: MemberRow, query: dict[str, str]) -> Iterator[Line]:
    path = f"/api/v1/namespaces/{api.namespace}/pods/{member.pod}/log"
    with api.connection.stream(path, query={"container": "worker", **query}) as stream:
        if stream.status >= 400:
            raise ClientError(_no_log(stream.status, member, api.namespace))
        yield from map(split_line, stream.lines())


def _no_log(status: int, member: MemberRow, namespace: str) -> str:
    if status == 403:
        return f"you may not get pods/log in namespace {namespace}; ask for a Role with verb 'get' on 'pods/log'"
    if status == 404:
        return f"{member.pod} is gone, and its log with it; its last output is in `kubectl trn why`"
    where = f" on node {member.node}" if member.node else ""
    return f"the log of {member.pod}{where} cannot be read (the API server answered {status}): its node may be gone"


def holders_before(entries: Sequence[InterruptionView], rank: int, members: Members) -> list[str]:
    """Pods that had the rank when they were interrupted and are no members any more, the newest first."""
    there, per = {row.pod for row in members.rows}, members.processes_per_node
    had = [each.pod for each in entries if each.rank is not None and each.rank <= rank < each.rank + per]
    return [pod for pod in dict.fromkeys(reversed(had)) if pod and pod not in there]


def _previous(api: Api, name: str, rank: int, members: Members, printer: _Printer) -> None:
    """Print the pod that had the rank before, by the history; else the newest one whose log has lines of the rank."""
    table = api.pod_table(name)
    if isinstance(table, Missing):
        raise ClientError(table.why)
    there = {row.pod for row in members.rows}
    old = [row.name for row in pod_rows(table) if row.name not in there]
    old.sort(key=lambda pod: int(pod.rpartition("-")[2]) if pod.rpartition("-")[2].isdigit() else -1, reverse=True)
    known = holders_before(interruptions(public_status(api.job(name))), rank, members)
    # Who is gone already is not asked for; a rank that has changed hands since is found in the others.
    old = ([pod for pod in known if pod in old] + [pod for pod in old if pod not in known])[:_OLD_PODS]
    found = for_each_pod(old, lambda pod: api.log(pod, query={"timestamps": "true"}))
    for pod in old:
        log = found[pod]
        lines = [] if not isinstance(log, str) else [split_line(line.encode()) for line in log.splitlines()]
        if sum(printer.write(line, pod) for line in lines):
            notify(f"-- that was {pod}")
            return
    if known:
        raise ClientError(
            f"rank {rank} was in {known[0]} before, which is gone with its log: its last output is in "
            f"`kubectl trn why {name}` (`kubectl trn history {name}` has its number for --entry)"
        )
    raise ClientError(
        "no pod is left that had this rank before: earlier attempts in the same pod are in its log "
        f"(`kubectl trn logs {name}` without --previous), the last output of a lost pod is in `kubectl trn why {name}`"
    )


def _follow(api: Api, name: str, member: MemberRow, printer: _Printer, tail: int) -> None:
    """Print the rank's lines, pod after pod, until the job has ended."""
    last, current = "", member
    rank = printer.rank
    while True:
        query = {"timestamps": "true", "follow": "true"}
        query |= {"sinceTime": _whole_seconds(last)} if last else {"tailLines": str(tail)} if tail >= 0 else {}
        last = _follow_pod(api, name, current, query, last, printer)
        succeeding = _next(api, name, rank, current)
        if succeeding is None:
            return
        if succeeding.pod != current.pod:
            notify(f"-- rank {rank} is now in {succeeding.pod} on {succeeding.node}")
            last, tail = "", -1
        current = succeeding


def _follow_pod(api: Api, name: str, member: MemberRow, query: dict[str, str], last: str, printer: _Printer) -> str:
    """Print lines until the pod ends or the rank leaves it; return the time stamp of the newest line."""
    path = f"/api/v1/namespaces/{api.namespace}/pods/{member.pod}/log"
    rank, done = printer.rank, threading.Event()
    with api.connection.stream(path, query={"container": "worker", **query}) as stream:
        if stream.status >= 400:
            # The pod may be starting, or just gone: who has the rank next is asked after a moment.
            if stream.status == 403:
                raise ClientError(_no_log(403, member, api.namespace))
            time.sleep(_POLL_SECONDS)
            return last

        def leave_with_the_rank() -> None:
            while not done.wait(_POLL_SECONDS):
                members = decode_members(api.membership(name))
                row = members.of_rank(rank) if members else None
                if row is not None and row.pod != member.pod:
                    stream.close()
                    return

        watcher = threading.Thread(target=leave_with_the_rank, daemon=True)
        watcher.start()
        try:
            for raw in stream.lines():
                line = split_line(raw)
                if line.stamp > last:
                    last = line.stamp
                    printer.write(line, member.pod)
                    sys.stdout.flush()
        finally:
            done.set()
    return last


def _next(api: Api, name: str, rank: int, current: MemberRow) -> MemberRow | None:
    """Return the member that has the rank now; None once the job has ended or is deleted."""
    while True:
        status = public_status(api.job(name))
        phase = status.text("phase")
        if phase in {"Completed", "Failed"}:
            notify(f"-- the job has {'failed' if phase == 'Failed' else 'completed'}")
            return None
        members = decode_members(api.membership(name))
        row = members.of_rank(rank) if members else None
        if row is not None:
            if row.pod == current.pod:
                time.sleep(_POLL_SECONDS)
            return row
        if members is not None and members.rows:
            notify(f"-- there is no rank {rank} at this size ({members.ranks} ranks); waiting for it")
        time.sleep(_POLL_SECONDS)


def _whole_seconds(stamp: str) -> str:
    """Format a time stamp for `sinceTime`."""
    return f"{stamp[:19]}Z"
