"""The Grafana dashboards of the chart: one of the fleet, one of a job with separate metrics.

Tables of panels and queries; `generate` writes them as Grafana's JSON (schema 39, any Prometheus data source). Every
query is held to the operator's real metrics by a test.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

FOLDER = Path("helm/trainium-operator/files/dashboards")
_P = "trainingjob_operator_"
_SCHEMA_VERSION = 39
_COLUMNS = 24
_HEIGHT = 8
_STAT_HEIGHT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture."""

    title: str
    queries: Sequence[tuple[str, str]]
    """PromQL without the metrics' prefix (`P` stands for it), and Grafana's legend."""
    unit: str = "short"
    """As Grafana names it."""
    about: str = ""
    width: int = 8
    """Of 24 columns."""
    stat: bool = False
    """A number rather than a curve."""
    stacked: bool = False
    most: float | None = None
    """Upper end of the axis."""


def _by_stage(part: str) -> str:
    return f"sum by (stage) (rate(P recovery_stage_seconds_{part}[1h]))"


def _number(title: str, query: str, legend: str, *, unit: str = "short", about: str = "") -> Panel:
    """One figure of the row at the top."""
    return Panel(title=title, queries=[(query, legend)], unit=unit, about=about, stat=True, width=4)


_RANGE = "$__rate_interval"
FLEET = (
    _number("Jobs", "sum(P jobs)", "jobs"),
    _number("Training", 'sum(P jobs{phase="Running"})', "running"),
    _number("Goodput, all jobs", "sum(P productive_seconds) / sum(P wall_seconds)", "goodput", unit="percentunit"),
    _number("Goodput, lowest job", 'min(P goodput_ratio{measure="strict"})', "strict", unit="percentunit"),
    _number("Oldest newest checkpoint", "max(P checkpoint_durable_age_seconds)", "age", unit="s"),
    _number("Leaders", "sum(P leader)", "leaders", about="1; else nothing recovers"),
    Panel(title="Jobs by phase", queries=[("sum by (phase) (P jobs)", "{{phase}}")], stacked=True),
    Panel(title="Workers", queries=[("sum by (state) (P workers)", "{{state}}")]),
    Panel(
        title="Goodput of running jobs",
        queries=[("min by (measure) (P goodput_ratio)", "lowest, {{measure}}")],
        unit="percentunit",
        most=1.0,
        about="docs/goodput.md",
    ),
    Panel(
        title="Interruptions",
        queries=[("sum by (cause) (increase(P interruptions_total[1h]))", "{{cause}}")],
        about="In the hour before",
        stacked=True,
    ),
    Panel(
        title="Time to recover",
        queries=[
            ("histogram_quantile(0.5, sum by (rung, le) (rate(P recovery_seconds_bucket[1h])))", "{{rung}}, median"),
            ("histogram_quantile(0.95, sum by (rung, le) (rate(P recovery_seconds_bucket[1h])))", "{{rung}}, p95"),
        ],
        unit="s",
        about="From a failure to the first new step",
    ),
    Panel(
        title="Parts of a recovery",
        queries=[(f"{_by_stage('sum')} / {_by_stage('count')}", "{{stage}}")],
        unit="s",
        stacked=True,
    ),
    Panel(title="Time lost, by cause", queries=[("sum by (cause) (P lost_seconds)", "{{cause}}")], unit="s"),
    Panel(title="Time lost, by stage", queries=[("sum by (stage) (P lost_stage_seconds)", "{{stage}}")], unit="s"),
    Panel(title="Steps computed again", queries=[("sum(increase(P lost_steps_total[1h]))", "in the hour before")]),
    Panel(
        title="Machines that faults were attributed to",
        queries=[("max by (state) (P machines)", "{{state}}"), ("max(P node_actions_frozen)", "actions frozen")],
    ),
    Panel(
        title="Problems that nodes report",
        queries=[("max by (source, severity) (P node_problems)", "{{source}} {{severity}}")],
    ),
    Panel(title="Ranks that hung", queries=[("sum by (phase) (increase(P hangs_total[1h]))", "{{phase}}")]),
    Panel(
        title="Plans",
        queries=[
            (f"histogram_quantile(0.99, sum by (le) (rate(P reconcile_seconds_bucket[{_RANGE}])))", "p99"),
            (f"histogram_quantile(0.5, sum by (le) (rate(P reconcile_seconds_bucket[{_RANGE}])))", "median"),
        ],
        unit="s",
    ),
    Panel(
        title="Requests to the API server",
        queries=[(f"sum by (code) (rate(P api_requests_total[{_RANGE}]))", "{{code}}")],
        unit="reqps",
    ),
    Panel(
        title="Agents",
        queries=[
            ("sum(P agents)", "registered"),
            (f"sum by (kind) (rate(P agent_messages_total[{_RANGE}]))", "{{kind}} a second"),
        ],
    ),
)
_JOB = '{job_namespace="$namespace", job_name="$name"}'


def _of_job(name: str, more: str = "") -> str:
    return f"P job_{name}" + (_JOB if not more else _JOB[:-1] + ", " + more + "}")


JOB = (
    _number("Phase", _of_job("phase"), "{{phase}}"),
    _number("Step", _of_job("step"), "step"),
    _number("Loss", _of_job("loss"), "loss"),
    _number("Goodput", _of_job("goodput_ratio", 'measure="strict"'), "strict", unit="percentunit"),
    _number("Newest durable checkpoint", _of_job("checkpoint_durable_age_seconds"), "age", unit="s"),
    _number("Waits for a person", _of_job("stalled"), "stalled", about="1: its condition Stalled says why"),
    Panel(title="Loss by time", queries=[(_of_job("loss"), "loss")]),
    Panel(title="Tokens a second", queries=[(_of_job("tokens_per_second"), "tokens/s")]),
    Panel(title="Workers by state", queries=[(_of_job("workers"), "{{state}}")]),
    Panel(
        title="Goodput by time",
        queries=[(_of_job("goodput_ratio"), "{{measure}}")],
        unit="percentunit",
        most=1.0,
    ),
    Panel(title="Where the time went", queries=[(_of_job("lost_seconds"), "{{cause}}")], unit="s"),
    Panel(
        title="Interruptions by faults",
        queries=[(_of_job("interruptions_total"), "{{cause}}")],
        about="Since the job began",
    ),
    Panel(
        title="Age of the newest durable checkpoint",
        queries=[
            (_of_job("checkpoint_durable_age_seconds"), "age"),
            (_of_job("checkpoint_healthy"), "checkpoints healthy"),
        ],
        unit="s",
    ),
)


def texts() -> dict[Path, str]:
    """Each dashboard's file below the repository's root, and its JSON."""
    namespace = _variable("namespace", "label_values(P job_phase, job_namespace)")
    name = _variable("name", 'label_values(P job_phase{job_namespace="$namespace"}, job_name)')
    return {
        FOLDER / "fleet.json": _dashboard("trainium-fleet", "Trainium: the fleet", FLEET),
        FOLDER / "job.json": _dashboard("trainium-job", "Trainium: a job", JOB, namespace, name),
    }


def _dashboard(uid: str, title: str, panels: Sequence[Panel], *variables: dict[str, Any]) -> str:
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    body = {
        "uid": uid,
        "title": title,
        "tags": ["trainium-operator"],
        "schemaVersion": _SCHEMA_VERSION,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [source, *variables]},
        "panels": _laid_out(panels),
    }
    return json.dumps(body, indent=1) + "\n"


def _laid_out(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """Return the panels in rows, from left to right."""
    found, x, y, height = [], 0, 0, 0
    for number, panel in enumerate(panels, start=1):
        if x + panel.width > _COLUMNS:
            x, y = 0, y + height
        height = _STAT_HEIGHT if panel.stat else _HEIGHT
        place = {"x": x, "y": y, "w": panel.width, "h": height}
        found.append(_panel(panel, number, place))
        x += panel.width
    return found


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    custom = {} if panel.stat else {"stacking": {"mode": "normal" if panel.stacked else "none"}, "fillOpacity": 10}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": custom}
    if panel.most is not None:
        defaults["max"] = panel.most
    targets = [
        {"refId": chr(ord("A") + place), "datasource": source, "expr": _named(query), "legendFormat": legend}
        for place, (query, legend) in enumerate(panel.queries)
    ]
    # Of a phase the name is what counts, not the 1.
    text = "name" if panel.title == "Phase" else "auto"
    options = {"textMode": text, "reduceOptions": {"calcs": ["lastNotNull"]}} if panel.stat else {}
    return {
        "id": number,
        "type": "stat" if panel.stat else "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": targets,
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": _named(query),
        "refresh": 2,
        "sort": 1,
    }


def _named(query: str) -> str:
    """Return the query with whole metric names."""
    return query.replace("P ", _P)
