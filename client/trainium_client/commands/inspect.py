"""Commands that inspect workers and machines: ranks, stacks, checkpoints, nodes, release."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any

import typer

from trainium_client import render
from trainium_client.api import JSON_PATCH, Api, Json, Request, Unreadable
from trainium_client.commands.options import Format, JobName, Session, notify
from trainium_client.pod_exec import query_pods, run_in_pod
from trainium_client.read import find_member, read_members
from trainium_client.views.machines import MachineView, find_machine, parse_machines
from trainium_contract.api_server.errors import ClientError, NotFoundError
from trainium_contract.exit_codes import ExitCode
from trainium_contract.pages.formatting import pluralize
from trainium_contract.views.checkpoints import describe_location, parse_checkpoint_rows
from trainium_contract.views.job import build_job_view
from trainium_contract.views.raw import read_mapping, read_text
from trainium_contract.views.status_reader import read_public_status
from trainium_contract.views.workers import build_rank_rows, parse_pod_table, read_name
from trainium_contract.views.workload import read_workload

MAX_POLLED_WORKERS = 64
"""Number of workers whose steps are queried at once by default; more would load the API server."""
_RANKS_SHOWN = 40
SHOW_RANKS = ("-m", "trainium_agent.show_ranks")
_SHOW_CHECKPOINTS = ("-m", "trainium_agent.show_checkpoints")
_SHOW_STACKS = ("-m", "trainium_agent.show_stacks")
_LIST_TIMEOUT_SECONDS, _VERIFY_TIMEOUT_SECONDS = 60.0, 3600.0

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
        bool | None, typer.Option("--steps/--no-steps", help=f"Ask each worker; default: up to {MAX_POLLED_WORKERS}.")
    ] = None,
    all_ranks: Annotated[bool, typer.Option("--all", help=f"Show all ranks, not the {_RANKS_SHOWN} slowest.")] = False,
) -> None:
    """List the ranks with their pods, nodes and steps, the slowest first."""
    api = session.open()
    members = read_members(api, name)
    job = api.read_job(name)
    responses: dict[str, Any] = {}
    ended = read_public_status(job).read_text("phase") in {"Completed", "Failed"}
    queries_steps = steps if steps is not None else len(members.rows) <= MAX_POLLED_WORKERS and not ended
    if queries_steps:
        responses = query_pods(api, [row.pod for row in members.rows], (*read_workload(job).interpreter, *SHOW_RANKS))
    rows = build_rank_rows(members, responses, read_public_status(job), time.time())
    limit = None if all_ranks else _RANKS_SHOWN
    session.print_result(rows, lambda value, _now, width: render.tables.render_ranks(value, width, limit=limit))
    if not queries_steps and steps is None and session.output is Format.TEXT:
        notify(
            "the job has ended, so no worker was asked for its step"
            if ended
            else f"{len(members.rows)} workers were not asked for their steps; --steps asks them"
        )


def stacks(
    session: Session,
    name: JobName,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only the worker of this rank.")] = None,
) -> None:
    """Show the Python stacks of every rank, requested by a signal; training continues."""
    api = session.open()
    members = read_members(api, name)
    selected = members.rows if rank is None else (find_member(members, rank, name),)
    responses = query_pods(
        api, [row.pod for row in selected], (*read_workload(api.read_job(name)).interpreter, *_SHOW_STACKS)
    )
    stack_records: list[dict[str, Any]] = []
    for row in selected:
        response = responses[row.pod]
        if isinstance(response, str):
            stack_records.append({"pod": row.pod, "node": row.node, "rank": None, "stack": "", "error": response})
            continue
        for record in response:
            number = row.rank * members.processes_per_node + int(record.get("localRank", 0))
            if rank is None or number == rank:
                stack_records.append({"pod": row.pod, "node": row.node, "rank": number, **record})
    if session.output is Format.JSON:
        sys.stdout.write(json.dumps(stack_records, indent=2) + "\n")
        return
    for stack_record in stack_records:
        head = f"rank {stack_record['rank']}" if stack_record["rank"] is not None else "no rank"
        stack = _put_current_thread_first(str(stack_record["stack"])) or stack_record["error"]
        sys.stdout.write(f"--- {head} in {stack_record['pod']} on {stack_record['node']}\n{stack}\n")


def _put_current_thread_first(stack: str) -> str:
    """Put the thread that trains before those that wait for it."""
    threads = stack.rstrip("\n").split("\n\n")
    return "\n\n".join(sorted(threads, key=lambda thread: not thread.startswith("Current thread")))


def checkpoints(
    session: Session,
    name: JobName,
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and compare its digest.")] = False,
) -> None:
    """List the checkpoints that a resume could use; with a running worker also those on storage."""
    api = session.open()
    job = api.read_job(name)
    view = build_job_view(job, now=time.time())
    rows, note = list_stored_checkpoints(api, job, verify=verify)
    if verify and rows is None:
        raise ClientError(f"the checkpoints cannot be verified: {note}")

    def page(_value: Any, now: float, width: int) -> Any:
        from trainium_client.render.tables import render_checkpoints  # noqa: PLC0415

        return render_checkpoints(view, rows, note, now=now, width=width)

    session.print_result({"known": view.checkpoints, "storage": rows, "note": note}, page)
    if verify and any(row.problem for row in rows or ()):
        raise ClientError("a checkpoint is damaged; set it aside with `trainium-trainer inspect --repair`")


def list_stored_checkpoints(api: Api, job: Json, *, verify: bool) -> tuple[Any, str]:
    """Return the checkpoints that a running worker lists, or None and the reason."""
    workload = read_workload(job)
    if not workload.checkpoint_root:
        return None, "spec.program.checkpoints is not given"
    if verify and not workload.has_tools:
        return None, "only the program knows what its files must contain"
    table = api.read_pod_table(read_text(read_mapping(job, "metadata"), "name"))
    if isinstance(table, Unreadable):
        return None, table.reason
    running = [row.name for row in parse_pod_table(table) if row.state == "Running"]
    if not running:
        location = describe_location(job)
        if not location:
            return None, "no worker runs, and the job has no storage that outlives its pods"
        reader = ": trainium-trainer inspect reads them there" if workload.has_tools else ""
        return None, f"no worker runs that could list them; they are in {location}{reader}"
    command = [*workload.interpreter, *_SHOW_CHECKPOINTS]
    if workload.has_tools:
        command = [*workload.interpreter, "-m", "trainium_trainer", "inspect", workload.checkpoint_root, "--json"]
        command += ["--verify"] if verify else []
    try:
        output = run_in_pod(
            api,
            running[0],
            command,
            timeout_seconds=_VERIFY_TIMEOUT_SECONDS if verify else _LIST_TIMEOUT_SECONDS,
            accepted_codes=(0, ExitCode.USER_ERROR),
        )
    except ClientError as error:
        return None, str(error)
    rows = parse_checkpoint_rows(output.out.decode(errors="replace"))
    return rows, "" if rows is not None else f"{running[0]} did not print a list of checkpoints"


def nodes(
    session: Session,
    operator_namespace: OperatorNamespace = DEFAULT_NAMESPACE,
    quarantine: Quarantine = DEFAULT_QUARANTINE,
) -> None:
    """List the machines that faults were attributed to: state, duration and evidence."""
    api = session.open(operator_namespace)
    machines = read_machines(api, quarantine)
    session.print_result(machines, lambda value, now, width: render.tables.render_machines(value, width, now=now))


def release(
    session: Session,
    node: Annotated[str, typer.Argument(metavar="NODE", help="Node or machine, as `nodes` lists them.")],
    operator_namespace: OperatorNamespace = DEFAULT_NAMESPACE,
    quarantine: Quarantine = DEFAULT_QUARANTINE,
) -> None:
    """Release a machine from quarantine; its evidence does not count again."""
    api = session.open(operator_namespace)
    machines = read_machines(api, quarantine)
    machine = find_machine(machines, node)
    if machine is None:
        recorded = ", ".join(entry.renamed or entry.node or entry.key for entry in machines) or "none"
        raise NotFoundError(f"no fault was attributed to {node}; recorded machines: {recorded}")
    key = machine.key.replace("~", "~0").replace("/", "~1")
    request = Request("patch", "configmaps", operator_namespace, quarantine)
    api.call(request, body=[{"op": "remove", "path": f"/data/{key}"}], content_type=JSON_PATCH)
    label = machine.renamed or machine.node or machine.key
    sentence = f"{label} is released ({machine.state}, {pluralize(len(machine.strikes), 'strike')})"
    session.print_message(f"{sentence}; the operator reads it within 15 seconds", machine=label, was=machine)


def read_machines(api: Api, quarantine: str) -> tuple[MachineView, ...]:
    """Return the machines that the operator records; none before the first failure."""
    quarantine_map = api.read_config_map(quarantine)
    if isinstance(quarantine_map, Unreadable):
        if quarantine_map.forbidden:
            raise ClientError(quarantine_map.reason)
        notify(f"there is no ConfigMap {quarantine} in namespace {api.namespace} (--operator-namespace, --quarantine)")
        return ()
    node_list = api.list_nodes()
    if isinstance(node_list, Unreadable):
        return parse_machines(quarantine_map, None)
    return parse_machines(
        quarantine_map, {read_name(node): read_text(read_mapping(node, "spec"), "providerID") for node in node_list}
    )
