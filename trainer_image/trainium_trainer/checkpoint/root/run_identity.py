"""PURE. Whether the checkpoints below a root are those of this run, as far as they say.

Invariant: a checkpoint of another model, other data or a newer format is refused by name and never started over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_contract.wire.checkpoint_manifest import step_of
from trainium_trainer.checkpoint.errors import UnusableCheckpointError
from trainium_trainer.checkpoint.root.run_settings import differences

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_trainer.checkpoint.root.survey import Survey


def refuse_foreign(found: Survey, where: str, settings: Mapping[str, Any], config_digest: str) -> None:
    """UnusableCheckpointError when the newest checkpoint is of another version of the trainer or of another run.

    `settings` and `config_digest` are this run's. A converted checkpoint has no digest: it knows some settings only,
    and the run is held to those.
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
            "those settings, or choose another checkpoint.path (of a job checkpoint.storage.subPath) to begin anew"
        )
