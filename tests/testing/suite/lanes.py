"""Which lane a test runs in: tests of one group are one lane's, in their order.

By the file alone, since the process that divides them does not collect. xdist's own way, a mark whose name it puts
behind the test's id, does nothing with a pytest whose ids cannot be set (9.2 with xdist 3.8): each test then goes to
any lane, and each lane has its own clusters, operators and undisturbed runs.
"""

from __future__ import annotations

from xdist.scheduler import LoadGroupScheduling  # type: ignore[import-untyped]

CLUSTER = "cluster"
"""Tests of the cluster with nodes."""
DEFINITION = "definition"
"""Tests of the API server without nodes."""
WHEELS = "wheels"
"""Tests of the wheels of all packages, which take longer to build than to read."""

_SHARED = {
    "tests/cluster/node/": CLUSTER,
    "tests/cluster/training/": CLUSTER,
    "tests/cluster/definition/": DEFINITION,
    "tests/unit/packages/test_declared.py": WHEELS,
    "tests/unit/packages/test_wheels.py": WHEELS,
}


def group_of(test: str) -> str:
    """The group of a test's id: that of its folder, or its file."""
    file = test.partition("::")[0]
    return next((group for folder, group in _SHARED.items() if folder in file), file)


class LaneScheduling(LoadGroupScheduling):  # type: ignore[misc]
    """Gives each lane whole groups."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
