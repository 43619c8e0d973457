"""Score two models on the same held-out examples, one after the other, in one process or in several, or a server."""

from __future__ import annotations

import contextlib
import gc
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_trainer.evaluate.answering.folder import (
    ComputeType,
    ModelFiles,
    ModelLocations,
    open_local_folder,
    open_model_files,
    open_models,
)
from trainium_trainer.evaluate.answering.generation import group_by_length
from trainium_trainer.evaluate.answering.loading import load
from trainium_trainer.evaluate.held_out import read_held_out_examples
from trainium_trainer.evaluate.report import EvaluationResult, build_figures, select_answers
from trainium_trainer.evaluate.scoring import ExampleScore, score_answer, score_model
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.accelerators import Device
    from trainium_contract.trainer.data import DataConfig
    from trainium_contract.trainer.evaluate import GenerationConfig
    from trainium_trainer.data.examples.held_out import HeldOutExamples
    from trainium_trainer.evaluate.answering.endpoint import Endpoint
    from trainium_trainer.peers import Peers


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """The settings of an evaluation."""

    generation: GenerationConfig
    device: Device | None = None
    precision: ComputeType = ComputeType.AUTO
    loads_model: bool = True
    """Whether this process loads models and evaluates a part of the batches; at least one rank must."""


def compare(
    models: ModelLocations,
    held_out: HeldOutExamples,
    settings: EvaluationSettings,
    peers: Peers,
    *,
    heartbeat: Callable[[float], None] = lambda _: None,
) -> EvaluationResult:
    """Return the figures of a model and of its base on every rank. Collective.

    `heartbeat` is called often with the completed fraction. Raises UserError and StorageError.
    """
    parts = 1 if models.base is None else 2
    notes: list[str] = []
    before: list[ExampleScore] = []
    base = models.base
    with contextlib.ExitStack() as stack:
        model_files = stack.enter_context(open_models(models, lambda: heartbeat(0.0)))
        if held_out.largest_token >= model_files.vocabulary:
            raise UserError(
                f"{models.name}: the examples have the token {held_out.largest_token}, but the model has "
                f"{model_files.vocabulary} rows: data.tokenizer is not that of the model"
            )
        after, computed = _score_on_ranks(
            model_files, held_out, settings, peers, heartbeat=lambda done: heartbeat(done / parts)
        )
        if not all(math.isfinite(score.log_likelihood) for score in after):
            notes.append("The model gives values that are not finite: do not use it.")
        if base is not None:
            folder = stack.enter_context(open_local_folder(base, lambda: heartbeat(1 / parts)))
            other = open_model_files(folder, tokenizer_from=model_files.adapter or model_files.path)
            if held_out.largest_token >= other.vocabulary:
                notes.append("The base does not know tokens that were added, so it was not asked.")
                base = None
            else:
                before, _ = _score_on_ranks(
                    other, held_out, settings, peers, heartbeat=lambda done: heartbeat((1 + done) / parts)
                )
                if before == after:
                    notes.append("Both models answer exactly alike: the tuning left no trace in the result.")
    return EvaluationResult(
        model=models.name,
        base=base,
        examples=len(held_out.examples),
        answer_tokens=sum(score.tokens for score in after),
        computed=computed,
        generation=settings.generation,
        figures=build_figures(before, after),
        notes=tuple(notes),
        answers=select_answers(held_out, before, after),
    )


def _score_on_ranks(
    model_files: ModelFiles,
    held_out: HeldOutExamples,
    settings: EvaluationSettings,
    peers: Peers,
    *,
    heartbeat: Callable[[float], None],
) -> tuple[list[ExampleScore], str]:
    """Return a model's scores of all examples, in order, and how it computed them, on every rank. Collective.

    The scores are bitwise equal for any number of ranks of one kind that share the batches.
    """
    readers = [rank for rank, loads_model in enumerate(peers.gather(settings.loads_model)) if loads_model]
    scores: list[ExampleScore] = []
    computed = ""
    if peers.rank in readers:
        batches = group_by_length(
            [len(example.prompt_ids) for example in held_out.examples], settings.generation.batch_size
        )
        # Whole batches, so that figures do not depend on the number of readers.
        batches = batches[readers.index(peers.rank) :: len(readers)]
        heartbeat(0.0)
        model = load(model_files, device=settings.device, precision=settings.precision)
        computed = f"computed in {str(model.network.dtype).removeprefix('torch.')} on {model.device.type}"
        scores = score_model(model, held_out, batches, settings.generation, heartbeat=heartbeat)
        del model
        gc.collect()  # the next model may not fit into memory as well
    gathered = peers.gather((scores, computed))
    scores = sorted((score for part, _ in gathered for score in part), key=lambda score: score.number)
    return scores, gathered[readers[0]][1]


def measure_endpoint(
    endpoint: Endpoint,
    data: DataConfig,
    samples: int,
    generation: GenerationConfig,
    *,
    heartbeat: Callable[[float], None],
) -> EvaluationResult:
    """Return the figures of a served model on held-out examples, from its answers only. Raises UserError."""
    held_out = read_held_out_examples(data, samples)
    if not held_out.has_answers:
        raise UserError("data.format is Text, which has no answers: measure the folder itself")
    with ThreadPoolExecutor(generation.batch_size) as pool:
        answered = pool.map(lambda example: endpoint.complete(example.prompt, generation), held_out.examples)
        scores = []
        for number, answer in enumerate(answered):
            scores.append(score_answer(held_out, number, answer.text))
            heartbeat(len(scores) / len(held_out.examples))
    return EvaluationResult(
        model=endpoint.model,
        examples=len(scores),
        computed=f"answered by {endpoint.url}",
        generation=generation,
        figures=build_figures([], scores),
        notes=("A server gives answers alone: no perplexity.",),
        answers=select_answers(held_out, [], scores),
    )
