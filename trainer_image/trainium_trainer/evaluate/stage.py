"""The last stage of a job: the result is measured, beside the model that the run began from.

Invariants: collective, all ranks call it with the same arguments; `evaluation.json` and `evaluation.md` appear whole;
an evaluation that is done already is read, not done again, unless models, data or settings are others; nothing here
touches the training state.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from functools import partial
from typing import TYPE_CHECKING

from pydantic import ValidationError

from trainium_contract.models.parameters import count_parameters
from trainium_contract.status.results import ArtifactReport, EvaluationFigure, RunStage
from trainium_contract.trainer.artifacts import ArtifactKind
from trainium_trainer.artifacts.card import add_evaluation
from trainium_trainer.artifacts.store import kept
from trainium_trainer.artifacts.writer import together
from trainium_trainer.evaluate.answering.folder import ComputeDevice, Models, local_folder
from trainium_trainer.evaluate.check_folder import check_folder
from trainium_trainer.evaluate.compare import Asking, compare
from trainium_trainer.evaluate.memory import available_bytes, readers_that_fit
from trainium_trainer.evaluate.metrics import perplexity
from trainium_trainer.evaluate.questions import exam_of
from trainium_trainer.evaluate.report import JSON_NAME, MARKDOWN_NAME, EvaluationResult
from trainium_trainer.evaluate.tasks import columns_of, measure_tasks, refuse_missing_harness
from trainium_trainer.storage.opening import open_storage
from trainium_trainer.storage.protocol import Retry, Storage, read_small
from trainium_trainer.weights import BaseWeights, shape_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainium_contract.trainer.config import TrainingConfig
    from trainium_contract.trainer.evaluate import TasksConfig
    from trainium_trainer.evaluate.tasks import TaskReport
    from trainium_trainer.monitor.progress import ProgressWriter
    from trainium_trainer.peers import Peers

_RUN_TRANSFORMERS = frozenset({"cpu", "cuda"})
_FLOAT32_BYTES = 4
SAMPLES_NAME = "task-samples.jsonl"
_NO_TASKS = "The tasks were not run: serve the folder and run trainium-trainer evaluate --tasks --endpoint."
_LIMITED = (
    "No answers were generated, since transformers does not run on this device: the perplexity is the training model's "
    "own, and the folder was checked by a forward pass on the host."
)


def refuse_unmeasurable(device: str) -> None:
    """Raise UserError where the last stage could not run tasks, long before it; elsewhere they are left out."""
    if device in _RUN_TRANSFORMERS:
        refuse_missing_harness()


def evaluate_artifacts(
    config: TrainingConfig,
    artifacts: Sequence[ArtifactReport],
    *,
    peers: Peers,
    progress: ProgressWriter,
    device: str = "cpu",
    trained_loss: float | None = None,
) -> EvaluationResult | None:
    """Measure what a run has left behind, beside it and in its cards; None when there is nothing that can be asked.

    The model counts where there is one, else the adapter beside `model.weights`. See `run_evaluation`. Collective.
    """
    places = {artifact.kind: artifact.path for artifact in artifacts}
    model, adapter = places.get(ArtifactKind.MODEL), None
    if model is None:
        model, adapter = config.model.weights, places.get(ArtifactKind.ADAPTER)
        if model is None or adapter is None:
            return None
    return run_evaluation(
        config,
        model_folder=model,
        adapter_folder=adapter,
        base_folder=config.model.weights,
        peers=peers,
        progress=progress,
        output=(adapter or model).rstrip("/").rpartition("/")[0],
        device=device,
        trained_loss=trained_loss,
        cards=[artifact.path for artifact in artifacts],
    )


def run_evaluation(
    config: TrainingConfig,
    *,
    model_folder: str,
    base_folder: str | None,
    peers: Peers,
    progress: ProgressWriter,
    output: str,
    device: str = "cpu",
    adapter_folder: str | None = None,
    trained_loss: float | None = None,
    readers_per_node: int | None = None,
    cards: Sequence[str] = (),
) -> EvaluationResult:
    """Measure `model_folder`, and `base_folder` unless `evaluate.before` is off; write the result below `output`.

    The folders and `output` are paths or s3://bucket/prefix. With `adapter_folder` the result is that adapter beside
    `model_folder`, not merged. `device` is the kind that the run trains on (torch's name): where `transformers` does
    not run (Neuron) the perplexity follows from `trained_loss`, the training model's mean loss on what is held back,
    and the folder is checked by a forward pass on the host. `readers_per_node` is how many processes of a node load a
    model; omitted: as many as have room. `cards` are artifacts whose model card gets the table. Every rank returns the
    result. Collective. Raises UserError and StorageError.
    """
    progress.stage(RunStage.EVALUATE)
    storage, retry = open_storage(output), Retry()
    models = Models(model=model_folder, adapter=adapter_folder, base=base_folder if config.evaluate.before else None)
    found = ("", "")
    if peers.rank == 0:
        identity = _identity(config, models, device)
        found = (identity, _earlier(storage, retry, identity))
    identity, earlier = peers.gather(found)[0]
    if earlier:
        result = EvaluationResult.model_validate_json(earlier)
    elif device in _RUN_TRANSFORMERS:
        if config.data.validation is not None or config.evaluate.tasks is None:
            result = _measured(config, models, peers, progress, device, readers_per_node)
        else:
            result = EvaluationResult(model=models.name, base=models.base, examples=0)
        if config.evaluate.tasks is not None:
            result = _add_tasks(result, config.evaluate.tasks, models, peers, progress, device, storage)
    else:
        result = _limited(config, models, peers, progress, trained_loss)
    result = result.model_copy(update={"identity": identity})
    if peers.rank == 0:
        if not earlier:
            kept(lambda: storage.write(MARKDOWN_NAME, result.to_markdown().encode()), output, retry)
            kept(lambda: storage.write(JSON_NAME, result.to_json().encode()), output, retry)  # last: it counts
        for card in cards:
            add_evaluation(card, result.to_markdown(), retry)
        with contextlib.suppress(OSError):  # of an earlier start that was killed; nobody reads them
            storage.remove_drafts()
        progress.evaluation(result.figures)
    peers.barrier()
    progress.stage(RunStage.EVALUATE, 1.0)
    return result


def _identity(config: TrainingConfig, models: Models, device: str) -> str:
    """Return a digest of all that the figures depend on."""
    folders = [BaseWeights.open(folder).digest for folder in (models.model, models.base) if folder is not None]
    facts = {
        "models": folders,
        "adapter": None if models.adapter is None else _digest_of_adapter(models.adapter),
        "data": config.data.to_wire(),
        "evaluate": config.evaluate.to_wire(),
        "device": device,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _digest_of_adapter(adapter: str) -> str:
    digest = hashlib.sha256()
    with local_folder(adapter) as folder:
        for file in sorted(folder.glob("adapter_*")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _earlier(storage: Storage, retry: Retry, identity: str) -> str:
    """Return the result of an evaluation of the same things, as JSON; empty when there is none."""
    data = kept(lambda: read_small(storage, JSON_NAME), storage.location, retry)
    if data is not None:
        with contextlib.suppress(ValidationError):
            if EvaluationResult.model_validate_json(data).identity == identity:
                return data.decode()
    return ""


def _measured(
    config: TrainingConfig,
    models: Models,
    peers: Peers,
    progress: ProgressWriter,
    device: str,
    readers_per_node: int | None,
) -> EvaluationResult:
    if readers_per_node is None:
        needed = count_parameters(shape_of(models.model)) * _FLOAT32_BYTES
        readers_per_node = readers_that_fit(needed, available_bytes()) if device == "cpu" else peers.size
    asking = Asking(
        generation=config.evaluate.generation,
        device=ComputeDevice(device),
        reads=peers.node_rank < readers_per_node,
    )
    exam = exam_of(config.data, config.evaluate.samples)
    return compare(models, exam, asking, peers, beat=lambda done: progress.stage(RunStage.EVALUATE, done))


def _add_tasks(
    result: EvaluationResult,
    tasks: TasksConfig,
    models: Models,
    peers: Peers,
    progress: ProgressWriter,
    device: str,
    storage: Storage,
) -> EvaluationResult:
    """Return the result with the figures of tasks, which rank 0 computes. Collective."""

    def measure() -> TaskReport:
        alive = partial(progress.stage, RunStage.EVALUATE, 0.5)
        run = measure_tasks(columns_of(models), tasks, device=ComputeDevice(device), beat=alive)
        if tasks.keep_samples:
            kept(lambda: storage.write(SAMPLES_NAME, run.samples.encode()), storage.location, Retry())
        return run.report

    (report, *_) = together(peers, measure if peers.rank == 0 else None)
    assert report is not None
    return result.with_tasks(report)


def _limited(
    config: TrainingConfig, models: Models, peers: Peers, progress: ProgressWriter, trained_loss: float | None
) -> EvaluationResult:
    """Return the result that is possible without `transformers`."""
    notes = [_LIMITED, *([_NO_TASKS] if config.evaluate.tasks is not None else [])]
    problem = ""
    if peers.rank == 0 and models.adapter is None:
        alive: Callable[[], None] = lambda: progress.stage(RunStage.EVALUATE, 0.5)  # noqa: E731 - one line
        problem = check_folder(models.model, models.base, beat=alive).problem(models.model, models.base) or ""
    problem = peers.gather(problem)[0]
    notes += [f"{problem}."] if problem else []
    figures: tuple[EvaluationFigure, ...] = ()
    if trained_loss is not None:
        figures = (EvaluationFigure(name="perplexity", after=perplexity(-trained_loss, 1)),)
    return EvaluationResult(
        model=models.name,
        examples=0,
        computed="computed by the training model",
        generation=config.evaluate.generation,
        figures=figures,
        notes=tuple(notes),
    )
