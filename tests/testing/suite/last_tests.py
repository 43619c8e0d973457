"""Close the shared resources of a group after its last test, not at the end of the session.

All tests of a group run in one lane, in the order of collection.

Guarantees:
- No resource of a group is closed before its last test has ended.
- No resource is open after the session.
"""

import contextlib
from collections.abc import Iterable

import pytest

_STACKS = pytest.StashKey[dict[str, contextlib.ExitStack]]()
_LAST = pytest.StashKey[dict[pytest.Item, str]]()


def exit_stack_of_group(config: pytest.Config, group: str) -> contextlib.ExitStack:
    """Return the exit stack of the resources of a group."""
    return config.stash.setdefault(_STACKS, {}).setdefault(group, contextlib.ExitStack())


def find_last_tests(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Record the last test of each group; the items are in the order in which they run."""
    last = {_group_of(item): item for item in items}
    config.stash[_LAST] = {item: group for group, item in last.items()}


def close_after_last(item: pytest.Item) -> None:
    """Close the resources of a group if this was its last test."""
    group = item.config.stash.get(_LAST, {}).get(item)
    if group is not None:
        exit_stack_of_group(item.config, group).close()


def _group_of(item: pytest.Item) -> str:
    mark = item.get_closest_marker("xdist_group")
    return str(mark.args[0]) if mark is not None else ""
