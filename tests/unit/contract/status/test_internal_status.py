"""The internal and the public status have no common field, and no view reads an internal field."""

import ast
from pathlib import Path
from typing import Any

import pytest

from trainium_contract.job import GoodputStatus, IdleNodesStatus, TrainingJobStatus
from trainium_contract.status.internal import InternalGoodput, InternalIdleNodes, InternalStatus, internal_fields
from trainium_contract.status.ledger import PublicGoodput
from trainium_contract.status.public import PublicIdleNodes, PublicStatus

ROOT = Path(__file__).parents[4]


def test_these_fields_are_internal_and_all_others_are_public() -> None:
    assert internal_fields() == {
        "activity", "committedStep", "failures", "gang", "leavingSince", "nextPodOrdinal", "refusedWrites",
            "startFailures",
        "waitingSince",
        "goodput.countedStep", "goodput.earlierNodeSeconds", "goodput.earlierSeconds", "goodput.starting",
        "goodput.window",
        "idleNodes.askedAt", "idleNodes.failedRequests", "idleNodes.retryAt",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("whole", "public", "internal"),
    [
        (TrainingJobStatus, PublicStatus, InternalStatus),
        (GoodputStatus, PublicGoodput, InternalGoodput),
        (IdleNodesStatus, PublicIdleNodes, InternalIdleNodes),
    ],
)
def test_the_parts_have_no_field_in_common_and_are_the_whole(whole: Any, public: Any, internal: Any) -> None:
    assert public.model_fields.keys() & internal.model_fields.keys() == set()
    assert public.model_fields.keys() | internal.model_fields.keys() == whole.model_fields.keys()


def test_client_pages_and_views_read_no_internal_field() -> None:
    """A view that reads the raw status has to name a field."""
    names = {name for name in internal_fields() if "." not in name}
    folders = ("client/trainium_client", "contract/trainium_contract/pages", "contract/trainium_contract/views")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 30
    reads = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert reads == []
