"""Views of the recorded jobs, and the text that commands print of them."""

from typing import Any

from rich.console import RenderableType

from tests.testing.api.recorded_jobs import NOW, recorded_object
from trainium_client.render.interruption import render_interruption
from trainium_client.render.page import render_text
from trainium_client.render.status import render_status
from trainium_client.views.interruption_report import explain_interruption
from trainium_contract.views.events import build_event_views
from trainium_contract.views.job import build_job_view
from trainium_contract.views.job_view import JobView
from trainium_contract.views.workers import Members, build_members, count_workers, parse_pod_table
from trainium_contract.wire.recorded_membership import parse_membership


def recorded_job(name: str = "job", **status: Any) -> dict[str, Any]:
    """Return a recorded job with other fields of its status."""
    job = recorded_object(name)
    job["status"] |= status
    return job


def members() -> Members:
    return build_members(parse_membership(recorded_object("membership")))


def job_view(name: str = "job", **status: Any) -> JobView:
    """Return the view of a recorded job with its workers and events."""
    workers = count_workers(parse_pod_table(recorded_object("pods")), members())
    events = build_event_views(recorded_object("events")["items"])
    return build_job_view(recorded_job(name, **status), now=NOW, workers=workers, events=events)


def view_alone(job: dict[str, Any], after: float = 0.0) -> JobView:
    """Return the view of a job without its workers and events, some seconds after it was recorded."""
    return build_job_view(job, now=NOW + after)


def render_plain(content: RenderableType, width: int = 100) -> str:
    return render_text(content, width=width, colour=False)


def status_text(view: JobView, width: int = 100, *, colour: bool = False) -> str:
    """Return what `kubectl trn status` prints."""
    return render_text(render_status(view, now=NOW, width=width), width=width, colour=colour)


def why_text(job: dict[str, Any], width: int = 100, **context: Any) -> str:
    """Return what `kubectl trn why` prints, with the log and the advice that are given."""
    return render_plain(render_interruption(explain_interruption(job, **context)), width)


def condition(kind: str, reason: str, message: str, status: str = "False") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message}
