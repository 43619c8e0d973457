"""PURE. The comparison of the checkpoints below a root with the settings of this run.

Guarantees:
- A checkpoint of another model, of other data or of another format is refused by name and never started over.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from trainium_contract.wire.checkpoint_manifest import step_of
from trainium_trainer.checkpoint.errors import UnusableCheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainium_trainer.checkpoint.root.survey import Survey

_MAX_DIFFERENCES = 3


def refuse_foreign(found: Survey, where: str, settings: Mapping[str, Any], config_digest: str) -> None:
    """Raise UnusableCheckpointError when the newest checkpoint is of another version of the trainer or of another run.

    `settings` and `config_digest` are this run's. A converted checkpoint has no digest: it knows some settings only,
    and the run is compared with those.
    """
    newest = found.committed[0].step if found.committed else -1
    for name, sentence in found.newer.items():
        if (step_of(name) or -1) > newest:
            raise UnusableCheckpointError(
                f"{where}: {sentence}: go on with that version, or choose another checkpoint.path"
            )
    if not found.committed:
        return
    manifest = found.committed[0].manifest
    if manifest.config_digest == config_digest:
        return
    converted = not manifest.config_digest
    ours = {name: value for name, value in settings.items() if name in manifest.settings or not converted}
    differing = differences(manifest.settings, ours)
    if differing or not converted:
        raise UnusableCheckpointError(
            f"{where}/step-{newest} was written with other settings ({differing or 'model, data or seed'}): go back to "
            "those settings, or choose another checkpoint.path (of a job checkpoint.storage.subPath) for a new run"
        )


def settings_digest(settings: Mapping[str, Any]) -> str:
    """Return a hex digest, the same for equal settings in any order; values must be such that JSON can hold."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Return what differs: `model.hiddenSize is 64 there and 128 here`, at most three; empty when nothing does."""
    before, now = dict(_flattened(theirs)), dict(_flattened(ours))
    names = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    texts = [f"{name} is {_shown(before, name)} there and {_shown(now, name)} here" for name in names]
    more = len(texts) - _MAX_DIFFERENCES
    return ", ".join(texts[:_MAX_DIFFERENCES]) + (f", and {more} more" if more > 0 else "")


def _flattened(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return "absent"
    text = str(values[name])
    return f"{text[:12]}…" if len(text) > 40 else text
