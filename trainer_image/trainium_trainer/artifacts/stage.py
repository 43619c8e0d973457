"""The stage after the last step: all ranks write the run's artifacts in parallel, from its durable checkpoint.

Below the root of the artifacts (`artifacts.path`, or `artifacts` next to the checkpoints) a step has a folder with
`adapter` and `model`.

Guarantees:
- Values come from the committed checkpoint of the step and from the base, never from a rank's memory, so a fault
  repeats this stage and not the training.
- Complete artifacts are not written again.
- Files of other programs are not changed: the folder with the next free number is used instead.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING

from trainium_contract.status.results import ArtifactReport, RunStage
from trainium_contract.trainer.artifacts import ArtifactKind
from trainium_contract.trainer.tuning import TuningMethod
from trainium_contract.wire.checkpoint_manifest import folder_name
from trainium_trainer.artifacts.inputs import ArtifactInputs
from trainium_trainer.artifacts.manifest import PLAN_NAME, UNFINISHED, WritePlan
from trainium_trainer.artifacts.store import ArtifactStore
from trainium_trainer.artifacts.writer import compute_on_first_rank, is_free, read_manifest, write_artifact
from trainium_trainer.checkpoint.errors import UnusableCheckpointError
from trainium_trainer.checkpoint.root.metrics_copy import find_records_folder
from trainium_trainer.checkpoint.root.selection import explain_damage
from trainium_trainer.checkpoint.root.survey import CommittedCheckpoint, survey
from trainium_trainer.peers import Peers
from trainium_trainer.storage import open_storage
from trainium_trainer.storage.protocol import Retry, Storage
from trainium_trainer.weights.base import BaseWeights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from trainium_contract.trainer.config import TrainingConfig
    from trainium_trainer.checkpoint.durable.durable_tier import AfterMilestone
    from trainium_trainer.checkpoint.interfaces import MeshCoordinates
    from trainium_trainer.monitor.progress import ProgressWriter

DEFAULT_FOLDER = "artifacts"
_NEWEST_MILESTONES = 2
_NAMES = {ArtifactKind.ADAPTER: "adapter", ArtifactKind.MODEL: "model"}


class _BackgroundProgress:
    """Progress of artifacts that are written during training, which do not change the stage."""

    def __init__(self, progress: ProgressWriter, heartbeat: Callable[[], None]) -> None:
        self._heartbeat = heartbeat
        self.record_artifact = progress.record_artifact

    def enter_stage(self, stage: RunStage, done: float = 0.0) -> None:  # noqa: ARG002 - as `ProgressWriter` has it
        """Send a heartbeat."""
        self._heartbeat()


def list_artifact_kinds(config: TrainingConfig) -> tuple[ArtifactKind, ...]:
    """Return the artifacts that the run writes; `Adapter` is for LoRA only."""
    lora = config.tuning.method is TuningMethod.LORA
    kinds = config.artifacts.kinds
    if kinds is None:
        if lora:
            return (ArtifactKind.ADAPTER, ArtifactKind.MODEL)
        return (ArtifactKind.MODEL,) if config.model.weights is not None else ()
    return tuple(kind for kind in dict.fromkeys(kinds) if lora or kind is not ArtifactKind.ADAPTER)


def find_artifacts_root(config: TrainingConfig, checkpoint_root: str) -> str:
    """Return the root folder of the artifacts."""
    return config.artifacts.path or f"{checkpoint_root.rstrip('/')}/{DEFAULT_FOLDER}"


def write_artifacts(
    config: TrainingConfig,
    checkpoint_root: str,
    step: int,
    peers: Peers,
    progress: ProgressWriter | _BackgroundProgress,
    *,
    base: BaseWeights | None = None,
    tokenizer: Path | None = None,
    retry: Retry | None = None,
) -> tuple[ArtifactReport, ...]:
    """Write the configured artifacts from the durable checkpoint of `step`; every rank returns the same. Collective.

    `base` is the model of `model.weights`, opened here if omitted; `tokenizer` is the `tokenizer.json` of the run. A
    later start, with any number of ranks, continues an interrupted one. Raises UserError if the checkpoint or the base
    cannot be used, StorageError if a store fails.
    """
    kinds = list_artifact_kinds(config)
    if not kinds:
        return ()
    progress.enter_stage(RunStage.EXPORT)
    retry = retry or Retry()
    if base is None and config.model.weights is not None:
        base = BaseWeights.open(config.model.weights)
    storage = open_storage(checkpoint_root)
    chosen = compute_on_first_rank(peers, lambda: _find_committed(storage, step, retry))
    reports: list[ArtifactReport] = []
    with explain_damage(checkpoint_root):
        inputs = ArtifactInputs.from_checkpoint(
            storage,
            chosen,
            retry,
            tuning=config.tuning,
            base=base,
            seed=config.seed,
            tokenizer=tokenizer,
            records=find_records_folder(config.checkpoint),
        )
        for number, kind in enumerate(kinds):
            plan = inputs.plan_artifact(kind, config.artifacts.precision)
            find = partial(_find_folder, find_artifacts_root(config, checkpoint_root), kind, step, plan.identity, retry)
            folder = compute_on_first_rank(peers, find)
            heartbeat = partial(_report_share, progress, number, len(kinds))
            manifest = write_artifact(plan, ArtifactStore(folder, retry), peers, heartbeat=heartbeat)
            report = ArtifactReport(
                kind=kind,
                path=folder,
                step=step,
                bytes=manifest.size,
                digest=manifest.digest,
                tokens=chosen.manifest.tokens,
            )
            reports.append(report)
            if peers.rank == 0:
                progress.record_artifact(report)
    return tuple(reports)


def _report_share(progress: ProgressWriter | _BackgroundProgress, number: int, count: int, done: float) -> None:
    """Report the share of the export that is done, `done` of artifact `number` of `count`."""
    progress.enter_stage(RunStage.EXPORT, (number + done) / count)


def create_milestone_hook(
    config: TrainingConfig,
    mesh: MeshCoordinates,
    progress: ProgressWriter,
    *,
    base: BaseWeights | None,
    tokenizer: Path,
) -> AfterMilestone | None:
    """Return the hook that writes a milestone's artifacts in the background, on all ranks; None without artifacts."""
    if not config.artifacts.at_milestones or not list_artifact_kinds(config):
        return None

    def write(_: int, group: ProcessGroup | None, heartbeat: Callable[[], None]) -> None:
        peers = Peers(mesh.rank, mesh.world_size, group=group)
        write_milestones(config, peers, progress, base=base, tokenizer=tokenizer, heartbeat=heartbeat)

    return write


def write_milestones(
    config: TrainingConfig,
    peers: Peers,
    progress: ProgressWriter,
    *,
    base: BaseWeights | None = None,
    tokenizer: Path | None = None,
    heartbeat: Callable[[], None] = lambda: None,
) -> None:
    """Write missing artifacts of milestones; `heartbeat` is called at intervals. Collective.

    The newest milestone, the one before it, and those with started artifacts are checked, because a rank may have been
    killed after a milestone. For others it is unknown whether artifacts were never written or were deleted. Raises the
    errors of `write_artifacts`.
    """
    if not config.artifacts.at_milestones or not list_artifact_kinds(config):
        return
    root, retry, background = config.checkpoint.path, Retry(), _BackgroundProgress(progress, heartbeat)
    output_root = find_artifacts_root(config, root)
    for step in compute_on_first_rank(peers, lambda: _find_incomplete_milestones(root, output_root, retry)):
        write_artifacts(config, root, step, peers, background, base=base, tokenizer=tokenizer, retry=retry)


def _find_incomplete_milestones(root: str, output_root: str, retry: Retry) -> list[int]:
    """Return the steps of milestones whose artifacts may be incomplete, oldest first."""
    storage = open_storage(root)
    steps = [milestone.step for milestone in retry.run(lambda: survey(storage), root).milestones]

    def has_started(step: int) -> bool:
        store = ArtifactStore(f"{output_root.rstrip('/')}/{folder_name(step)}", retry)
        return any(store.list(f"{entry.name}/{UNFINISHED}") for entry in store.list() if entry.is_folder)

    return sorted(step for number, step in enumerate(steps) if number < _NEWEST_MILESTONES or has_started(step))


def _find_committed(storage: Storage, step: int, retry: Retry) -> CommittedCheckpoint:
    """Return the checkpoint of a step; a milestone first, because milestones are never removed."""
    checkpoints = retry.run(lambda: survey(storage), storage.location)
    for checkpoint in (*checkpoints.milestones, *checkpoints.committed):
        if checkpoint.step == step:
            return checkpoint
    problems = "; ".join(checkpoints.damaged.values())
    raise UnusableCheckpointError(
        f"{storage.location}: there is no committed checkpoint of step {step} to make artifacts from"
        f"{f' ({problems})' if problems else ''}: start again, the run writes one"
    )


def _find_folder(root: str, kind: ArtifactKind, step: int, identity: str, retry: Retry) -> str:
    """Return the folder of an artifact: the one where it was started or is complete, else the first free one."""
    for number in itertools.count(1):
        suffix = "" if number == 1 else f"-{number}"
        location = f"{root.rstrip('/')}/{folder_name(step)}/{_NAMES[kind]}{suffix}"
        store = ArtifactStore(location, retry)
        done, plan = read_manifest(store, kind), store.read_message(PLAN_NAME, WritePlan)
        if identity in {other.identity for other in (done, plan) if other is not None} or is_free(store):
            break
    return location
