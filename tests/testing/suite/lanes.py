"""Which lane a test runs in: tests of one group are one lane's, in their order.

By the file alone, since the process that divides them does not collect. xdist's own way, a mark whose name it puts
behind the test's id, does nothing with a pytest whose ids cannot be set (9.2 with xdist 3.8): each test then goes to
any lane, and each lane has its own clusters, operators and undisturbed runs.
"""

from xdist.scheduler import LoadGroupScheduling  # type: ignore[import-untyped]

CLUSTER = "cluster"
"""Tests of the cluster with nodes."""
DEFINITION = "definition"
"""Tests of the API server without nodes."""
AGENTS = "agents"
"""Tests whose agents are forked from one process that has imported torch."""
RANKS = "ranks"
"""Tests whose ranks are forked from one process, and that compare with the same undisturbed runs."""
TUNING = "tuning"
"""Those of them that tune a model of transformers; both groups in one lane would take longer than all other tests."""
FORKS = "forks"
"""Tests whose processes are forked by `tests.testing.trainer.fork_server`."""

_SHARED = {
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
"""Groups by the start of a test's name; the first that fits."""


def group_of(test: str) -> str:
    """Return the group of a test: one that shares processes or a cluster, or its file."""
    file = test.partition("::")[0]
    return next((group for start, group in _SHARED.items() if start in file), file)


class LaneScheduling(LoadGroupScheduling):  # type: ignore[misc]
    """Gives each lane whole groups."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
