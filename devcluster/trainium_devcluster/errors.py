"""Define the exception of the development cluster.

Its text is a sentence for users: what failed, where, and the remedy. The command line prints it and ends with a
non-zero code.
"""

from __future__ import annotations


class ClusterError(Exception):
    """A request to the development cluster failed; the message has the reason and the remedy.

    The standard library suffices for it, because `scripts/setup.sh` builds programs before any package is installed.
    """
