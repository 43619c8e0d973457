"""The targets by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.testing.fuzz.cluster_target import ClusterTarget
from tests.testing.fuzz.coordinator_target import CoordinatorTarget
from tests.testing.fuzz.spec_target import SpecTarget

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.testing.fuzz.target import Target

TARGETS: dict[str, Callable[[], Target]] = {
    "coordinator": CoordinatorTarget,
    "cluster": ClusterTarget,
    "spec": SpecTarget,
}
