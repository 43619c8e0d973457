"""Provide the programs of the development cluster: from the cache, else downloaded, else built."""

from trainium_devcluster.binaries.cache import Binaries, ensure_binaries, is_cached
from trainium_devcluster.binaries.catalog import (
    CLUSTER_PROGRAMS,
    DEFINITION_PROGRAMS,
    FLEET_PROGRAMS,
    KUEUE_PROGRAMS,
    S3_PROGRAMS,
    Program,
)

__all__ = [
    "CLUSTER_PROGRAMS",
    "DEFINITION_PROGRAMS",
    "FLEET_PROGRAMS",
    "KUEUE_PROGRAMS",
    "S3_PROGRAMS",
    "Binaries",
    "Program",
    "ensure_binaries",
    "is_cached",
]
