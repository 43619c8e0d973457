# ruff: noqa: INP001 - a script
"""Render `docs/metrics.md`, with every metric and its labels, from the metrics themselves.

The page has the whole registry, so `generate --check` detects a stale page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.metrics import MetricWrapperBase

from trainium_contract.spec.health import PreflightCheck
from trainium_contract.status.conditions import Phase
from trainium_contract.status.interruptions import Rung
from trainium_contract.status.results import RunStage
from trainium_contract.wire.messages import TrainerPhase
from trainium_operator.monitoring.metrics import PREFIX, READ, Metrics
from trainium_operator.monitoring.named_job_metrics import MEASURES, Families
from trainium_operator.plan.fleet.memory import MachineState

if TYPE_CHECKING:
    from collections.abc import Iterable


def _values(words: Iterable[str]) -> str:
    return " ".join(f"`{word}`" for word in words)


_RECOVERY_STAGES = (
    f"parts of a recovery: {_values(('Detect', 'Decide', 'Restart', 'Load', 'Replay'))} "
    "(`Decide` is the wait for a worker), of lost time others besides ([definitions](goodput.md#lost-time))"
)
_LABELS = {
    "cause": "what an interruption was attributed to ([causes](causes.md))",
    "check": f"{_values(PreflightCheck)} ([checks](node-health.md#before-a-worker-joins))",
    "code": "HTTP status of the answer; 0: there was none",
    "direction": _values(("grow", "shrink")),
    "error": "class of the error",
    "figure": "of a model, for instance `perplexity` or `mmlu acc` ([evaluation](evaluate.md#evaluate-at-milestones))",
    "job_namespace": "namespace of the job",
    "job_name": "name of the job",
    "kind": _values(("register", "heartbeat")),
    "measure": f"{_values(MEASURES)} ([definitions](goodput.md#definitions))",
    "page": _values((*READ, "other")),
    "phase": f"of a job: {_values(Phase)}; of `hangs_total`, what the rank was at: {_values(TrainerPhase)}",
    "result": _values(("Complete", "Failed")),
    "rung": f"how far the answer went: {_values(Rung)}",
    "severity": f"of what a node reports: {_values(('Suspect', 'Drain', 'Fatal'))}",
    "source": f"where a node reports it: {_values(('condition', 'capacity', 'taint', 'label', 'deletion'))}",
    "stage": f"{_RECOVERY_STAGES}; of `stage_seconds`: {_values(RunStage)}",
    "state": (
        f"of workers: {_values(('desired', 'member', 'training', 'spare_wanted', 'spare_ready'))}; "
        f"of machines: {_values(MachineState)}"
    ),
    "verb": "of Kubernetes",
}

_BEGINNING = """# Metrics

The operator exposes these metrics at `http://POD:8080/metrics`, or [over HTTPS](watch.md#over-https). [Watch a
job](watch.md#metrics) describes scraping, alerts and dashboards. Only the leader's counters move. No label is a pod, a
node or a rank, so the number of time series does not grow with them. Times are in seconds; sums of them are those of
the ledgers of existing jobs, and survive restarts of the operator."""


_OF_JOBS = """With `metrics.namedJobs` ([setup](watch.md#of-single-jobs)). Names start with the same prefix.
`jobs_left_out` counts the jobs without metrics."""

_Row = tuple[str, str, tuple[str, ...], str]
"""Name, type, labels and meaning of a metric."""


def reference_text(header: str) -> str:
    """Return the page, with `header` as the first line."""
    own, named = _operator_metrics(), _named_job_metrics()
    labels = sorted({label for _, _, found, _ in own + named for label in found})
    words = "\n".join(f"| `{label}` | {_LABELS[label]} |" for label in labels)
    parts = [
        f"<!-- {header} -->\n{_BEGINNING}",
        f"## Of the operator\n\nAll names start with `{PREFIX}`.\n\n{_table(own)}",
        f"## Of single jobs\n\n{_OF_JOBS}\n\n{_table(named)}",
        f"## Labels\n\n| label | values |\n| --- | --- |\n{words}",
    ]
    return "\n\n".join(parts) + "\n"


def _operator_metrics() -> list[_Row]:
    # Collected metrics have no label names before the first sample, but the metric objects have.
    found = [each for each in Metrics().registry._collector_to_names if isinstance(each, MetricWrapperBase)]  # noqa: SLF001
    return [_row(each._name, each._type or "", each._labelnames, each._documentation) for each in found]  # noqa: SLF001


def _named_job_metrics() -> list[_Row]:
    families = Families(PREFIX).all
    return [_row(each.name, each.type, each._labelnames, each.documentation) for each in families]  # noqa: SLF001


def _row(name: str, kind: str, labels: Iterable[str], text: str) -> _Row:
    return name.removeprefix(PREFIX) + ("_total" if kind == "counter" else ""), kind, tuple(labels), text


def _table(rows: list[_Row]) -> str:
    lines = [f"| `{name}` | {kind} | {', '.join(labels)} | {text} |" for name, kind, labels, text in rows]
    return "| name | type | labels | |\n| --- | --- | --- | --- |\n" + "\n".join(lines)
