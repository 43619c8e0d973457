"""The last stage of a job: evaluate the result and compare it with the initial model.

Guarantees:
- All ranks call it with the same arguments, because it is collective.
- `evaluation.json` and `evaluation.md` appear atomically.
- A finished evaluation is read instead of repeated, unless models, data or settings differ.
- The training state is not used.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from trainium_contract.accelerators import Device
from trainium_contract.models.parameters import count_parameters
from trainium_contract.status.results import ArtifactReport, EvaluationFigure, RunStage
from trainium_contract.trainer.artifacts import ArtifactKind
from trainium_trainer.artifacts.card import add_evaluation
from trainium_trainer.artifacts.store import ArtifactStore
from trainium_trainer.artifacts.writer import compute_on_first_rank
from trainium_trainer.evaluate.answering.folder import ModelLocations, open_local_folder
from trainium_trainer.evaluate.check_folder import find_folder_problem
from trainium_trainer.evaluate.compare import EvaluationSettings, compare
from trainium_trainer.evaluate.held_out import read_held_out_examples
from trainium_trainer.evaluate.memory import count_readers, read_available_bytes
from trainium_trainer.evaluate.metrics import compute_perplexity
from trainium_trainer.evaluate.report import JSON_NAME, MARKDOWN_NAME, EvaluationResult
from trainium_trainer.evaluate.tasks import list_compared_models, measure_tasks, refuse_missing_harness
from trainium_trainer.weights.base import BaseWeights
from trainium_trainer.weights.folder import open_shape

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    """Raise UserError at the start of a run if its last stage could not run tasks; elsewhere tasks are skipped."""
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
    """Evaluate the artifacts of a run, and write the result next to them and into their cards; None without artifacts.

    The model is evaluated if there is one, else the adapter applied to `model.weights`. See `RunEvaluation`.
    Collective.
    """
    locations = {artifact.kind: artifact.path for artifact in artifacts}
    model, adapter = locations.get(ArtifactKind.MODEL), None
    if model is None:
        model, adapter = config.model.weights, locations.get(ArtifactKind.ADAPTER)
        if model is None or adapter is None:
            return None
    evaluation = RunEvaluation(
        config=config,
        models=ModelLocations(model=model, adapter=adapter, base=config.model.weights),
        output=(adapter or model).rstrip("/").rpartition("/")[0],
        peers=peers,
        progress=progress,
        device=device,
        trained_loss=trained_loss,
        cards=tuple(artifact.path for artifact in artifacts),
    )
    return evaluation.run()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvaluation:
    """The evaluation of a run's result; equal on all ranks. Folders and `output` are paths or s3://bucket/prefix."""

    config: TrainingConfig
    models: ModelLocations
    """The models; the base is compared unless `evaluate.before` is off."""
    output: str
    """The folder of the result."""
    peers: Peers
    progress: ProgressWriter
    device: str = "cpu"
    """The kind of device that the run trains on, by torch's name."""
    trained_loss: float | None = None
    """The training model's mean loss on what is held back: where `transformers` does not run (Neuron) the perplexity
    follows from it, and the folder is checked by a forward pass on the host.
    """
    cards: tuple[str, ...] = ()
    """The artifacts whose model card gets the table."""

    def run(self) -> EvaluationResult:
        """Evaluate the models, write the result and return it on every rank. Collective.

        Raises UserError and StorageError.
        """
        config, peers, progress, store = self.config, self.peers, self.progress, ArtifactStore(self.output)
        progress.enter_stage(RunStage.EVALUATE)
        models = self.models if config.evaluate.before else replace(self.models, base=None)
        identity = compute_on_first_rank(peers, lambda: _compute_identity(config, models, self.device))
        earlier = compute_on_first_rank(peers, lambda: _read_earlier_result(store, identity))
        if earlier is not None:
            result = earlier
        elif self.device in _RUN_TRANSFORMERS:
            if config.data.validation is not None or config.evaluate.tasks is None:
                result = self._compare(models)
            else:
                result = EvaluationResult(model=models.name, base=models.base, examples=0)
            if config.evaluate.tasks is not None:
                result = self._add_tasks(result, config.evaluate.tasks, models, store)
        else:
            result = self._evaluate_without_transformers(models)
        result = result.model_copy(update={"identity": identity})
        if peers.rank == 0:
            if earlier is None:
                store.write(MARKDOWN_NAME, result.to_markdown().encode())
                store.write(JSON_NAME, result.to_json().encode())  # last, because it is read again
            for card in self.cards:
                add_evaluation(card, result.to_markdown())
            store.remove_drafts()
            progress.record_evaluation(result.figures)
        peers.barrier()
        progress.enter_stage(RunStage.EVALUATE, 1.0)
        return result

    def _compare(self, models: ModelLocations) -> EvaluationResult:
        """Return the figures of the models on the examples that are held back. Collective."""
        needed = count_parameters(open_shape(models.model)) * _FLOAT32_BYTES
        fitting = count_readers(needed, read_available_bytes()) if self.device == "cpu" else self.peers.size
        settings = EvaluationSettings(
            generation=self.config.evaluate.generation,
            device=Device(self.device),
            loads_model=self.peers.node_rank < fitting,
        )
        held_out = read_held_out_examples(self.config.data, self.config.evaluate.samples)
        heartbeat = partial(self.progress.enter_stage, RunStage.EVALUATE)
        return compare(models, held_out, settings, self.peers, heartbeat=heartbeat)

    def _add_tasks(
        self, result: EvaluationResult, tasks: TasksConfig, models: ModelLocations, store: ArtifactStore
    ) -> EvaluationResult:
        """Return the result with the figures of tasks, which rank 0 computes. Collective."""

        def measure() -> TaskReport:
            heartbeat = partial(self.progress.enter_stage, RunStage.EVALUATE, 0.5)
            run = measure_tasks(list_compared_models(models), tasks, device=Device(self.device), heartbeat=heartbeat)
            if tasks.keep_samples:
                store.write(SAMPLES_NAME, run.samples.encode())
            return run.report

        return result.add_tasks(compute_on_first_rank(self.peers, measure))

    def _evaluate_without_transformers(self, models: ModelLocations) -> EvaluationResult:
        """Return the result that is possible without `transformers`. Collective."""
        notes = [_LIMITED, *([_NO_TASKS] if self.config.evaluate.tasks is not None else [])]
        problem = ""
        if self.peers.rank == 0 and models.adapter is None:
            heartbeat = partial(self.progress.enter_stage, RunStage.EVALUATE, 0.5)
            problem = find_folder_problem(models.model, models.base, heartbeat=heartbeat)
        problem = self.peers.gather(problem)[0]
        notes += [f"{problem}."] if problem else []
        figures: tuple[EvaluationFigure, ...] = ()
        if self.trained_loss is not None:
            figures = (EvaluationFigure(name="perplexity", after=compute_perplexity(-self.trained_loss, 1)),)
        return EvaluationResult(
            model=models.name,
            examples=0,
            computed="computed by the training model",
            generation=self.config.evaluate.generation,
            figures=figures,
            notes=tuple(notes),
        )


def _compute_identity(config: TrainingConfig, models: ModelLocations, device: str) -> str:
    """Return a digest of everything on which the figures depend."""
    folders = [BaseWeights.open(folder).digest for folder in (models.model, models.base) if folder is not None]
    facts = {
        "models": folders,
        "adapter": None if models.adapter is None else _digest_adapter(models.adapter),
        "data": config.data.to_wire(),
        "evaluate": config.evaluate.to_wire(),
        "device": device,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _digest_adapter(adapter: str) -> str:
    digest = hashlib.sha256()
    with open_local_folder(adapter) as folder:
        for file in sorted(folder.glob("adapter_*")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _read_earlier_result(store: ArtifactStore, identity: str) -> EvaluationResult | None:
    """Return an earlier result with the same identity; None if there is none."""
    result = store.read_message(JSON_NAME, EvaluationResult)
    return result if result is not None and result.identity == identity else None
