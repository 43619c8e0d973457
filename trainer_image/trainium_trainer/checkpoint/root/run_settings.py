"""PURE. The settings that must not change between the runs of one history: their digest, and how two sets differ."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_MOST_DIFFERENCES = 3
INITIALIZATION = "initialization"
"""Which version of the initial weights a run began with; recorded, not compared: a run that goes on draws none."""


def settings_digest(settings: Mapping[str, Any]) -> str:
    """Hex digest, the same for equal settings in any order; values must be such that JSON can hold."""
    compared = {name: value for name, value in settings.items() if name != INITIALIZATION}
    return hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).hexdigest()


def as_begun(settings: Mapping[str, Any], recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that goes on from a checkpoint: it began as the checkpoint's `recorded` ones say.

    Version 1 was not recorded.
    """
    return {**settings, INITIALIZATION: recorded.get(INITIALIZATION, 1)} if INITIALIZATION in settings else {**settings}


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """What differs, for a sentence: `model.hiddenSize is 64 there and 128 here`, at most three; empty when nothing."""
    before, now = dict(_flat(theirs)), dict(_flat(ours))
    compared = sorted((before.keys() | now.keys()) - {INITIALIZATION})
    names = [name for name in compared if before.get(name) != now.get(name)]
    texts = [f"{name} is {_shown(before, name)} there and {_shown(now, name)} here" for name in names]
    more = len(texts) - _MOST_DIFFERENCES
    return ", ".join(texts[:_MOST_DIFFERENCES]) + (f", and {more} more" if more > 0 else "")


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return "absent"
    text = str(values[name])
    return f"{text[:12]}…" if len(text) > 40 else text
