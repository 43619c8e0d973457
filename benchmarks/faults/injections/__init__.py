"""Inject the faults of all rows, which rows.yaml names by their functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.faults.injections import control, endings, machines, nodes, operator, pods, processes, roles, storage

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from benchmarks.faults.environment import FaultEnvironment

_MODULES = (control, endings, machines, nodes, operator, pods, processes, roles, storage)
INJECTIONS: dict[str, Callable[..., None]] = {
    name: value
    for module in _MODULES
    for name, value in vars(module).items()
    if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
}
"""Functions that take a `Run` and arguments, by name."""
CONTEXTS: dict[str, Callable[[FaultEnvironment], AbstractContextManager[None]]] = {
    "empty_cache": endings.create_empty_cache,
    "two_replicas": operator.run_two_replicas,
}
"""States of the cluster during the runs of a row, by name."""
