"""The settings that must not change between the runs of one history: their digest, and their comparison with a root's.

Guarantees:
- A checkpoint of another model, other data or another format is refused by name; the run never silently starts over.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from trainium_contract.wire.checkpoint_manifest import parse_step
from trainium_trainer.checkpoint.errors import UnusableCheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainium_trainer.checkpoint.root.survey import Survey

_MAX_DIFFERENCES = 3


def refuse_foreign(checkpoints: Survey, location: str, settings: Mapping[str, Any], config_digest: str) -> None:
    """Raise UnusableCheckpointError when the newest checkpoint is of another version of the trainer or of another run.

    `settings` and `config_digest` are this run's. A converted checkpoint has no digest and only some settings; only
    those are compared.
    """
    newest = checkpoints.committed[0].step if checkpoints.committed else -1
    for name, problem in checkpoints.other_versions.items():
        if (parse_step(name) or -1) > newest:
            raise UnusableCheckpointError(
                f"{location}: {problem}: continue with that version, or choose another checkpoint.path"
            )
    if not checkpoints.committed:
        return
    manifest = checkpoints.committed[0].manifest
    if manifest.config_digest == config_digest:
        return
    converted = not manifest.config_digest
    own_settings = {name: value for name, value in settings.items() if name in manifest.settings or not converted}
    differing = format_differences(manifest.settings, own_settings)
    if differing or not converted:
        raise UnusableCheckpointError(
            f"{location}/step-{newest} was written with other settings ({differing or 'model, data or seed'}): go back "
            "to those settings, or choose another checkpoint.path (of a job checkpoint.storage.subPath) for a new run"
        )


def hash_settings(settings: Mapping[str, Any]) -> str:
    """Return a hex digest of JSON values that does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def format_differences(stored: Mapping[str, Any], own_settings: Mapping[str, Any]) -> str:
    """Describe at most three differences, as `model.hiddenSize is 64 there and 128 here`; empty without any."""
    before, now = dict(_flatten(stored)), dict(_flatten(own_settings))
    names = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    texts = [f"{name} is {_format_value(before, name)} there and {_format_value(now, name)} here" for name in names]
    more = len(texts) - _MAX_DIFFERENCES
    return ", ".join(texts[:_MAX_DIFFERENCES]) + (f", and {more} more" if more > 0 else "")


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _format_value(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return "absent"
    text = str(values[name])
    return f"{text[:12]}…" if len(text) > 40 else text
