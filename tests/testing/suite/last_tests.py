"""Close what several tests share after the last of them, not at the end of the session.

Tests that share something are a group: one test lane has all of a group, in the order in which they were collected.
Invariant: nothing of a group is closed before its last test is over, nor left open after the session.
"""

import contextlib
from collections.abc import Iterable

import pytest

_STACKS = pytest.StashKey[dict[str, contextlib.ExitStack]]()
_LAST = pytest.StashKey[dict[pytest.Item, str]]()


def exit_stack_of_group(config: pytest.Config, group: str) -> contextlib.ExitStack:
    """Return the exit stack of what the group shares."""
    return config.stash.setdefault(_STACKS, {}).setdefault(group, contextlib.ExitStack())


def find_last_tests(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Note the last test of each group; the items are in the order in which they run."""
    last = {_group_of(item): item for item in items}
    config.stash[_LAST] = {item: group for group, item in last.items()}


def close_after_last(item: pytest.Item) -> None:
    """Close what a group shared if this was its last test."""
    group = item.config.stash.get(_LAST, {}).get(item)
    if group is not None:
        exit_stack_of_group(item.config, group).close()


def _group_of(item: pytest.Item) -> str:
    mark = item.get_closest_marker("xdist_group")
    return str(mark.args[0]) if mark is not None else ""
