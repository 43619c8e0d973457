"""From a YAML file and `--set a.b=c` overrides to a checked configuration.

Invariants: nothing here touches a device, a process group or a network; every refusal is one sentence that names the
field, the value and what to do, raised as UserError (exit code 64); the result is complete (`Settings`).
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.alias_generators import to_camel

from trainium_contract import worker_env
from trainium_contract.trainer import TrainingConfig
from trainium_trainer.data.tokenizer import vocabulary_of
from trainium_trainer.exits import UserError
from trainium_trainer.models.shapes import ModelShape, check_parallelism, resolve_shape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic_core import ErrorDetails


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What the launcher (the agent, torchrun, or nobody) says about this process."""

    rank: int
    local_rank: int
    world_size: int
    generation: int
    attempt: int
    run_id: str
    """Names the history: the TrainingJob's uid, empty outside the operator."""
    progress_file: Path | None
    memory_directory: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A configuration that is known to fit this launch."""

    config: TrainingConfig
    shape: ModelShape
    launch: Launch

    @property
    def dp_size(self) -> int:
        """Data-parallel degree."""
        return self.launch.world_size // self.config.parallelism.tensor

    def digest(self, data_identity: str) -> str:
        """Digest of the settings that must not change between runs of one history."""
        fixed = {
            "model": self.shape.to_json(),
            "data": data_identity,
            "sequenceLength": self.config.data.sequence_length,
            "dataSeed": self.config.data.seed,
            "globalBatch": self.config.batch.global_size,
            "seed": self.config.seed,
        }
        return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()


def load(path: Path, overrides: Sequence[str] = ()) -> TrainingConfig:
    """Read and validate a configuration file with overrides applied. Raises UserError."""
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
    for override in overrides:
        _apply(document, override)
    try:
        return TrainingConfig.model_validate(document)
    except ValidationError as error:
        raise UserError(f"{path}: {explain(error, TrainingConfig)}") from error


def settle(config: TrainingConfig, launch: Launch) -> Settings:
    """Complete a configuration and check it against the launch. Raises UserError."""
    shape = resolve_shape(config.model, vocabulary_of(config.data.tokenizer))
    check_parallelism(config, shape, launch.world_size)
    return Settings(config=config, shape=shape, launch=launch)


def launch_of(environment: Mapping[str, str] = os.environ) -> Launch:
    """Read the launcher's variables; a process without any is rank 0 of 1. Raises UserError for a bad number."""
    memory = environment.get(worker_env.ENV_MEMORY_DIRECTORY)
    progress = environment.get(worker_env.ENV_PROGRESS_FILE)
    launch = Launch(
        rank=_number(environment, "RANK", 0),
        local_rank=_number(environment, "LOCAL_RANK", 0),
        world_size=_number(environment, "WORLD_SIZE", 1),
        generation=_number(environment, worker_env.ENV_GENERATION, 0),
        attempt=_number(environment, worker_env.ENV_ATTEMPT, _number(environment, "TORCHELASTIC_RESTART_COUNT", 0)),
        run_id=environment.get(worker_env.ENV_RUN_ID, ""),
        progress_file=Path(progress) if progress else None,
        memory_directory=Path(memory) if memory else None,
    )
    if not 0 <= launch.rank < launch.world_size:
        raise UserError(
            f"RANK is {launch.rank} but WORLD_SIZE is {launch.world_size}: start the trainer with torchrun, "
            "or unset both to run one process"
        )
    return launch


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal():
        raise UserError(f"environment variable {name} is {text!r}, not a number: unset it or let the launcher set it")
    return int(text)


def _apply(document: dict[str, Any], override: str) -> None:
    path, separator, text = override.partition("=")
    names = [to_camel(name) if "_" in name else name for name in path.strip().split(".")]
    if not separator or not all(names):
        raise UserError(f"--set {override!r}: write it as a.b=value, for example --set optimizer.learningRate=1e-3")
    try:
        value = _scalar(yaml.safe_load(text))
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


def _scalar(value: Any) -> Any:
    # YAML 1.1 reads 1e-3 (no dot) as text; people mean the number.
    if isinstance(value, str):
        try:
            return float(value) if value.lower() not in {"nan", "inf", "-inf", "infinity"} else value
        except ValueError:
            return value
    return value


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The first problem of a validation error as one sentence, and how many more there are."""
    details = error.errors()
    # An unknown field first: the others often follow from it.
    first = min(details, key=lambda item: item["type"] != "extra_forbidden")
    sentence = _sentence(first, model)
    more = len(details) - 1
    return sentence + (f" (and {more} more problem{'s' if more > 1 else ''})" if more else "")


def _sentence(item: ErrorDetails, model: type[BaseModel]) -> str:
    field = ".".join(str(part) for part in item["loc"]) or "the configuration"
    context = item.get("ctx", {})
    value = item["input"]
    shown = f"{field} is {value!r}" if isinstance(value, (str, int, float, bool)) or value is None else field
    match item["type"]:
        case "extra_forbidden":
            return _unknown_field(item["loc"], model)
        case "value_error":
            return str(context["error"])
        case "enum":
            return f"{shown}, which is not one of its values: use {context['expected']}"
        case "greater_than":
            return f"{shown}: use a number greater than {context['gt']}"
        case "greater_than_equal":
            return f"{shown}: use a number of at least {context['ge']}"
        case "less_than":
            return f"{shown}: use a number less than {context['lt']}"
        case "less_than_equal":
            return f"{shown}: use a number of at most {context['le']}"
        case "int_parsing" | "int_type" | "int_from_float":
            return f"{shown}, which is not a whole number: use one"
        case "float_parsing" | "float_type" | "finite_number":
            return f"{shown}, which is not a number: use one"
        case "bool_parsing" | "bool_type":
            return f"{shown}, which is neither true nor false: use one of them"
        case "string_type":
            return f"{shown}, which is not text: use quotes"
        case "string_too_short":
            return f"{field} is empty: give a value or leave the field out"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{field} is {value!r}, but it has fields of its own: write them below it, or leave it out"
        case _:
            return f"{shown}: {item['msg']}; correct the value or leave the field out"


def _unknown_field(location: tuple[int | str, ...], model: type[BaseModel]) -> str:
    names = [str(part) for part in location]
    owner: type[BaseModel] | None = model
    for name in names[:-1]:
        owner = _child(owner, name) if owner else None
    known = sorted(info.alias or key for key, info in owner.model_fields.items()) if owner else []
    close = difflib.get_close_matches(names[-1], known, n=1)
    advice = f"did you mean {close[0]}?" if close else f"known fields: {', '.join(known)}"
    return f"{'.'.join(names)} is not a field: {advice}"


def _child(model: type[BaseModel], alias: str) -> type[BaseModel] | None:
    for key, info in model.model_fields.items():
        if alias in (key, info.alias):
            return info.annotation if isinstance(info.annotation, type) else None
    return None
