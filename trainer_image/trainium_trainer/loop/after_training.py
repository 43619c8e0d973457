"""The stages after the last step, in the same processes: artifacts, then the evaluation.

Guarantees:
- The last step is committed before.
- Both stages read storage and nothing of a rank's memory, so that a fault repeats a stage and no step.
- A process that is asked to leave does so at once, since nothing would be lost.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from trainium_contract.status.results import ArtifactReport, EvaluationFigure, RunStage
from trainium_trainer.artifacts.stage import kinds_of, write_artifacts, write_milestones
from trainium_trainer.artifacts.writer import together
from trainium_trainer.peers import Peers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trainium_contract.trainer.config import TrainingConfig
    from trainium_trainer.backends.base import Mesh
    from trainium_trainer.monitor.progress import ProgressWriter
    from trainium_trainer.trackers.process import TrackerProcess
    from trainium_trainer.weights.initial import InitialWeights

_log = logging.getLogger("trainium.after")


def has_stages(config: TrainingConfig) -> bool:
    """Return whether anything follows the last step."""
    return bool(kinds_of(config)) or config.evaluate.enabled


def run_stages(
    config: TrainingConfig,
    mesh: Mesh,
    progress: ProgressWriter,
    *,
    step: int,
    begin: InitialWeights,
    tokenizer: Path,
    node_rank: int,
    trained_loss: float | None,
    trackers: TrackerProcess | None = None,
) -> None:
    """Write the artifacts of the last step, measure and push them. Collective. Raises UserError, StorageError.

    `node_rank` is this process's number within its node, `trained_loss` the training model's newest validation loss.
    """
    with progress.pulse.saving, progress.pulse.work_with_collectives:  # a peer's last save may take longer than a step
        peers = Peers.open(mesh.rank, mesh.world_size, node_rank, waiting=progress.pulse.peers)
    alive: Callable[[], None] = lambda: progress.stage(RunStage.EXPORT)  # noqa: E731 - one line
    write_milestones(config, peers, progress, base=begin.base, tokenizer=tokenizer, beat=alive)
    artifacts = write_artifacts(
        config, config.checkpoint.path, step, peers, progress, base=begin.base, tokenizer=tokenizer
    )
    for artifact in artifacts if mesh.rank == 0 else ():
        _log.info("%s of step %d: %s", artifact.kind, artifact.step, artifact.path)
        if trackers is not None:
            trackers.link(artifact)
    if config.evaluate.enabled:
        _evaluate(config, artifacts, mesh, peers, progress, trained_loss)
    push = config.artifacts.push
    if push is None:
        return
    from trainium_trainer.artifacts.push import push_artifact  # noqa: PLC0415 - imports the library of the hub

    (address, *_) = together(peers, (lambda: push_artifact(push, artifacts, alive)) if peers.rank == 0 else None)
    if mesh.rank == 0:
        _log.info("pushed to %s", address)


def _evaluate(
    config: TrainingConfig,
    artifacts: tuple[ArtifactReport, ...],
    mesh: Mesh,
    peers: Peers,
    progress: ProgressWriter,
    trained_loss: float | None,
) -> None:
    from trainium_trainer.evaluate.stage import evaluate_artifacts  # noqa: PLC0415 - imports transformers

    result = evaluate_artifacts(
        config, artifacts, peers=peers, progress=progress, device=mesh.device.type, trained_loss=trained_loss
    )
    if mesh.rank == 0 and result is not None:
        _log.info("evaluation: %s", ", ".join(_format_figure(figure) for figure in result.figures))


def _format_figure(figure: EvaluationFigure) -> str:
    """`perplexity 54.7 -> 25.6`."""
    before, after = ("none" if value is None else f"{value:.4g}" for value in (figure.before, figure.after))
    return f"{figure.name} {before} -> {after}"
