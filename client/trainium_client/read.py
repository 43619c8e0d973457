"""Read several objects of a page at once, so that a distant API server costs one round trip instead of four."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainium_client.api import Unreadable
from trainium_client.views.interruption_report import InterruptionReport, explain_interruption
from trainium_contract.api_server.errors import ClientError
from trainium_contract.views.advice import advise_retry
from trainium_contract.views.events import build_event_views
from trainium_contract.views.interruptions import InterruptionView, read_interruptions
from trainium_contract.views.job import build_job_view
from trainium_contract.views.raw import read_mapping, read_objects, read_text
from trainium_contract.views.status_reader import read_public_status
from trainium_contract.views.workers import MemberRow, Members, PodRow, build_members, count_workers, parse_pod_table
from trainium_contract.wire.recorded_membership import (
    REFUSAL_KEY,
    count_refused_writes,
    parse_membership,
    parse_refused_status,
)

if TYPE_CHECKING:
    from trainium_client.api import Api, Json
    from trainium_contract.views.job_view import JobView


_LOG_LINES = 5000


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """The view of a job, and the objects from which it was built."""

    view: JobView
    job: Json
    members: Members | None
    pods: tuple[PodRow, ...]


def read_job_snapshot(api: Api, name: str, now: float) -> JobSnapshot:
    """Read a job with its workers and events; the screen names what may not be read."""
    with ThreadPoolExecutor(3) as pool:
        membership = pool.submit(api.read_membership, name)
        table = pool.submit(api.read_pod_table, name)
        events = pool.submit(api.list_events, name)
        job = api.read_job(name)
        record, pod_table, raw_events = membership.result(), table.result(), events.result()
    job, refusal = apply_refused_status(job, record)
    members = decode_members(record)
    uid = str(job.get("metadata", {}).get("uid") or "")
    pods = () if isinstance(pod_table, Unreadable) else parse_pod_table(pod_table, now)
    workers = None if isinstance(pod_table, Unreadable) else count_workers(pods, members)
    event_views = () if isinstance(raw_events, Unreadable) else build_event_views(raw_events, uid=uid)
    not_shown = [f"workers: {pod_table.reason}"] if isinstance(pod_table, Unreadable) else []
    not_shown += [f"events: {raw_events.reason}"] if isinstance(raw_events, Unreadable) else []
    # A job that never started has no membership, which is no missing information.
    if isinstance(record, Unreadable) and record.forbidden:
        not_shown.append(f"which pods are members: {record.reason}")
    view = build_job_view(job, now=now, workers=workers, events=event_views, not_shown=tuple(not_shown))
    view = replace(view, advice=(*refusal, *view.advice))
    return JobSnapshot(view, job, members, pods)


def read_members(api: Api, name: str) -> Members:
    """Read the members. Raises ClientError with the reason if there are none, or they cannot be read."""
    record = api.read_membership(name)
    members = decode_members(record)
    if members is not None and members.rows:
        return members
    api.read_job(name)  # for an unknown job, its error is more precise
    if isinstance(record, Unreadable) and record.forbidden:
        raise ClientError(f"which pod has which rank cannot be read: {record.reason}")
    raise ClientError(
        f"the workers of {name} have not started together yet, so there are no ranks; see: kubectl trn status {name}"
    )


def find_member(members: Members, rank: int, name: str) -> MemberRow:
    """Return the member that has a rank. Raises ClientError with the ranks of the job."""
    row = members.find_by_rank(rank)
    if row is None:
        raise ClientError(f"there is no rank {rank}: {name} has ranks 0 to {members.rank_count - 1}")
    return row


def decode_members(record: Json | Unreadable) -> Members | None:
    """Decode the membership in a ConfigMap; None without one, or if it cannot be read."""
    if isinstance(record, Unreadable):
        return None
    try:
        return build_members(parse_membership(record))
    except (KeyError, ValueError, TypeError):
        return None


def read_interruption(api: Api, name: str, now: float, number: int | None = None) -> InterruptionReport:
    """Explain an interruption, with the log lines about it."""
    job = api.read_job(name)
    refusal: tuple[str, ...] = ()
    view = build_job_view(job, now=now)
    if not view.ended:
        job, refusal = apply_refused_status(job, api.read_membership(name))
        view = build_job_view(job, now=now)
    entries = read_interruptions(read_public_status(job))
    if number is not None and not 0 < number <= len(entries):
        raise ClientError(f"there is no interruption {number}: `kubectl trn history {name}` lists {len(entries)}")
    entry = entries[number - 1] if number is not None else entries[-1] if entries else None
    log, note = _read_worker_log(api, entry)
    # The report of a failure shows the verdict, so the advice does not repeat it.
    failed = view.phase == "Failed" and (entry is None or entry.stopped)
    advice = (advise_retry(view),) if failed else view.advice
    return explain_interruption(job, number=number, log=log, log_note=note, advice=(*refusal, *advice))


def apply_refused_status(job: Json, record: Json | Unreadable) -> tuple[Json, tuple[str, ...]]:
    """Return the job with the status that the API server has refused so far, if that is newer, and a sentence on it.

    `record` is the ConfigMap of the membership.
    """
    refused = None if isinstance(record, Unreadable) else parse_refused_status(record)
    if refused is None or isinstance(record, Unreadable):
        return job, ()
    owners = read_objects(read_mapping(record, "metadata"), "ownerReferences")
    is_of_job = any(read_text(owner, "uid") == read_text(read_mapping(job, "metadata"), "uid") for owner in owners)
    if not is_of_job or count_refused_writes(refused) <= count_refused_writes(read_mapping(job, "status")):
        return job, ()
    sentence = (
        "The API server does not store the status of this job, so what you see comes from ConfigMap "
        f"{read_text(read_mapping(record, 'metadata'), 'name')}. Exempt trainingjobs/status from what refuses or "
        f"delays it: {read_text(read_mapping(record, 'data'), REFUSAL_KEY)}"
    )
    return {**job, "status": refused}, (sentence,)


def _read_worker_log(api: Api, entry: InterruptionView | None) -> tuple[str, str]:
    """Return the log of the failed worker, with time stamps, or why there is none."""
    if entry is None or not entry.pod:
        return "", ""
    log = api.read_log(entry.pod, query={"timestamps": "true", "tailLines": str(_LOG_LINES)})
    if not isinstance(log, Unreadable):
        return log, ""
    if log.not_found:
        output = "; `Seen` has its last output" if entry.message else ""
        return "", f"{entry.pod} is deleted, and its log with it{output}"
    return "", f"the log cannot be read: {log.reason}"
