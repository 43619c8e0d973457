"""Commands that look at workers and machines: ranks, stacks, checkpoints, nodes, release."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any

import typer

from trainium_client.api import JSON_PATCH, Api, Asked, Json, Missing
from trainium_client.commands.options import Format, JobName, Session, notify
from trainium_client.pod_exec import for_each_pod, json_lines, run_in_pod
from trainium_client.read import read_members
from trainium_client.views.machines import MachineView, find_machine, machine_views
from trainium_contract.api_server.errors import ClientError, NotFoundError
from trainium_contract.exit_codes import ExitCode
from trainium_contract.pages.formatting import plural
from trainium_contract.views.checkpoints import checkpoint_root, checkpoint_rows, where_kept
from trainium_contract.views.job import build_job_view
from trainium_contract.views.raw import mapping, objects, text
from trainium_contract.views.status_reader import public_status
from trainium_contract.views.workers import metadata_name, pod_rows, rank_rows
from trainium_contract.wire.worker_env import AGENT_INTERPRETER

ASKED_UNASKED = 64
"""Most workers that are asked for their steps by default: more of them load the API server."""
_SHOWN = 40
_RANKS = ("-m", "trainium_agent.show_ranks")
_STACKS = ("-m", "trainium_agent.show_stacks")
_LIST_SECONDS, _VERIFY_SECONDS = 60.0, 3600.0

OperatorNamespace = Annotated[
    str,
    typer.Option("--operator-namespace", envvar="TRAINIUM_OPERATOR_NAMESPACE", help="Where the operator is installed."),
]
Quarantine = Annotated[str, typer.Option("--quarantine", help="The ConfigMap of the operator's memory of machines.")]
DEFAULT_NAMESPACE = "trainium-system"
DEFAULT_QUARANTINE = "trainium-operator-quarantine"


def ranks(
    session: Session,
    name: JobName,
    steps: Annotated[
        bool | None, typer.Option("--steps/--no-steps", help=f"Ask each worker; default: up to {ASKED_UNASKED}.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help=f"Show all ranks, not the {_SHOWN} slowest.")] = False,
) -> None:
    """Rank -> pod -> node -> step, the slowest first."""
    api = session.open()
    members = read_members(api, name)
    job = api.job(name)
    answers: dict[str, Any] = {}
    ended = public_status(job).text("phase") in {"Completed", "Failed"}
    asks = steps if steps is not None else len(members.rows) <= ASKED_UNASKED and not ended
    if asks:
        command = (*_interpreter(job), *_RANKS)
        answers = for_each_pod([row.pod for row in members.rows], lambda pod: json_lines(run_in_pod(api, pod, command)))
    rows = rank_rows(members, answers, public_status(job), time.time())

    def page(value: Any, _now: float, width: int) -> Any:
        from trainium_client.render.tables import ranks_page  # noqa: PLC0415

        return ranks_page(value, width, None if every else _SHOWN)

    session.emit(rows, page)
    if not asks and steps is None and session.output is Format.TEXT:
        notify("the job has ended, so nobody was asked for a step" if ended
            else f"{len(members.rows)} workers were not asked for their steps; --steps asks them")  # fmt: skip


def stacks(
    session: Session,
    name: JobName,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only the worker of this rank.")] = None,
) -> None:
    """Show the Python stacks of every rank, requested by a signal; training continues."""
    api = session.open()
    members = read_members(api, name)
    wanted = members.rows
    if rank is not None:
        row = members.of_rank(rank)
        if row is None:
            raise ClientError(f"there is no rank {rank}: {name} has ranks 0 to {members.ranks - 1}")
        wanted = (row,)
    command = (*_interpreter(api.job(name)), *_STACKS)
    answers = for_each_pod([row.pod for row in wanted], lambda pod: json_lines(run_in_pod(api, pod, command)))
    found: list[dict[str, Any]] = []
    for row in wanted:
        answer = answers[row.pod]
        if isinstance(answer, str):
            found.append({"pod": row.pod, "node": row.node, "rank": None, "stack": "", "whyNot": answer})
            continue
        for each in answer:
            number = row.rank * members.processes_per_node + int(each.get("localRank", 0))
            if rank is None or number == rank:
                found.append({"pod": row.pod, "node": row.node, "rank": number, **each})
    if session.output is Format.JSON:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    for each in found:
        head = f"rank {each['rank']}" if each["rank"] is not None else "no rank"
        stack = _current_first(str(each["stack"])) or each["whyNot"]
        sys.stdout.write(f"--- {head} in {each['pod']} on {each['node']}\n{stack}\n")


def _interpreter(job: dict[str, Any]) -> tuple[str, ...]:
    """Return what runs a module of the agent in a worker: a program's image may have no Python."""
    return tuple(AGENT_INTERPRETER) if mapping(mapping(job, "spec"), "program") else ("python",)


def _current_first(stack: str) -> str:
    """Put the thread that trains before those that wait for it."""
    threads = stack.rstrip("\n").split("\n\n")
    return "\n\n".join(sorted(threads, key=lambda thread: not thread.startswith("Current thread")))


def checkpoints(
    session: Session,
    name: JobName,
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and compare its digest.")] = False,
) -> None:
    """Checkpoints that a resume could use; with a running worker also what lies on storage."""
    api = session.open()
    job = api.job(name)
    view = build_job_view(job, now=time.time())
    rows, note = on_storage(api, job, verify=verify)
    if verify and rows is None:
        raise ClientError(f"the checkpoints cannot be verified: {note}")

    def page(_value: Any, now: float, width: int) -> Any:
        from trainium_client.render.tables import checkpoints_page  # noqa: PLC0415

        return checkpoints_page(view, rows, note, now=now, width=width)

    session.emit({"known": view.checkpoints, "storage": rows, "note": note}, page)
    if verify and any(each.problem for each in rows or ()):
        raise ClientError("a checkpoint is damaged; set it aside with `trainium-trainer inspect --repair`")


def on_storage(api: Api, job: Json, *, verify: bool) -> tuple[Any, str]:
    """Return the list that a running worker prints, or why there is none."""
    program = mapping(mapping(job, "spec"), "program")
    if program:
        folder = text(mapping(program, "checkpoints"), "path")
        return None, f"the program writes them to {folder}" if folder else "spec.program.checkpoints is not given"
    table = api.pod_table(text(mapping(job, "metadata"), "name"))
    if isinstance(table, Missing):
        return None, table.why
    running = [row.name for row in pod_rows(table) if row.state == "Running"]
    if not running:
        place = where_kept(job)
        if not place:
            return None, "no worker runs, and the job has no storage that outlives its pods"
        return None, f"no worker runs that could look; they are in {place}: trainium-trainer inspect reads them there"
    command = ["python", "-m", "trainium_trainer", "inspect", checkpoint_root(job), "--json"]
    command += ["--verify"] if verify else []
    try:
        seconds = _VERIFY_SECONDS if verify else _LIST_SECONDS
        printed = run_in_pod(api, running[0], command, seconds=seconds, accepted=(0, ExitCode.USER_ERROR))
    except ClientError as error:
        return None, str(error)
    rows = checkpoint_rows(printed.out.decode(errors="replace"))
    return rows, "" if rows is not None else f"{running[0]} printed something else than a list of checkpoints"


def nodes(
    session: Session,
    operator_namespace: OperatorNamespace = DEFAULT_NAMESPACE,
    quarantine: Quarantine = DEFAULT_QUARANTINE,
) -> None:
    """Machines that faults were attributed to: state, how long, and the evidence."""
    api = session.open(operator_namespace)

    def page(value: Any, now: float, width: int) -> Any:
        from trainium_client.render.tables import machines_page  # noqa: PLC0415

        return machines_page(value, now, width)

    session.emit(read_machines(api, quarantine), page)


def release(
    session: Session,
    node: Annotated[str, typer.Argument(metavar="NODE", help="Node or machine, as `nodes` lists them.")],
    operator_namespace: OperatorNamespace = DEFAULT_NAMESPACE,
    quarantine: Quarantine = DEFAULT_QUARANTINE,
) -> None:
    """Release a machine from quarantine; its evidence does not count again."""
    api = session.open(operator_namespace)
    machines = read_machines(api, quarantine)
    found = find_machine(machines, node)
    if found is None:
        known = ", ".join(each.renamed or each.node or each.key for each in machines) or "none"
        raise NotFoundError(f"no fault was attributed to {node}; recorded machines: {known}")
    key = found.key.replace("~", "~0").replace("/", "~1")
    asked = Asked("patch", "configmaps", operator_namespace, quarantine)
    path = f"/api/v1/namespaces/{operator_namespace}/configmaps/{quarantine}"
    api.call("PATCH", asked, path, body=[{"op": "remove", "path": f"/data/{key}"}], content_type=JSON_PATCH)
    machine = found.renamed or found.node or found.key
    sentence = f"{machine} is released ({found.state}, {plural(len(found.strikes), 'strike')})"
    session.report(f"{sentence}; the operator reads it within 15 seconds", machine=machine, was=found)


def read_machines(api: Api, quarantine: str) -> tuple[MachineView, ...]:
    """Return the machines that the operator records; none before the first failure."""
    asked = Asked("get", "configmaps", api.namespace, quarantine)
    found = api.readable(asked, f"/api/v1/namespaces/{api.namespace}/configmaps/{quarantine}")
    if isinstance(found, Missing):
        if found.why.startswith("you may not"):
            raise ClientError(found.why)
        notify(f"there is no ConfigMap {quarantine} in namespace {api.namespace} (--operator-namespace, --quarantine)")
        return ()
    listed = api.readable(Asked("list", "nodes"), "/api/v1/nodes")
    if isinstance(listed, Missing):
        return machine_views(found, None)
    return machine_views(
        found, {metadata_name(each): text(mapping(each, "spec"), "providerID") for each in objects(listed, "items")}
    )
