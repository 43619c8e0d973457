"""The operator's memory is apart from what people read, in the models alone: the wire is as it was before.

`recorded_status.json` was written by the version before the two were apart, every field unlike its default.
`status_fields.txt` is the definition's status, one line a field, each with whose it is; `python
tests/unit/contract/status/test_operator_memory.py` writes it. A new field adds its line and changes no other.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from trainium_contract.definition.crd import object_schema
from trainium_contract.job import GoodputStatus, IdleNodesStatus, TrainingJobStatus
from trainium_contract.pages.jobs_page import job_row
from trainium_contract.status.ledger import ShownGoodput
from trainium_contract.status.memory import IdleNodesMemory, LedgerMemory, OperatorMemory, memory_fields
from trainium_contract.status.shown import ShownIdleNodes, ShownStatus
from trainium_contract.views.job_from_status import job_view

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
RECORDED, FIELDS = HERE / "recorded_status.json", HERE / "status_fields.txt"
_BOUNDS = ("format", "minimum", "maximum", "maxLength", "maxItems", "maxProperties", "x-kubernetes-list-type")


def rows() -> Iterator[str]:
    """Every field of the status in the definition, in its order: path, whose it is, type and bounds."""
    for path, node in nodes(object_schema()["properties"]["status"]):
        bounds = " ".join(f"{key}={node[key]}" for key in _BOUNDS if key in node)
        yield f"{path}  {'memory' if is_memory(path) else 'shown'}  {node['type']} {bounds}".rstrip()


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, child in schema.get("properties", {}).items():
        yield f"{path}{name}", child
        yield from nodes(child, f"{path}{name}.")
        yield from nodes(child.get("items", {}), f"{path}{name}[].")


def is_memory(path: str) -> bool:
    return any(path == each or path.startswith((f"{each}.", f"{each}[")) for each in memory_fields())


def test_these_are_the_operators_memory_and_all_else_is_for_people() -> None:
    assert memory_fields() == {
        "activity", "failures", "gang", "leavingSince", "nextPodOrdinal", "refusals", "waitingSince",
        "goodput.countedStep", "goodput.earlierNodeSeconds", "goodput.earlierSeconds", "goodput.starting",
        "goodput.window",
        "idleNodes.askedAt", "idleNodes.inVain", "idleNodes.retryAt",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("whole", "shown", "memory"),
    [
        (TrainingJobStatus, ShownStatus, OperatorMemory),
        (GoodputStatus, ShownGoodput, LedgerMemory),
        (IdleNodesStatus, ShownIdleNodes, IdleNodesMemory),
    ],
)
def test_the_parts_have_no_field_in_common_and_are_the_whole(whole: Any, shown: Any, memory: Any) -> None:
    assert shown.model_fields.keys() & memory.model_fields.keys() == set()
    assert shown.model_fields.keys() | memory.model_fields.keys() == whole.model_fields.keys()


def test_a_status_of_the_version_before_is_read_and_written_as_it_was() -> None:
    text = RECORDED.read_text(encoding="utf-8")
    known = TrainingJobStatus.model_validate_json(text)
    # The API server keeps the keys of an object in the order of the alphabet, whatever order they were sent in.
    assert json.dumps(known.to_wire(), indent=1, sort_keys=True, ensure_ascii=False) + "\n" == text
    unset = [name for name in TrainingJobStatus.model_fields if name not in known.model_fields_set]
    assert unset == [], "the record holds every field, so none goes unseen"


def test_the_definition_has_each_field_where_it_was() -> None:
    assert list(rows()) == FIELDS.read_text(encoding="utf-8").splitlines()


def test_what_people_see_is_the_same_without_the_memory() -> None:
    status = json.loads(RECORDED.read_text(encoding="utf-8"))
    job = {"metadata": {"name": "llama", "namespace": "default"}, "spec": {}, "status": status}
    shown = {**job, "status": without_memory(status)}
    assert len(shown["status"]) < len(status)
    assert job_view(job, now=1.0) == job_view(shown, now=1.0)
    assert job_row(job) == job_row(shown)
    assert job_view(job, now=1.0).goodput.sizes[0].steps == 1, "the record has something to show"


def without_memory(part: Any, path: str = "") -> Any:
    if not isinstance(part, dict):
        return part
    kept = {name: value for name, value in part.items() if not is_memory(f"{path}{name}")}
    return {name: without_memory(value, f"{path}{name}.") for name, value in kept.items()}


def test_client_pages_and_views_name_no_field_of_the_memory() -> None:
    """A view could still take the raw status; then it would have to name a field."""
    own = {name for name in memory_fields() if "." not in name}
    rooms = ("client/trainium_client", "contract/trainium_contract/pages", "contract/trainium_contract/views")
    files = [path for room in rooms for path in sorted((ROOT / room).rglob("*.py"))]
    assert len(files) > 50
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in own
    ]
    assert found == []


if __name__ == "__main__":
    FIELDS.write_text("\n".join(rows()) + "\n", encoding="utf-8")
    sys.stdout.write(f"{FIELDS} is written\n")
