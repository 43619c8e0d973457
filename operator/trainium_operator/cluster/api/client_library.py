"""The parts of the Kubernetes client library that are used here, without the rest of it.

Importing any part runs the `__init__` of the packages around it, which import all of the synchronous client, its models
and its tools: 9 MiB that nobody uses. Invariant: who has imported the whole library before keeps it as it is.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec

_AROUND = ("kubernetes", "kubernetes.aio")
"""Packages of which only what lies in them is needed, outermost first."""


def import_only_parts() -> None:
    """From now on an import of a part leaves the packages around it unread; call before the first one."""
    for name in _AROUND:
        if name in sys.modules:
            continue
        spec = find_spec(name)
        assert spec is not None  # a dependency of this package
        module = sys.modules[name] = module_from_spec(spec)  # known, and not executed
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
