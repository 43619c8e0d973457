"""Text for status, conditions and events stays within its limit and keeps both ends."""

from __future__ import annotations

import pytest

from trainium_operator.plan.model.text import SENTENCE_LIMIT, listed, sentence


@pytest.mark.parametrize("limit", [SENTENCE_LIMIT, 101, 20])
def test_a_long_text_is_cut_in_the_middle_to_its_limit(limit: int) -> None:
    whole = "cause " + "x" * (limit - 12) + " advice"
    assert sentence(whole[1:], limit) == whole[1:], "as long as the limit"
    cut = sentence(whole, limit)
    assert len(cut) == limit
    assert cut.startswith("caus")
    assert " ... " in cut
    assert cut.endswith("advice")


def test_of_many_names_the_first_are_listed_and_the_others_counted() -> None:
    assert listed(("a", "b", "c")) == "a, b, c"
    assert listed(("a", "b", "c", "d", "e")) == "a, b, c and 2 more"
