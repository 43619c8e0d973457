"""The programs of the development cluster: found in the cache, else downloaded, else built."""

from trainium_devcluster.binaries.cache import Binaries, ensure_binaries
from trainium_devcluster.binaries.catalog import Program

__all__ = ["Binaries", "Program", "ensure_binaries"]
