"""Reading what a page needs, several objects at once, so that a far API server costs one round trip and not five."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_client.api import Missing
from trainium_client.views.interruption_report import InterruptionReport, explain_interruption
from trainium_contract.api_server.errors import ClientError
from trainium_contract.views.events import event_views
from trainium_contract.views.interruptions import InterruptionView, interruptions
from trainium_contract.views.job import advise_retry, build_job_view
from trainium_contract.views.status_reader import public_status
from trainium_contract.views.workers import Members, PodRow, members_view, pod_rows, workers_view
from trainium_contract.wire.recorded_membership import recorded_membership

if TYPE_CHECKING:
    from trainium_client.api import Api, Json
    from trainium_contract.views.job import JobView


_LOG_LINES = 5000


@dataclass(frozen=True, slots=True)
class Screen:
    """The screen of a job, and what it was made of."""

    view: JobView
    job: Json
    members: Members | None
    pods: tuple[PodRow, ...]


def read_screen(api: Api, name: str, now: float) -> Screen:
    """Read a job with its workers and events; what may not be read is named on the screen."""
    with ThreadPoolExecutor(3) as pool:
        membership = pool.submit(api.membership, name)
        table = pool.submit(api.pod_table, name)
        events = pool.submit(api.events, name)
        job = api.job(name)
        found: list[Any] = [membership.result(), table.result(), events.result()]
    record, rows, happened_raw = found
    members = decode_members(record)
    uid = str(job.get("metadata", {}).get("uid") or "")
    pods = () if isinstance(rows, Missing) else pod_rows(rows, now)
    workers = None if isinstance(rows, Missing) else workers_view(pods, members)
    # A job that never began has no membership: that is no gap in what is shown.
    gaps = tuple(f"{what}: {each.why}" for what, each in (("workers", rows), ("events", happened_raw))
                 if isinstance(each, Missing))  # fmt: skip
    if isinstance(record, Missing) and record.why.startswith("you may not"):
        gaps = (*gaps, f"which pods are members: {record.why}")
    happened = () if isinstance(happened_raw, Missing) else event_views(happened_raw, uid=uid)
    view = build_job_view(job, now=now, workers=workers, events=happened, not_shown=gaps)
    return Screen(view, job, members, pods)


def read_members(api: Api, name: str) -> Members:
    """Read the members. Raises ClientError with the reason where there are none, or they cannot be read."""
    record = api.membership(name)
    members = decode_members(record)
    if members is not None and members.rows:
        return members
    api.job(name)  # an unknown job is the better sentence
    if isinstance(record, Missing) and record.why.startswith("you may not"):
        raise ClientError(f"which pod has which rank cannot be read: {record.why}")
    raise ClientError(
        f"the workers of {name} have not started together yet, so there are no ranks; see: kubectl trn status {name}"
    )


def decode_members(record: Json | Missing) -> Members | None:
    """Decode the membership in a ConfigMap; None when there is none that can be read."""
    if isinstance(record, Missing):
        return None
    try:
        return members_view(recorded_membership(record))
    except (KeyError, ValueError, TypeError):
        return None


def read_interruption(api: Api, name: str, now: float, which: int | None = None) -> InterruptionReport:
    """Explain an interruption, with the lines of the log that show it."""
    job = api.job(name)
    view = build_job_view(job, now=now)
    entries = interruptions(public_status(job))
    if which is not None and not 0 < which <= len(entries):
        raise ClientError(f"there is no interruption {which}: `kubectl trn history {name}` lists {len(entries)}")
    chosen = entries[which - 1] if which is not None else entries[-1] if entries else None
    log, note = _log_of(api, chosen)
    # The report of the end has the verdict itself.
    failed = view.phase == "Failed" and (chosen is None or chosen.stopped)
    advice = (advise_retry(view),) if failed else view.advice
    return explain_interruption(job, which=which, log=log, log_note=note, advice=advice)


def _log_of(api: Api, entry: InterruptionView | None) -> tuple[str, str]:
    """Return the log of the worker that failed, with time stamps, or why there is none."""
    if entry is None or not entry.pod:
        return "", ""
    found = api.log(entry.pod, query={"timestamps": "true", "tailLines": str(_LOG_LINES)})
    if not isinstance(found, Missing):
        return found, ""
    if "not found" in found.why:
        return "", f"{entry.pod} is gone, and its log with it; `Seen` has its last words"
    return "", f"the log cannot be read: {found.why}"
