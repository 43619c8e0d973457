"""A small fleet for the tests of this folder; they are skipped where kwok could not be built."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from trainium_devcluster.binaries import FLEET_PROGRAMS, is_cached
from trainium_devcluster.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

NODES = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if not is_cached(FLEET_PROGRAMS):
        pytest.skip("kwok is not built; `trainium-devcluster binaries --fleet` builds it once, in a minute or two")
    with Cluster.start(fleet=NODES, apiserver_args=("--disable-admission-plugins=TaintNodesByCondition",)) as cluster:
        yield cluster
