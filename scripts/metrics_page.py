"""Render `docs/metrics.md`, with every metric and its labels, from the metrics themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.metrics import MetricWrapperBase

from scripts.markdown_table import render_table
from trainium_contract.spec.health import PreflightCheck
from trainium_contract.status.conditions import Phase
from trainium_contract.status.interruptions import RecoveryResponse
from trainium_contract.status.ledger import STAGES
from trainium_contract.status.results import RunStage
from trainium_contract.wire.messages import TrainerPhase
from trainium_operator.monitoring.metrics import PREFIX, READ, Metrics
from trainium_operator.monitoring.named_job_metrics import MEASURES, Families
from trainium_operator.plan.fleet.memory import MachineState

if TYPE_CHECKING:
    from collections.abc import Iterable


def _format_code_spans(values: Iterable[str]) -> str:
    return " ".join(f"`{value}`" for value in values)


_RECOVERY_STAGES = (
    f"parts of a recovery: {_format_code_spans(stage.capitalize() for stage in STAGES)} "
    "(`Decide` is the wait for a worker); lost time has further stages ([definitions](goodput.md#lost-time))"
)
_LABELS = {
    "cause": "what an interruption was attributed to ([causes](causes.md))",
    "check": f"{_format_code_spans(PreflightCheck)} ([checks](node-health.md#before-a-worker-joins))",
    "code": "HTTP status of the response; 0: no response",
    "direction": _format_code_spans(("grow", "shrink")),
    "error": "class of the error",
    "figure": "of a model, for instance `perplexity` or `mmlu acc` ([evaluation](evaluate.md#evaluate-at-milestones))",
    "job_namespace": "namespace of the job",
    "job_name": "name of the job",
    "kind": _format_code_spans(("register", "heartbeat")),
    "measure": f"{_format_code_spans(MEASURES)} ([definitions](goodput.md#definitions))",
    "page": _format_code_spans((*READ, "other")),
    "phase": f"of a job: {_format_code_spans(Phase)}; of `hangs_total`, what the rank was doing: "
    f"{_format_code_spans(TrainerPhase)}",
    "result": _format_code_spans(("Complete", "Failed")),
    "role": "name of a [role](roles.md) of the job",
    "response": f"how far the response went: {_format_code_spans(RecoveryResponse)}",
    "severity": f"of what a node reports: {_format_code_spans(('Suspect', 'Drain', 'Fatal'))}",
    "source": f"where a node reports it: {_format_code_spans(('condition', 'capacity', 'taint', 'label', 'deletion'))}",
    "stage": f"{_RECOVERY_STAGES}; of `stage_seconds`: {_format_code_spans(RunStage)}",
    "state": (
        f"of workers: {_format_code_spans(('desired', 'member', 'training', 'spare_wanted', 'spare_ready'))}; "
        f"of pods of a role: {_format_code_spans(('desired', 'ready', 'needed'))}; of machines: "
        f"{_format_code_spans(MachineState)}"
    ),
    "verb": "of Kubernetes",
}

_INTRODUCTION = """# Metrics

The operator exposes these metrics at `http://POD:8080/metrics`, or [over HTTPS](watch.md#over-https). [Watch a
job](watch.md#metrics) describes scraping, alerts and dashboards. Only the leader's counters increase. No label is a
pod, a node or a rank, so the number of time series does not grow with them. Times are in seconds. Totals come from the
status of existing jobs, so they survive restarts of the operator."""


_PER_JOB_INTRODUCTION = """With `metrics.namedJobs` ([setup](watch.md#of-single-jobs)). Names start with the same
prefix. `jobs_left_out` counts the jobs without metrics."""


@dataclass(frozen=True, slots=True)
class _Metric:
    name: str
    kind: str
    labels: tuple[str, ...]
    description: str


def render_reference(header: str) -> str:
    """Return the page, with `header` as the first line."""
    operator, jobs = _list_operator_metrics(), _list_named_job_metrics()
    labels = sorted({label for metric in operator + jobs for label in metric.labels})
    parts = [
        f"<!-- {header} -->\n{_INTRODUCTION}",
        f"## Of the operator\n\nAll names start with `{PREFIX}`.\n\n{_format_metric_table(operator)}",
        f"## Of single jobs\n\n{_PER_JOB_INTRODUCTION}\n\n{_format_metric_table(jobs)}",
        "## Labels\n\n" + render_table(("label", "values"), ((f"`{label}`", _LABELS[label]) for label in labels)),
    ]
    return "\n\n".join(parts) + "\n"


def _list_operator_metrics() -> list[_Metric]:
    # Collected metrics have no label names before the first sample, but the metric objects have.
    collectors = Metrics().registry._collector_to_names  # noqa: SLF001
    return [
        _Metric(metric._name, metric._type or "", tuple(metric._labelnames), metric._documentation)  # noqa: SLF001
        for metric in collectors
        if isinstance(metric, MetricWrapperBase)
    ]


def _list_named_job_metrics() -> list[_Metric]:
    families = Families(PREFIX).all
    return [_Metric(family.name, family.type, tuple(family._labelnames), family.documentation) for family in families]  # noqa: SLF001


def _format_metric_table(metrics: list[_Metric]) -> str:
    rows = []
    for metric in metrics:
        name = metric.name.removeprefix(PREFIX) + ("_total" if metric.kind == "counter" else "")
        rows.append((f"`{name}`", metric.kind, ", ".join(metric.labels), metric.description))
    return render_table(("name", "type", "labels", "meaning"), rows)
