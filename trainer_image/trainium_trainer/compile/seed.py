"""What `train` does about compilation before a device library is imported: fill the node's cache from the shared one.

Invariants: one process of a node copies and the others wait for it; a shared cache that cannot be used costs a warning
and compiling again, never the run; extraction mode, where outputs mean nothing, never reaches the training loop.
"""

from __future__ import annotations

import fcntl
import logging
import os
from typing import TYPE_CHECKING

from trainium_trainer.compile import places
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_trainer.configuration.config import Settings

_EXTRACTION = "NEURON_EXTRACT_GRAPHS_ONLY"
_log = logging.getLogger("trainium.compile")


def refuse_extraction(environment: Mapping[str, str] = os.environ) -> None:
    """Raise UserError under neuron_parallel_compile: training would save what was never computed."""
    if environment.get(_EXTRACTION, "0") not in {"", "0"}:
        raise UserError(
            f"{_EXTRACTION} is set (neuron_parallel_compile does that): results would mean nothing, and be saved; use "
            "`trainium-trainer precompile`, which writes nothing but compiled graphs"
        )


def fill(settings: Settings) -> None:
    """Copy the graphs of this run's size from the shared cache, where both caches are folders."""
    shared, local = places.shared_cache(settings.config), places.local_cache(settings.config)
    if shared is None or local is None:
        return
    key = places.key_of(settings)
    try:
        local.folder.mkdir(parents=True, exist_ok=True)
        with (local.folder / ".trainium-fill").open("a") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)  # ends with the process
            if local.has(key):
                return
            entry = shared.fetch(key, local)
    except OSError as error:
        _log.warning("the shared cache of compiled graphs cannot be used (%s); compiling where needed", error)
        return
    if entry is None:
        _log.info("compiled graphs: none are shared for this size (key %s); compiling where needed", key)
    else:
        _log.info("compiled graphs: %d files of key %s copied in", len(entry.files), key)
