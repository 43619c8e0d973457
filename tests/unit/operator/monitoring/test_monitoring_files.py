"""Alerts and dashboards of the chart use only metrics that the operator exposes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.testing.operator.metric_builders import busy_metrics

ROOT = Path(__file__).parents[4]
ALERTS = ROOT / "helm/trainium-operator/files/alerts.yaml"
PANELS = {
    path.stem: json.loads(path.read_text())["panels"]
    for path in sorted((ROOT / "helm/trainium-operator/files/dashboards").glob("*.json"))
}
PREFIX = "trainingjob_operator_"
SEVERITIES = {"info", "warning", "critical"}


def read_alerts() -> list[dict[str, object]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def read_queries() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of every query."""
    for rule in read_alerts():
        yield str(rule["alert"]), str(rule["expr"])
    for board, panels in PANELS.items():
        for panel in panels:
            for target in panel["targets"]:
                yield f"{board}: {panel['title']}", target["expr"]


def read_exposed_labels() -> dict[str, list[dict[str, str]]]:
    """Return the labels of every sample by name."""
    labels: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(busy_metrics().render().decode()):
        for sample in family.samples:
            labels.setdefault(sample.name, []).append(sample.labels)
    return labels


EXPOSED = read_exposed_labels()


@pytest.mark.parametrize(("place", "query"), list(read_queries()), ids=[place for place, _ in read_queries()])
def test_a_query_uses_only_existing_metrics_labels_and_values(place: str, query: str) -> None:
    metrics = re.findall(rf"({PREFIX}\w+)(?:\{{([^}}]*)\}})?", query)
    assert metrics, place
    known_labels: set[str] = set()
    for name, matchers in metrics:
        assert name in EXPOSED, f"{place}: there is no metric {name}"
        labels = {label for sample in EXPOSED[name] for label in sample}
        known_labels |= labels
        for label, operator, value in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', matchers):
            assert label in labels, f"{place}: {name} has no label {label}"
            values = {sample[label] for sample in EXPOSED[name]}
            wanted = value.split("|") if "~" in operator else [value]
            assert value.startswith("$") or set(wanted) <= values, f"{place}: {name} has no {label} {value}"
    for grouping in re.findall(r"\b(?:by|on|ignoring) \(([^)]*)\)", query):
        assert {label.strip() for label in grouping.split(",")} <= known_labels, f"{place}: by {grouping}"


def test_legends_and_annotations_use_labels_of_their_query() -> None:
    for rule in read_alerts():
        annotations = " ".join(rule["annotations"].values())  # type: ignore[attr-defined]
        for label in re.findall(r"\$labels\.(\w+)", annotations):
            assert label in str(rule["expr"]) or label in ("job_namespace", "job_name"), rule["alert"]
    for panels in PANELS.values():
        for panel in panels:
            for target in panel["targets"]:
                name = re.search(rf"{PREFIX}\w+", target["expr"])
                assert name is not None
                labels = {label for sample in EXPOSED[name[0]] for label in sample}
                assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels, panel["title"]


def test_every_alert_has_a_section_in_the_runbook_and_a_severity() -> None:
    runbook = (ROOT / "docs/runbook.md").read_text()
    sections = {line.removeprefix("## ") for line in runbook.splitlines() if line.startswith("## ")}
    targets = set()
    for rule in read_alerts():
        where, _, anchor = rule["annotations"]["runbook_url"].partition("#")  # type: ignore[index]
        assert where == "RUNBOOK", "the chart puts the page in"
        assert anchor == str(rule["alert"]).lower(), "each alert leads to its own section"
        assert rule["alert"] in sections
        assert rule["labels"]["severity"] in SEVERITIES  # type: ignore[index]
        targets.add(anchor)
    assert {section.lower() for section in sections} == targets, "a section that no alert leads to"


def test_dashboard_panels_do_not_overlap() -> None:
    assert PANELS.keys() == {"fleet", "job"}
    for board, panels in PANELS.items():
        cells: set[tuple[int, int]] = set()
        for panel in panels:
            box = panel["gridPos"]
            covered = {
                (x, y) for x in range(box["x"], box["x"] + box["w"]) for y in range(box["y"], box["y"] + box["h"])
            }
            assert not covered & cells, f"{board}: {panel['title']}"
            assert box["x"] + box["w"] <= 24
            cells |= covered


@pytest.mark.parametrize(
    ("board", "panel"),
    [(board, panel) for board, panels in PANELS.items() for panel in panels],
    ids=lambda value: value if isinstance(value, str) else value["title"],
)
def test_a_panel_explains_its_values(board: str, panel: dict[str, object]) -> None:
    description = str(panel["description"])
    assert description != panel["title"]
    assert description.endswith("."), f"{board}: {panel['title']} has no sentence that explains it"
    assert len(description) > 20
