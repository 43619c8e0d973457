"""The stages after the last step, in the same processes: artifacts, then the evaluation.

Guarantees:
- The last step is committed before the stages begin.
- Both stages read storage only, not the memory of a rank, so that a fault repeats a stage and no step.
- A process that is asked to stop exits at once, because nothing would be lost.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from trainium_contract.status.results import ArtifactReport, EvaluationFigure, RunStage
from trainium_trainer.artifacts.stage import list_artifact_kinds, write_artifacts, write_milestones
from trainium_trainer.artifacts.writer import compute_on_first_rank
from trainium_trainer.peers import Peers

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_trainer.loop.setup import Run

_log = logging.getLogger("trainium.after")


def run_stages(run: Run, node_rank: int) -> None:
    """Write, evaluate and push the artifacts of the last step. Collective. Raises UserError, StorageError.

    `node_rank` is this process's number within its node.
    """
    config, progress, mesh = run.config, run.progress, run.backend.mesh
    base, tokenizer = run.initial_weights.base, run.data.tokenizer
    if not list_artifact_kinds(config) and not config.evaluate.enabled:
        return
    run.stop.exit_on_request()
    with progress.pulse.saving(), progress.pulse.work_with_collectives:  # a peer may save for longer than a step
        peers = Peers.open(mesh.rank, mesh.world_size, node_rank, waiting=progress.pulse.waiting_for_peers)
    alive: Callable[[], None] = lambda: progress.enter_stage(RunStage.EXPORT)  # noqa: E731 - one line
    write_milestones(config, peers, progress, base=base, tokenizer=tokenizer, heartbeat=alive)
    artifacts = write_artifacts(
        config, config.checkpoint.path, run.position.step, peers, progress, base=base, tokenizer=tokenizer
    )
    for artifact in artifacts if mesh.rank == 0 else ():
        _log.info("%s of step %d: %s", artifact.kind, artifact.step, artifact.path)
        if run.trackers is not None:
            run.trackers.link(artifact)
    if config.evaluate.enabled:
        _evaluate(run, artifacts, peers)
    push = config.artifacts.push
    if push is None:
        return
    from trainium_trainer.artifacts.push import push_artifact  # noqa: PLC0415 - imports the library of the hub

    address = compute_on_first_rank(peers, lambda: push_artifact(push, artifacts, alive))
    if mesh.rank == 0:
        _log.info("pushed to %s", address)


def _evaluate(run: Run, artifacts: tuple[ArtifactReport, ...], peers: Peers) -> None:
    from trainium_trainer.evaluate.stage import evaluate_artifacts  # noqa: PLC0415 - imports transformers

    result = evaluate_artifacts(
        run.config,
        artifacts,
        peers=peers,
        progress=run.progress,
        device=run.backend.mesh.device.type,
        trained_loss=run.validation_loss,
    )
    if peers.rank == 0 and result is not None:
        _log.info("evaluation: %s", ", ".join(_format_figure(figure) for figure in result.figures))


def _format_figure(figure: EvaluationFigure) -> str:
    """Format a figure: `perplexity 54.7 -> 25.6`."""
    before, after = ("none" if value is None else f"{value:.4g}" for value in (figure.before, figure.after))
    return f"{figure.name} {before} -> {after}"
