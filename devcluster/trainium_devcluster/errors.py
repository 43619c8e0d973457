"""The one exception of the development cluster.

Its text is a sentence for a person: what went wrong, where, and what to do about it. The command line prints it and
ends with a non-zero code.
"""

from __future__ import annotations


class ClusterError(Exception):
    """The development cluster cannot do what was requested; the message has the reason and the remedy."""
