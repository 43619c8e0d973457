"""The stage after the last step: all ranks write the run's artifacts side by side, from its durable checkpoint.

Below the place of the artifacts (`artifacts.path`, or `artifacts` beside the checkpoints) a step has a folder, and in
it `adapter` and `model`. Invariants: the numbers come from the committed checkpoint of the step and from the base,
never from a rank's memory, so a fault repeats this stage and not the training; what is complete is not made again;
nothing that others put there is touched: then a folder with the next free number is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.status.results import ArtifactReport, RunStage
from trainium_contract.trainer.artifacts import ArtifactKind
from trainium_contract.trainer.tuning import TuningMethod
from trainium_contract.wire.checkpoint_manifest import folder_name
from trainium_trainer.artifacts.making import Making
from trainium_trainer.artifacts.manifest import UNFINISHED
from trainium_trainer.artifacts.store import kept
from trainium_trainer.artifacts.writer import is_free, read_manifest, read_plan, together, write_artifact
from trainium_trainer.checkpoint.errors import UnusableCheckpointError
from trainium_trainer.checkpoint.root.metrics_copy import records_folder
from trainium_trainer.checkpoint.root.selection import explain_damage
from trainium_trainer.checkpoint.root.survey import Committed, survey
from trainium_trainer.peers import Peers
from trainium_trainer.storage.opening import open_storage
from trainium_trainer.storage.protocol import Retry, Storage
from trainium_trainer.weights.base import BaseWeights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from trainium_contract.trainer.config import TrainingConfig
    from trainium_trainer.checkpoint.durable.durable_tier import AfterMilestone
    from trainium_trainer.checkpoint.interfaces import MeshPlace
    from trainium_trainer.monitor.progress import ProgressWriter

DEFAULT_FOLDER = "artifacts"
_NEWEST_MILESTONES = 2
_NAMES = {ArtifactKind.ADAPTER: "adapter", ArtifactKind.MODEL: "model"}


class _Aside:
    """For artifacts that are written while training goes on: the stage stays what it is."""

    def __init__(self, progress: ProgressWriter, beat: Callable[[], None]) -> None:
        self._beat = beat
        self.artifact = progress.artifact

    def stage(self, stage: RunStage, done: float = 0.0) -> None:  # noqa: ARG002 - as `ProgressWriter` has it
        """Send a heartbeat."""
        self._beat()


def kinds_of(config: TrainingConfig) -> tuple[ArtifactKind, ...]:
    """Return the artifacts that the run writes; `Adapter` is for LoRA only."""
    lora = config.tuning.method is TuningMethod.LORA
    kinds = config.artifacts.kinds
    if kinds is None:
        if lora:
            return (ArtifactKind.ADAPTER, ArtifactKind.MODEL)
        return (ArtifactKind.MODEL,) if config.model.weights is not None else ()
    return tuple(kind for kind in dict.fromkeys(kinds) if lora or kind is not ArtifactKind.ADAPTER)


def place_of(config: TrainingConfig, checkpoint_root: str) -> str:
    """Return the folder below which artifacts are written."""
    return config.artifacts.path or f"{checkpoint_root.rstrip('/')}/{DEFAULT_FOLDER}"


def write_artifacts(
    config: TrainingConfig,
    checkpoint_root: str,
    step: int,
    peers: Peers,
    progress: ProgressWriter | _Aside,
    *,
    base: BaseWeights | None = None,
    tokenizer: Path | None = None,
    retry: Retry | None = None,
) -> tuple[ArtifactReport, ...]:
    """Write what the configuration asks for, from the durable checkpoint of `step`; every rank returns the same.

    `base` is what `model.weights` names, opened here when omitted; `tokenizer` is the `tokenizer.json` of the run.
    Collective; a later start of the ranks, of any number, resumes it where an earlier one was killed. Raises
    UserError when the checkpoint or the base cannot be used, StorageError when a store fails.
    """
    kinds = kinds_of(config)
    if not kinds:
        return ()
    progress.stage(RunStage.EXPORT)
    retry = retry or Retry()
    if base is None and config.model.weights is not None:
        base = BaseWeights.open(config.model.weights)
    storage = open_storage(checkpoint_root)
    chosen = together(peers, (lambda: _committed(storage, step, retry)) if peers.rank == 0 else None)[0]
    assert chosen is not None
    reports: list[ArtifactReport] = []
    with explain_damage(checkpoint_root):
        making = Making.of_checkpoint(
            storage,
            chosen,
            retry,
            tuning=config.tuning,
            base=base,
            seed=config.seed,
            tokenizer=tokenizer,
            records=records_folder(config.checkpoint),
        )
        for number, kind in enumerate(kinds):
            blueprint = making.blueprint(kind, config.artifacts.precision)
            root = place_of(config, checkpoint_root)
            place = together(peers, _finder(root, kind, step, blueprint.identity, retry) if peers.rank == 0 else None)
            assert place[0] is not None
            manifest = write_artifact(
                blueprint,
                open_storage(place[0]),
                peers,
                retry=retry,
                beat=lambda done, first=number: progress.stage(RunStage.EXPORT, (first + done) / len(kinds)),  # type: ignore[misc]
            )
            report = ArtifactReport(
                kind=kind,
                path=place[0],
                step=step,
                bytes=manifest.size,
                digest=manifest.digest,
                tokens=chosen.manifest.tokens,
            )
            reports.append(report)
            if peers.rank == 0:
                progress.artifact(report)
    return tuple(reports)


def at_milestones(
    config: TrainingConfig, mesh: MeshPlace, progress: ProgressWriter, *, base: BaseWeights | None, tokenizer: Path
) -> AfterMilestone | None:
    """Return the hook that writes a milestone's artifacts in the background, on all ranks; None without artifacts."""
    if not config.artifacts.at_milestones or not kinds_of(config):
        return None

    def write(_: int, group: ProcessGroup | None, beat: Callable[[], None]) -> None:
        peers = Peers(mesh.rank, mesh.world_size, group=group)
        write_milestones(config, peers, progress, base=base, tokenizer=tokenizer, beat=beat)

    return write


def write_milestones(
    config: TrainingConfig,
    peers: Peers,
    progress: ProgressWriter,
    *,
    base: BaseWeights | None = None,
    tokenizer: Path | None = None,
    beat: Callable[[], None] = lambda: None,
) -> None:
    """Write the artifacts of milestones that lack them; `beat` is called now and then. Collective.

    Those are the newest milestone, the one before it, and started ones: a rank may have been killed after it. For
    others it is unknown whether they were never written or were deleted. Raises what `write_artifacts` raises.
    """
    if not config.artifacts.at_milestones or not kinds_of(config):
        return
    root, retry, aside = config.checkpoint.path, Retry(), _Aside(progress, beat)
    steps = together(peers, (lambda: _lacking(root, place_of(config, root), retry)) if peers.rank == 0 else None)[0]
    for step in steps or ():
        write_artifacts(config, root, step, peers, aside, base=base, tokenizer=tokenizer, retry=retry)


def _lacking(root: str, place: str, retry: Retry) -> list[int]:
    """Return steps of the milestones whose artifacts may be incomplete, oldest first."""
    storage = open_storage(root)
    steps = [milestone.step for milestone in retry.run(lambda: survey(storage), root).milestones]

    def started(step: int) -> bool:
        folder = open_storage(f"{place.rstrip('/')}/{folder_name(step)}")
        names = [entry.name for entry in kept(lambda: folder.list(""), folder.location, retry) if entry.is_folder]
        return any(kept(lambda: folder.list(f"{name}/{UNFINISHED}"), folder.location, retry) for name in names)  # noqa: B023

    return sorted(step for number, step in enumerate(steps) if number < _NEWEST_MILESTONES or started(step))


def _committed(storage: Storage, step: int, retry: Retry) -> Committed:
    """Return the checkpoint of a step; a milestone first, because milestones are never removed."""
    found = retry.run(lambda: survey(storage), storage.location)
    for checkpoint in (*found.milestones, *found.committed):
        if checkpoint.step == step:
            return checkpoint
    problems = "; ".join(found.damaged.values())
    raise UnusableCheckpointError(
        f"{storage.location}: there is no committed checkpoint of step {step} to make artifacts from"
        f"{f' ({problems})' if problems else ''}: start again, the run writes one"
    )


def _finder(root: str, kind: ArtifactKind, step: int, identity: str, retry: Retry) -> Callable[[], str]:
    """Return the folder for an artifact: the one where it was started or is complete, else the first free one."""

    def find() -> str:
        number = 1
        while True:
            suffix = "" if number == 1 else f"-{number}"
            place = f"{root.rstrip('/')}/{folder_name(step)}/{_NAMES[kind]}{suffix}"
            storage = open_storage(place)
            done, plan = read_manifest(storage, kind, retry), read_plan(storage, retry)
            if identity in {found.identity for found in (done, plan) if found is not None}:
                return place
            if is_free(storage, retry):
                return place
            number += 1

    return find
