"""Read a YAML file and `--set a.b=c` overrides into a validated configuration.

Guarantees:
- No device or process group is used, and the network only for data in S3.
- Every error names the field, the value and the remedy in one sentence, as UserError (exit code 64).
- The result is complete (`Settings`).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError
from pydantic.alias_generators import to_camel

from trainium_contract.sizes import compute_step_batch_size, count_micro_batches
from trainium_contract.trainer.addresses import is_address
from trainium_contract.trainer.config import TrainingConfig
from trainium_contract.trainer.optimizer import OptimizerKind
from trainium_contract.trainer.tuning import BASE_REFERENCE, TuningConfig
from trainium_contract.wire import worker_env
from trainium_contract.wire.worker_env import KIND
from trainium_trainer.checkpoint.root.owner import NOBODY, JobIdentity
from trainium_trainer.configuration.model_shape import check_parallelism, read_initial_shape, resolve_shape
from trainium_trainer.data.prepared.s3_copy import find_vocabulary_size, has_prepared_sources
from trainium_trainer.data.tokens.tokenizer import TOKENIZER_FILE, explain_conversion
from trainium_trainer.exits import UserError
from trainium_trainer.tuning.trainable import TrainableParameters, refuse_untrained_rows, select_trainable
from trainium_trainer.validation_errors import explain, find_first_problem, validate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainium_contract.job import TrainingJobSpec
    from trainium_contract.models.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The launcher's (the agent's or torchrun's) description of this process."""

    rank: int
    local_rank: int
    world_size: int
    generation: int = 0
    attempt: int = 0
    run_id: str = ""
    """Identifies the history: the TrainingJob's uid, empty outside the operator."""
    progress_file: Path | None = None
    memory_directory: Path | None = None
    local_world_size: int = 1
    """The number of processes of this node."""
    job: JobIdentity = NOBODY
    """The owner of the checkpoints; without identity outside the operator."""
    cause: str = ""
    """The interruption before this start; empty if none or unknown."""
    is_dry_run: bool = False
    """Whether no other rank exists, at any world size: collectives transfer nothing (compilation)."""

    @property
    def is_restart(self) -> bool:
        """Whether an earlier process ran with the same configuration."""
        return self.attempt > 0 or self.generation > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A configuration that is valid for this launch."""

    config: TrainingConfig
    shape: ModelShape
    launch: Launch
    trainable: TrainableParameters
    """The trained part of the model."""

    @property
    def dp_size(self) -> int:
        """The data-parallel degree: the number of shares of the samples."""
        return self.launch.world_size // self.config.parallelism.group

    @property
    def batch(self) -> int:
        """The samples of one step over all ranks."""
        batch = self.config.batch
        return compute_step_batch_size(batch.global_size, batch.micro_size, self.dp_size, batch.tolerance)

    @property
    def passes(self) -> int:
        """The number of micro-batches per step on each data-parallel rank."""
        return count_micro_batches(self.batch, self.config.batch.micro_size, self.dp_size)

    def list_fixed_settings(self, data_identity: str, tokenizer: str, begin: Mapping[str, str]) -> dict[str, Any]:
        """Return the settings that must not change between runs of one history, by name.

        Data, tokenizer and initial weights (`begin`) are given by digests.
        """
        initial: dict[str, Any] = dict(begin)
        tuning = self.config.tuning
        if tuning != TuningConfig():
            # Models are identified by their digests, because their folders may move.
            tuning = tuning.replaced(lora=tuning.lora.replaced(adapter=None))
            if tuning.objective is not None:
                tuning = tuning.replaced(objective=tuning.objective.replaced(reference=BASE_REFERENCE))
            initial["tuning"] = tuning.to_wire()
        if self.config.optimizer.kind is not OptimizerKind.ADAMW:
            initial["optimizer"] = self.config.optimizer.kind
        return initial | {
            "model": self.shape.to_json(),
            "tokenizer": tokenizer,
            "data": data_identity,
            "sequenceLength": self.config.data.sequence_length,
            "dataSeed": self.config.data.seed,
            "globalBatch": self.config.batch.global_size,
            "seed": self.config.seed,
        }


def load(path: Path, overrides: Sequence[str] = ()) -> TrainingConfig:
    """Read and validate a configuration file, or a TrainingJob's, with overrides applied. Raises UserError."""
    document = read_document(path)
    if document.get("kind") == KIND:
        document = parse_job_spec(path, document).training_config().to_wire()
    return parse(document, overrides, str(path))


def parse_job_spec(path: Path, document: dict[str, Any]) -> TrainingJobSpec:
    """Return the spec of a TrainingJob's manifest that was read from `path`. Raises UserError."""
    from trainium_contract.job import TrainingJobSpec  # noqa: PLC0415 - no pod needs it

    return validate(TrainingJobSpec, document.get("spec") or {}, f"{path}: spec: ")


def read_document(path: Path) -> dict[str, Any]:
    """Read the fields of a YAML file without validation. Raises UserError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{path}: the configuration file cannot be read ({error.strerror}): give an existing file"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: the configuration file is not UTF-8 text: write it as YAML") from error
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise UserError(f"{path}: holds a {type(document).__name__}, not fields: write `name: value` lines")
    return document


def parse(document: dict[str, Any], overrides: Sequence[str], source: str) -> TrainingConfig:
    """Validate fields with overrides applied; `source` is their origin, for errors. Raises UserError."""
    origins = {_apply_override(document, override): f"--set {override}" for override in overrides}
    try:
        return _choose_tokenizer(TrainingConfig.model_validate(document))
    except ValidationError as error:
        where = _find_override(find_first_problem(error.errors())["loc"], origins) or source
        raise UserError(f"{where}: {explain(error, TrainingConfig)}") from error


def _choose_tokenizer(config: TrainingConfig) -> TrainingConfig:
    """Use the tokenizer of the initial model if none is configured. Raises UserError.

    No tokenizer is ever trained for an initial model, because its embedding would not match.
    """
    location = config.model.weights
    if location is None or config.data.tokenizer.path is not None or has_prepared_sources(config.data):
        return config
    folder = Path(location).expanduser()
    if not is_address(location) and not folder.is_dir():  # reported as the model's folder
        return config
    if not is_address(location) and not (folder / TOKENIZER_FILE).is_file():
        way_out = explain_conversion(folder) or (
            f"has no {TOKENIZER_FILE}: copy the model's tokenizer there, or name it in data.tokenizer.path"
        )
        raise UserError(f"model.weights {location}: {way_out}")
    tokenizer = config.data.tokenizer.model_copy(update={"path": location if is_address(location) else str(folder)})
    return config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": tokenizer})})


def check_tuning(config: TrainingConfig, shape: ModelShape) -> TrainableParameters:
    """Return the trained part of a model of this shape. Raises UserError for a tuning that makes no sense."""
    tuning, location = config.tuning, config.model.weights
    trainable = select_trainable(shape, tuning)
    if tuning.freezes and location is None:
        raise UserError(
            "tuning freezes weights, but model.weights is not given, so they would be random: give the model to begin "
            "with, or leave tuning out"
        )
    if location is not None and tuning.freezes:
        refuse_untrained_rows(trainable, shape, location, read_initial_shape(location, tuning).vocab_size)
    return trainable


def resolve_steps(config: TrainingConfig, epoch_samples: int | None) -> TrainingConfig:
    """Return the configuration with the steps and warm-up of `epochs` and `warmupRatio`, given `epoch_samples`.

    Raises UserError.
    """
    steps = config.steps
    if config.epochs:
        if epoch_samples is None:
            raise UserError(
                "epochs is given, but the length of an epoch is unknown while data are tokenized during training: set "
                "data.tokenization to Ahead, or give steps"
            )
        steps = math.ceil(config.epochs * epoch_samples / config.batch.global_size)
    schedule = config.schedule.fitted(steps)
    ratio, warmup = schedule.warmup_ratio, schedule.warmup_steps
    if ratio is not None:
        warmup = math.ceil(ratio * steps)
    if warmup > steps:
        raise UserError(
            f"schedule.warmupSteps is {warmup}, but {config.epochs:g} epochs are {steps} steps: lower it, or give "
            "schedule.warmupRatio"
        )
    schedule = schedule.replaced(warmup_steps=warmup)
    return config.model_copy(update={"steps": steps, "schedule": schedule})


def resolve_settings(config: TrainingConfig, launch: Launch, *, vocabulary: int | None = None) -> Settings:
    """Complete a configuration and check it against the launch; `vocabulary` stands for the tokenizer's size.

    Raises UserError.
    """
    vocabulary_size = find_vocabulary_size(config.data) if vocabulary is None else vocabulary
    shape = resolve_shape(config.model, vocabulary_size, tensor=config.parallelism.tensor, tuning=config.tuning)
    trainable = check_tuning(config, shape)
    check_parallelism(config, shape, launch.world_size)
    return Settings(config=config, shape=shape, launch=launch, trainable=trainable)


def read_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """Read the launcher's variables; without them the process is rank 0 of 1. Raises UserError for bad numbers."""
    memory = environment.get(worker_env.ENV_MEMORY_DIRECTORY)
    progress = environment.get(worker_env.ENV_PROGRESS_FILE)
    launch = Launch(
        rank=_read_number(environment, "RANK", 0),
        local_rank=_read_number(environment, "LOCAL_RANK", 0),
        world_size=_read_number(environment, "WORLD_SIZE", 1),
        local_world_size=_read_number(environment, "LOCAL_WORLD_SIZE", _read_number(environment, "WORLD_SIZE", 1)),
        generation=_read_number(environment, worker_env.ENV_GENERATION, 0),
        attempt=_read_number(
            environment, worker_env.ENV_ATTEMPT, _read_number(environment, "TORCHELASTIC_RESTART_COUNT", 0)
        ),
        run_id=environment.get(worker_env.ENV_RUN_ID, ""),
        cause=environment.get(worker_env.ENV_CAUSE, ""),
        progress_file=Path(progress) if progress else None,
        memory_directory=Path(memory) if memory else None,
        job=JobIdentity(
            cluster=environment.get(worker_env.ENV_CLUSTER, ""),
            namespace=environment.get(worker_env.ENV_NAMESPACE, ""),
            name=environment.get(worker_env.ENV_JOB, ""),
            uid=environment.get(worker_env.ENV_RUN_ID, ""),
        ),
    )
    if not 0 <= launch.rank < launch.world_size:
        raise UserError(
            f"RANK is {launch.rank} but WORLD_SIZE is {launch.world_size}: start the trainer with torchrun, "
            "or unset both to run one process"
        )
    return launch


def _read_number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal():
        raise UserError(f"environment variable {name} is {text!r}, not a number: unset it or let the launcher set it")
    return int(text)


def _find_override(location: tuple[int | str, ...], origins: Mapping[tuple[str, ...], str]) -> str | None:
    """Return the override that set the value at `location` or above it; None if the file did."""
    for length in range(len(location), 0, -1):
        override = origins.get(tuple(str(part) for part in location[:length]))
        if override is not None:
            return override
    return None


def _apply_override(document: dict[str, Any], override: str) -> tuple[str, ...]:
    """Set the override's value in the document; return the path of the field."""
    path, separator, text = override.partition("=")
    names = [to_camel(name) if "_" in name else name for name in path.strip().split(".")]
    if not separator or not all(names):
        raise UserError(f"--set {override!r}: write it as a.b=value, for example --set optimizer.learningRate=1e-3")
    try:
        value = _parse_number(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise UserError(f"--set {override!r}: the value is not valid YAML: quote it") from error
    node = document
    for depth, name in enumerate(names[:-1]):
        child = node.setdefault(name, {})
        if child is None:
            child = node[name] = {}
        if not isinstance(child, dict):
            inner = ".".join(names[: depth + 1])
            raise UserError(f"--set {override!r}: {inner} is {child!r}, which has no fields below it: shorten the path")
        node = child
    node[names[-1]] = value
    return tuple(names)


def _parse_number(value: Any) -> Any:
    # YAML 1.1 reads 1e-3 (no dot) as text, but users mean the number.
    if isinstance(value, str):
        try:
            return float(value) if value.lower() not in {"nan", "inf", "-inf", "infinity"} else value
        except ValueError:
            return value
    return value
