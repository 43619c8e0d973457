"""Compare models on the tasks of lm-evaluation-harness (the package lm-eval, an extra).

Guarantees:
- Figures equal those of `lm_eval run` on the same folder, number format, batch size and seeds.
- An artifact of a run is evaluated once on the same tasks, even if the command runs again with its report.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import importlib.util
import io
import json
import logging
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainium_contract.base import MessageModel
from trainium_contract.status.results import EvaluationFigure
from trainium_contract.trainer.evaluate import TasksConfig  # noqa: TC001 - pydantic reads annotations
from trainium_trainer.artifacts.manifest import MANIFEST_NAME, hash_json
from trainium_trainer.evaluate.answering.folder import (
    ComputeType,
    ModelLocations,
    open_local_folder,
    open_models,
    read_max_positions,
)
from trainium_trainer.evaluate.answering.loading import load
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trainium_contract.accelerators import Device
    from trainium_trainer.evaluate.answering.endpoint import Endpoint

_NEAR = 3
_MAX_REASON_CHARS = 300
_LONGEST_NAME = 192
_POSITIONS = 2048
_UNFILTERED = "none"


class TaskFigure(MessageModel):
    """A metric of a model on a task or a group of tasks."""

    task: str
    metric: str
    """The name of the metric, for instance `acc` or `exact_match`."""
    filter: str = ""
    """The filter by which lm-eval extracted answers, for instance `strict-match`; empty if there is only one."""
    shots: int | None = None
    questions: int | None = None
    value: float
    standard_error: float | None = None
    part: bool = False
    """Whether a group with this metric contains the task: tables omit it."""

    @property
    def name(self) -> str:
        """Return the displayed name of the metric."""
        return f"{self.metric} ({self.filter})" if self.filter else self.metric


class ModelFigures(MessageModel):
    """The figures of one model."""

    model: str
    computed: str
    """The number format and device, or the endpoint."""
    identity: str = ""
    """The digest of an artifact of a run and of the given task files; empty for other models, which may change."""
    figures: tuple[TaskFigure, ...]


class TaskReport(MessageModel):
    """The figures of models on the same tasks."""

    tasks: TasksConfig
    lm_eval: str
    """The version of lm-eval."""
    models: tuple[ModelFigures, ...]

    @property
    def compared(self) -> tuple[EvaluationFigure, ...]:
        """Return the figures of the last model, with those of the first if there are two."""
        columns = [
            {f"{figure.task} {figure.name}"[:_LONGEST_NAME]: figure for figure in model.figures if not figure.part}
            for model in self.models
        ]
        before = columns[0] if len(columns) > 1 else {}
        return tuple(
            EvaluationFigure(
                name=name,
                before=before[name].value if name in before else None,
                after=figure.value,
                standard_error=figure.standard_error,
            )
            for name, figure in columns[-1].items()
        )

    def to_json(self) -> str:
        """Return the contents of the file."""
        return self.model_dump_json(by_alias=True, exclude_none=True, indent=2) + "\n"

    def to_markdown(self) -> str:
        """Return a table with a column for each model."""
        columns = [
            {(figure.task, figure.name): figure for figure in model.figures if not figure.part} for model in self.models
        ]
        rows = {key: figure for column in columns for key, figure in column.items()}
        lines = [
            f"| task | measure | shots | questions | {' | '.join(model.model for model in self.models)} |",
            f"|---|---|---:|---:|{'---:|' * len(columns)}",
        ]
        for (task, name), any_figure in rows.items():
            cells = [_format_cell(column.get((task, name))) for column in columns]
            lines.append(f"| {task} | {name} | {any_figure.shots} | {any_figure.questions} | {' | '.join(cells)} |")
        computed = "; ".join(dict.fromkeys(model.computed for model in self.models))
        return "\n".join([*lines, "", f"Value ± standard error, by lm-eval {self.lm_eval}; {computed}."]) + "\n"


def _format_cell(figure: TaskFigure | None) -> str:
    if figure is None:
        return "-"
    error = "" if figure.standard_error is None else f" ± {figure.standard_error:.4f}"
    return f"{figure.value:.4f}{error}"


@dataclass(frozen=True, slots=True)
class TaskRun:
    """The figures of models and their samples."""

    report: TaskReport
    samples: str
    """JSON lines, one object per question and model; empty unless samples are kept."""


def refuse_missing_harness() -> None:
    """Raise UserError if lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "tasks need the package lm-eval, which is not installed here: pip install 'trainium-trainer[tasks]'"
        )


def measure_tasks(
    models: Sequence[ModelLocations],
    tasks: TasksConfig,
    *,
    device: Device | None = None,
    precision: ComputeType = ComputeType.AUTO,
    endpoint: Endpoint | None = None,
    earlier: TaskReport | None = None,
    keep: Callable[[TaskRun], None] = lambda _: None,
    heartbeat: Callable[[], None] = lambda: None,
) -> TaskRun:
    """Return the figures of models, one after the other; `heartbeat` is called at each forward pass.

    endpoint: its model is evaluated, and the folder of `models` holds its tokenizer. known: an earlier report, whose
    figures of artifacts are reused if the tasks are the same. keep: called with all figures after each model. Raises
    UserError and StorageError.
    """
    figures_by_model: list[ModelFigures] = []
    samples: list[str] = []
    refuse_missing_harness()
    harness = importlib.metadata.version("lm-eval")
    same = earlier is not None and (earlier.tasks, earlier.lm_eval) == (tasks, harness) and not tasks.keep_samples
    measured = (
        {model.identity: model for model in earlier.models if model.identity} if earlier is not None and same else {}
    )
    run = TaskRun(TaskReport(tasks=tasks, lm_eval=harness, models=()), "")
    with _silence_harness():
        loaded = _load_tasks(tasks)
        for model in models:
            identity = _compute_identity(model, tasks) if endpoint is None else ""
            if identity in measured:
                figures_by_model.append(measured[identity])
                continue
            _set_seeds(tasks, loaded)
            name = model.name if endpoint is None else endpoint.model
            opened = (
                _open_folder_model(model, tasks, device, precision, heartbeat)
                if endpoint is None
                else _open_endpoint_model(endpoint, model, tasks)
            )
            with opened as (network, computed):
                results = _run_harness(network, tasks, loaded, endpoint)
            figures = tuple(_iterate_figures(results))
            figures_by_model.append(ModelFigures(model=name, computed=computed, identity=identity, figures=figures))
            samples += _write_samples(name, results)
            keep(replace(run, report=run.report.model_copy(update={"models": tuple(figures_by_model)})))
    return TaskRun(run.report.model_copy(update={"models": tuple(figures_by_model)}), "".join(samples))


def read_report(path: Path) -> TaskReport | None:
    """Read the report in a file, or in the evaluation result of the file; None for anything else."""
    with contextlib.suppress(OSError, ValueError):
        document = json.loads(path.read_bytes())
        return TaskReport.model_validate(document.get("tasks") if "lmEval" not in document else document)
    return None


def list_compared_models(models: ModelLocations) -> list[ModelLocations]:
    """Return the models to compare, base first."""
    first = [ModelLocations(model=models.base)] if models.base is not None else []
    return [*first, ModelLocations(model=models.model, adapter=models.adapter)]


def _compute_identity(models: ModelLocations, tasks: TasksConfig) -> str:
    """Return the digest of an artifact on this machine and of the task files; empty for other models."""
    manifests = [Path(location) / MANIFEST_NAME for location in (models.model, models.adapter) if location is not None]
    if not manifests[-1].is_file():
        return ""
    files = sorted(Path(tasks.include_path).rglob("*.y*ml")) if tasks.include_path is not None else []
    return hash_json(location.read_text(errors="replace") for location in (*filter(Path.is_file, manifests), *files))


@contextlib.contextmanager
def _open_folder_model(
    models: ModelLocations,
    tasks: TasksConfig,
    device: Device | None,
    precision: ComputeType,
    heartbeat: Callable[[], None],
) -> Iterator[tuple[Any, str]]:
    """Yield lm-eval's model for a folder, and its number format and device."""
    from lm_eval.models.huggingface import HFLM  # noqa: PLC0415 - an extra

    with open_models(models, heartbeat) as files:
        model = load(files, device=device, precision=precision, recommended=True)
        model.network.register_forward_pre_hook(lambda *_: heartbeat())
        tokenizer = str(model.folder.tokenizer_folder)
        network = HFLM(pretrained=model.network, tokenizer=tokenizer, batch_size=tasks.batch_size)
        yield network, f"computed in {str(model.network.dtype).removeprefix('torch.')} on {model.device.type}"


@contextlib.contextmanager
def _open_endpoint_model(
    endpoint: Endpoint, tokenizer: ModelLocations, tasks: TasksConfig
) -> Iterator[tuple[Any, str]]:
    """Yield lm-eval's model for a server; without a tokenizer it can only generate."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI  # noqa: PLC0415 - an extra

    with open_local_folder(tokenizer.model) as folder:
        settings: dict[str, Any] = {"tokenizer_backend": "none"}
        if tokenizer.model:
            settings = {"tokenizer_backend": "huggingface", "tokenizer": str(folder)}
            settings["max_length"] = read_max_positions(folder) or _POSITIONS
        network = LocalCompletionsAPI(
            model=endpoint.model,
            base_url=f"{endpoint.url}/completions",
            num_concurrent=max(2, tasks.batch_size),  # a single request has no total time limit
            timeout=int(endpoint.seconds),
            **settings,
        )
        yield network, f"answered by {endpoint.url}"


@contextlib.contextmanager
def _silence_harness() -> Iterator[None]:
    """Silence lm-eval's progress logs, and its progress bars unless stderr is a terminal."""
    for name in ("lm_eval", "asyncio"):  # it also reports each pending request after an error
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
        yield


def _load_tasks(tasks: TasksConfig) -> dict[str, Any]:
    """Load lm-eval's tasks and groups with their data. Raises UserError."""
    from lm_eval.tasks import TaskManager  # noqa: PLC0415 - an extra

    folder = tasks.include_path
    if folder is not None and not Path(folder).is_dir():
        raise UserError(f"{folder}: there is no such folder: name one with task files by --include-path (includePath)")
    # Reading lm-eval's thousands of task files takes many seconds.
    manager = TaskManager(include_path=folder, include_defaults=False) if folder is not None else None
    if manager is None or not set(tasks.names) <= set(manager.all_subtasks):
        manager = TaskManager(include_path=folder)
    for name in tasks.names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, n=_NEAR)
            advice = f"did you mean {' or '.join(near)}?" if near else "lm_eval ls tasks lists them"
            raise UserError(f"{name}: lm-eval has no such task or group: {advice}")
    try:
        loaded: dict[str, Any] = manager.load(list(tasks.names))
    except Exception as error:  # the code of a task and the libraries of its data may raise anything
        reason = " ".join(str(error).split())[:_MAX_REASON_CHARS]
        raise UserError(
            f"tasks {', '.join(tasks.names)}: cannot be loaded ({reason}): correct the task file; data comes from the "
            "Hugging Face hub unless it is in the cache (HF_HOME) or in local files that a task file names"
        ) from error
    for task in loaded["tasks"].values():
        default_shots = task.get_config("num_fewshot")
        if default_shots != 0:  # as in lm-eval: a task that sets 0 is never asked with examples
            task.set_config(key="num_fewshot", value=(tasks.shots if tasks.shots is not None else default_shots) or 0)
    return loaded


def _set_seeds(tasks: TasksConfig, loaded: dict[str, Any]) -> None:
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED  # noqa: PLC0415 - an extra

    first, other = (tasks.seed, tasks.seed) if tasks.seed is not None else (DEFAULT_RANDOM_SEED, DEFAULT_OTHER_SEED)
    random.seed(first)
    np.random.seed(other)  # noqa: NPY002 - what tasks draw from
    torch.manual_seed(other)
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(seed=other)


def _run_harness(model: Any, tasks: TasksConfig, loaded: dict[str, Any], endpoint: Endpoint | None) -> dict[str, Any]:
    """Run lm-eval and return its results. Raises UserError for a task that it cannot run and a failing endpoint."""
    weighed = [name for name, task in loaded["tasks"].items() if task.OUTPUT_TYPE != "generate_until"]
    if endpoint is not None and weighed and model.tokenizer is None:
        raise UserError(f"{weighed[0]}: compares likelihoods of tokens: give also a MODEL folder with the tokenizer")
    from lm_eval.evaluator import evaluate  # noqa: PLC0415 - an extra

    try:
        return dict(
            evaluate(
                model,
                loaded,
                limit=tasks.limit,
                log_samples=tasks.keep_samples,
                apply_chat_template=tasks.chat_template,
                fewshot_as_multiturn=tasks.chat_template,
            )
        )
    except Exception as error:
        reason = " ".join((str(error) or type(error).__name__).split())[:_MAX_REASON_CHARS]
        if endpoint is not None:  # lm-eval may raise anything for unexpected answers
            raise UserError(
                f"{endpoint.url}: lm-eval cannot read its answers ({reason}): likelihoods need a server that returns "
                "them for the prompt (echo with logprobs), as vLLM does"
            ) from error
        if isinstance(error, ValueError):
            raise UserError(
                f"tasks {', '.join(tasks.names)}: lm-eval cannot run them ({reason}): correct or leave out the task"
            ) from error
        raise


def _iterate_figures(results: dict[str, Any]) -> Iterator[TaskFigure]:
    """Yield the metrics of lm-eval's results, groups before tasks."""
    groups = results.get("groups", {})
    parts = {child for group in groups for child in results["group_subtasks"][group]}
    for task, task_results in sorted(results["results"].items(), key=lambda item: item[0] not in groups):
        for key, value in task_results.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = task_results.get(f"{metric}_stderr,{filter_name}")
            yield TaskFigure(
                task=task,
                metric=metric,
                filter="" if filter_name == _UNFILTERED else filter_name,
                shots=results["n-shot"].get(task),
                questions=task_results.get("sample_len"),
                value=float(value),
                standard_error=float(error) if isinstance(error, (int, float)) else None,
                part=task in parts,
            )


def _write_samples(model: str, results: dict[str, Any]) -> Iterator[str]:
    for task, samples in results.get("samples", {}).items():
        for sample in samples:
            yield json.dumps({"model": model, "task": task, **sample}, default=str, ensure_ascii=False) + "\n"
