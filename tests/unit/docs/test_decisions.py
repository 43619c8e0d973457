"""Each decision has a status and the parts that let somebody reverse it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

RECORDS = sorted((Path(__file__).parents[3] / "docs/decisions").glob("*.md"))
PARTS = ["Context", "Options", "Decision", "Consequences", "Evidence"]


def test_no_two_decisions_have_one_number() -> None:
    assert len({path.name[:4] for path in RECORDS}) == len(RECORDS)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_a_decision_has_a_title_with_its_number_a_status_and_all_parts_in_order(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    title, _, status, *_ = text.splitlines()
    assert title.startswith(f"# {path.name[:4]}: ")
    assert re.match(r"Status: (accepted|proposed)\b", status)
    assert re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE) == PARTS
