"""Each decision says whether it still holds, and who says that another is over is said so by that one too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DECISIONS = Path(__file__).parents[3] / "docs/decisions"
RECORDS = {path.name[:4]: path for path in sorted(DECISIONS.glob("[0-9]*.md"))}
STATUS = re.compile(r"^Status: (?=accepted|proposed|superseded by|amended by)(.+)$")
OTHER = re.compile(r"(superseded by|amended by|supersedes) \[(\d{4})\]\(([^)]+)\)")
WORDS = re.compile(r"superseded by|amended by|supersedes")
BACK = {"superseded by": "supersedes", "supersedes": "superseded by"}


def status(number: str) -> str:
    lines = RECORDS[number].read_text(encoding="utf-8").splitlines()
    found = STATUS.match(lines[2])
    assert found, (
        "the third line is `Status: accepted`, `proposed`, `superseded by [NNNN](file)` or `amended by [NNNN](file)`"
    )
    return found[1]


def others(number: str) -> set[tuple[str, str]]:
    return {(how, other) for how, other, _ in OTHER.findall(status(number))}


def test_no_two_decisions_have_one_number() -> None:
    assert len(RECORDS) == len(list(DECISIONS.glob("*.md")))


@pytest.mark.parametrize("number", RECORDS)
def test_each_decision_has_a_status_and_whoever_it_names_says_so_too(number: str) -> None:
    assert len(WORDS.findall(status(number))) == len(OTHER.findall(status(number))), "each names a record, with a link"
    for how, other, file in OTHER.findall(status(number)):
        assert RECORDS[other].name == file
        assert other != number
        if how in BACK:
            assert (BACK[how], number) in others(other), f"the status of {other} does not say {BACK[how]} {number}"
