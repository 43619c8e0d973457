"""Checkpoints of an elastic trainer on storage, which appear complete or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from safetensors import SafetensorError
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

import trainium_worker
from trainium_worker.hooks.elastic.identity import Identity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_RECORD = "elastic.json"
"""The file of a checkpoint with the `Identity` of its run."""
_INCOMPLETE = ".incomplete"
"""The folder, beside the checkpoints, in which one is written."""
_REPLACED = "replaced"
"""The folder, in that one, to which a checkpoint of the same step is moved."""


def find_checkpoint(
    output_dir: str, checkpoint: str | bool | None, all_gather: Callable[[Any], list[Any]]
) -> tuple[int, Path | None]:
    """Return step and folder of the newest checkpoint that all ranks can read; -1 and None if there is none.

    checkpoint: one that the script names. Collective.
    """
    folders: dict[int, Path] = {}
    given = [Path(checkpoint)] if isinstance(checkpoint, (str, os.PathLike)) else []
    for folder in [*given, *Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")]:
        with contextlib.suppress(OSError, ValueError, KeyError):
            folders[json.loads((folder / TRAINER_STATE_NAME).read_text())["global_step"]] = folder
    readable = all_gather(set(folders))
    newest, common = max(set().union(*readable), default=-1), set.intersection(*readable)
    step = max(common, default=-1)
    if newest != step:
        blind = next(rank for rank, steps in enumerate(readable) if newest not in steps)
        trainium_worker.notice(
            f"checkpoint {newest} in {output_dir} is not used, because rank {blind} cannot read it: the output_dir "
            "must be on storage that all nodes share"
        )
    return step, folders.get(step)


def read_identity(folder: Path) -> Identity | None:
    """Return the identity of the run of a checkpoint; None if a trainer that was not elastic wrote it."""
    record = folder / _RECORD
    return Identity.parse(json.loads(record.read_text()), str(folder)) if record.is_file() else None


def check_version(folder: Path, place: str, saved: Identity | None) -> None:
    """Raise ValueError if a trainer's state has fields that this version of transformers does not know."""
    state = json.loads((folder / TRAINER_STATE_NAME).read_text())
    unknown = sorted(state.keys() - {field.name for field in fields(TrainerState)})
    if unknown:
        then = f"{saved.transformers} then" if saved is not None else "unknown then"
        raise ValueError(
            f"{place} was saved by another version of transformers: {then}, {transformers.__version__} now, which does "
            f"not know {', '.join(unknown)}. Start with the version that the run had, or choose another output_dir"
        )


@contextlib.contextmanager
def explain_unreadable(checkpoint: str | None) -> Iterator[None]:
    """Raise ValueError with the remedy if a checkpoint that is loaded in the block is damaged or of another model."""
    try:
        yield
    except (EOFError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
        lines = str(error).strip().splitlines()
        if "size mismatch" in str(error) or "key(s) in state_dict" in str(error):
            raise ValueError(
                f"{checkpoint} is of another model: {lines[-1].strip()} Create the model as when the run started, or "
                "choose another output_dir"
            ) from error
        if type(error) is RuntimeError and "archive" not in str(error):
            raise  # of a collective, for instance
        reason = lines[0].partition(". ")[0] if lines else "end of file"
        raise ValueError(
            f"{checkpoint} cannot be read ({reason}): delete it, and the run resumes from the checkpoint before it"
        ) from error


@contextlib.contextmanager
def write_aside(trainer: Any, trial: Any, identity: Identity) -> Iterator[Path]:
    """Let the trainer write its checkpoint in the block aside, and rename it once all ranks have written.

    Yields the final folder. Collective.
    """
    args, step = trainer.args, trainer.state.global_step
    folder = Path(trainer._get_output_dir(trial))
    aside = folder / _INCOMPLETE
    name = f"{PREFIX_CHECKPOINT_DIR}-{step}"
    if args.should_save:
        shutil.rmtree(aside, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    trainer._get_output_dir = lambda trial: str(aside)  # noqa: ARG005 - the trainer's method
    trainer._push_from_checkpoint = lambda checkpoint_folder: None  # noqa: ARG005 - the trainer's method
    try:
        yield folder / name
    finally:
        del trainer._get_output_dir, trainer._push_from_checkpoint
    state = trainer.state
    if state.best_model_checkpoint == str(aside / name):
        state.best_model_checkpoint = str(folder / name)
        if args.should_save:
            state.save_to_json(str(aside / name / TRAINER_STATE_NAME))
    trainer.accelerator.wait_for_everyone()
    if args.should_save:
        (aside / name / _RECORD).write_text(json.dumps(asdict(identity)))
        with contextlib.suppress(FileNotFoundError):
            (folder / name).rename(aside / _REPLACED)
        (aside / name).rename(folder / name)
        shutil.rmtree(aside, ignore_errors=True)
        rotate_checkpoints(
            output_dir=str(folder),
            save_total_limit=args.save_total_limit,
            best_model_checkpoint=state.best_model_checkpoint,
            use_mtime=False,
        )
    trainer.accelerator.wait_for_everyone()
    if args.push_to_hub:
        trainer._push_from_checkpoint(str(folder / name))
