"""Assign tests to lanes: all tests of a group run in one lane, in their order.

The path of a test determines its group, because the process that distributes tests does not collect them.
pytest-xdist's own `xdist_group` appends the group to the id of a test. With pytest 9.2 and pytest-xdist 3.8 it has no
effect: tests of a group would run in any lane, and each lane would start the shared clusters and processes.
"""

from xdist.scheduler import LoadGroupScheduling  # type: ignore[import-untyped]

CLUSTER = "cluster"
"""Tests of the cluster with nodes."""
DEFINITION = "definition"
"""Tests of the API server without nodes."""
AGENTS = "agents"
"""Tests whose agents are forked from one process that has imported torch."""
RANKS = "ranks"
"""Tests whose ranks are forked from one process, and that compare with the same uninterrupted runs."""
TUNING = "tuning"
"""Tests of RANKS that fine-tune a model of transformers; with RANKS in one lane they would take longest."""
FORKS = "forks"
"""Tests whose processes are forked by `tests.testing.trainer.fork_server`."""

_GROUPS_BY_PREFIX = {
    "tests/cluster/node/": CLUSTER,
    "tests/cluster/training/": CLUSTER,
    "tests/cluster/definition/": DEFINITION,
    "tests/wire/agent/": AGENTS,
    "tests/unit/trainer/backends/test_network_interface": FORKS,
    "tests/unit/trainer/compile/test_precompile": FORKS,
    "tests/unit/weights/test_base": FORKS,
    "tests/unit/evaluate/test_stage": FORKS,
    "tests/unit/worker/test_dcp": FORKS,
    "tests/unit/artifacts/": FORKS,
    "tests/unit/checkpoint/": FORKS,
    "tests/unit/data/": FORKS,
    "tests/unit/trainer/loop/test_after_training": TUNING,
    "tests/unit/trainer/loop/test_family_layouts": TUNING,
    "tests/unit/trainer/loop/test_preferences_training": TUNING,
    "tests/unit/trainer/loop/test_tune": TUNING,
    "tests/unit/trainer/loop/test_tuning": TUNING,
    "tests/unit/trainer/loop/": RANKS,
    "tests/unit/trainer/backends/": RANKS,
    "tests/unit/trainer/configuration/test_open_files": RANKS,
}
"""Groups by the start of the path; the first match counts."""


def group_of(test: str) -> str:
    """Return the group of a test: that of its shared cluster or processes, or its file."""
    file = test.partition("::")[0]
    return next((group for prefix, group in _GROUPS_BY_PREFIX.items() if prefix in file), file)


class LaneScheduling(LoadGroupScheduling):  # type: ignore[misc]
    """Assigns whole groups to lanes."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
