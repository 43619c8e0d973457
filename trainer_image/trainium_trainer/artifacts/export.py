"""Export a durable checkpoint as a Hugging Face folder or a peft adapter; merge an adapter into its base.

The checkpoint describes its model.
"""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from trainium_contract.trainer.addresses import is_address
from trainium_contract.trainer.artifacts import ArtifactKind, ArtifactPrecision
from trainium_contract.trainer.data import TokenizerConfig
from trainium_contract.trainer.tuning import TuningConfig
from trainium_trainer.artifacts.inputs import ArtifactInputs, create_merge_inputs
from trainium_trainer.artifacts.small_files import check_tokenizer, list_tokenizer_files
from trainium_trainer.artifacts.store import ArtifactStore
from trainium_trainer.artifacts.writer import write_artifact
from trainium_trainer.checkpoint.root.selection import choose_checkpoint, explain_damage, parse_shape
from trainium_trainer.data.tokens.tokenizer import TOKENIZER_FILE, count_entries, find_tokenizer_file
from trainium_trainer.exits import UserError
from trainium_trainer.peers import Peers
from trainium_trainer.storage import open_storage
from trainium_trainer.storage.protocol import Retry
from trainium_trainer.weights.adapter import AdapterWeights
from trainium_trainer.weights.base import BaseWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainium_trainer.checkpoint.root.survey import CommittedCheckpoint


def export(
    root: str,
    folder: Path | str,
    *,
    step: int | None = None,
    precision: ArtifactPrecision = ArtifactPrecision.BFLOAT16,
    tokenizer: Path | None = None,
    base: str | None = None,
    kind: ArtifactKind = ArtifactKind.MODEL,
    max_file_bytes: int | None = None,
    heartbeat: Callable[[float], None] = lambda _: None,
) -> int:
    """Export the checkpoint of `step` (the newest for None) below `root` to `folder`; return its step.

    Both may be s3://bucket/prefix. `base` is the initial model, needed if the run trained only a part of it. An
    interrupted export is continued by the next one with the same arguments. Raises UserError if there is no such
    checkpoint, if it is damaged or of an unknown model, if the base is missing or another one, or if the folder is not
    empty; StorageError if a store fails.
    """
    file = find_tokenizer_file(TokenizerConfig(path=str(tokenizer))) if tokenizer is not None else None
    storage, retry = open_storage(root), Retry()
    checkpoint = choose_checkpoint(storage, root, step, milestones=True)
    shape, tuning = parse_shape(checkpoint), _read_tuning(checkpoint)
    if file is not None:
        check_tokenizer(file, shape.vocab_size - shape.vocab_padding)
    with explain_damage(root):
        if kind is ArtifactKind.ADAPTER and "tuning" not in checkpoint.manifest.settings:
            raise UserError(f"{root}: the run trained no adapter: leave out --adapter to export the model")
        inputs = ArtifactInputs.from_checkpoint(
            storage,
            checkpoint,
            retry,
            tuning=tuning,
            base=_open_base(checkpoint, root, base),
            seed=int(checkpoint.manifest.settings.get("seed", 0)),
            tokenizer=file,
            records=None if is_address(root) else Path(root),
        )
        if not inputs.trained.names:
            raise UserError(f"{checkpoint.folder} holds no weights: name the root of a training run")
        artifact_plan = inputs.plan_artifact(kind, precision, max_file_bytes)
        write_artifact(artifact_plan, ArtifactStore(str(folder)), Peers(0, 1), heartbeat=heartbeat)
    return checkpoint.step


def merge(
    base: str,
    adapter: str,
    folder: Path | str,
    *,
    precision: ArtifactPrecision = ArtifactPrecision.BFLOAT16,
    max_file_bytes: int | None = None,
    heartbeat: Callable[[float], None] = lambda _: None,
) -> None:
    """Write the model at `base` with the peft adapter at `adapter` merged into it; all may be s3://bucket/prefix.

    Raises UserError if one of them is unusable, if they do not match, or if the folder is not empty; StorageError if a
    store fails.
    """
    weights = BaseWeights.open(base, field="--base")
    tuned = AdapterWeights.open(adapter, field="--adapter", tied=weights.shape.tie_embeddings)
    shape = tuned.compute_shape(weights.shape)
    tuned.check_base(shape, weights)
    with _open_tokenizer(tuned) as tokenizer:
        if tokenizer is not None and count_entries(tokenizer) > shape.vocab_size:
            raise UserError(
                f"--adapter {adapter}: its tokenizer has {count_entries(tokenizer)} entries, but the model at --base "
                f"has {shape.vocab_size} rows, none for the new tokens: export the model of the run that made "
                f"it, or take {TOKENIZER_FILE} out of the folder to keep the base's"
            )
        artifact_plan = create_merge_inputs(tuned, weights, tokenizer).plan_artifact(
            ArtifactKind.MODEL, precision, max_file_bytes
        )
        write_artifact(artifact_plan, ArtifactStore(str(folder)), Peers(0, 1), heartbeat=heartbeat)


@contextmanager
def _open_tokenizer(adapter: AdapterWeights) -> Iterator[Path | None]:
    """Copy the tokenizer of an adapter, which may have tokens and a template that the base lacks."""
    names = list_tokenizer_files(adapter.source)
    if TOKENIZER_FILE not in names:
        yield None
        return
    with tempfile.TemporaryDirectory() as copy:
        for name in names:
            file = Path(copy) / name
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(adapter.source.read(name))
        yield Path(copy) / TOKENIZER_FILE


def _read_tuning(checkpoint: CommittedCheckpoint) -> TuningConfig:
    try:
        return TuningConfig.model_validate(checkpoint.manifest.settings.get("tuning", {}))
    except ValidationError as error:
        raise UserError(
            f"{checkpoint.folder} does not record how it was tuned: export it with the version that wrote it"
        ) from error


def _open_base(checkpoint: CommittedCheckpoint, root: str, base: str | None) -> BaseWeights | None:
    """Open the initial model of the run. Raises UserError if it is needed and missing, or another one."""
    recorded = checkpoint.manifest.settings.get("weights")
    if base is None:
        if recorded is not None and _read_tuning(checkpoint).freezes:
            raise UserError(
                f"{root}: the checkpoints hold only what was trained: name the model that the run began with "
                "(model.weights) by --base"
            )
        return None
    weights = BaseWeights.open(base, field="--base")
    if weights.digest != recorded:
        raise UserError(f"--base {base}: is not the model that the run in {root} began with: name that one")
    return weights
