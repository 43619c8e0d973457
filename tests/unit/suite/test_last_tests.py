"""Resources that a group of tests shares are closed after its last test, and not before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.testing.suite.last_tests import close_after_last, find_last_tests, for_group


class Item:
    """A test of a group, or of none."""

    def __init__(self, config: Any, group: str = "") -> None:
        self.config = config
        self._mark = pytest.mark.xdist_group(group).mark if group else None

    def get_closest_marker(self, name: str) -> Any:
        assert name == "xdist_group"
        return self._mark


def test_each_group_is_closed_after_its_last_test_whatever_runs_between() -> None:
    config: Any = SimpleNamespace(stash=pytest.Stash())
    closed: list[str] = []
    items: list[Any] = [Item(config, group) for group in ("a", "b", "a", "", "b", "a", "")]
    find_last_tests(config, items)
    for group in ("a", "b"):
        for_group(config, group).callback(closed.append, group)
    seen = []
    for item in items:
        close_after_last(item)
        seen.append("".join(closed))
    assert seen == ["", "", "", "", "b", "ba", "ba"]


def test_what_is_open_when_the_session_ends_early_is_closed_with_it() -> None:
    config: Any = SimpleNamespace(stash=pytest.Stash())
    closed: list[str] = []
    with for_group(config, "a"):
        for_group(config, "a").callback(closed.append, "a")
        assert closed == []
    assert closed == ["a"]
