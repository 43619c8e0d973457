"""Choose the trained parameters of a model by matching patterns with the names of its shape.

Guarantees:
- The functions are pure, and torch is not imported.
- The chosen parameters and their sizes are known before a model is built.
- A pattern without a match is refused with similar names.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.models.parameters import EMBEDDING, HEAD, list_parameters, parameter_sizes
from trainium_contract.trainer.tuning import BASE_REFERENCE, TuningMethod, matches_module
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from trainium_contract.models.shape import ModelShape
    from trainium_contract.trainer.tuning import LoraConfig, TuningConfig

LORA_A, LORA_B, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude_vector"
"""The names in peft of the matrices of an adapter and of DoRA's magnitudes, below their target."""
_EMBEDDING, _HEAD = EMBEDDING.removesuffix(".weight"), HEAD.removesuffix(".weight")
_MAX_SUGGESTIONS = 6


@dataclass(frozen=True, slots=True)
class TrainableParameters:
    """The parameters that a tuning trains."""

    adapters: tuple[str, ...]
    """The linear modules that get an adapter, in the order of the model."""
    weights: frozenset[str]
    """The trained parameters of the model itself."""
    sizes: Mapping[str, tuple[int, ...]]
    """The name and size of every trained parameter."""

    @property
    def trained(self) -> int:
        """Return the number of trained values."""
        return sum(math.prod(size) for size in self.sizes.values())


def select_trainable(shape: ModelShape, tuning: TuningConfig) -> TrainableParameters:
    """Return the parameters that `tuning` trains in a model of this shape. Raises UserError."""
    sizes = parameter_sizes(shape)
    if tuning.method is TuningMethod.FULL and tuning.trainable is None:
        return TrainableParameters((), frozenset(sizes), sizes)
    weights: list[str] = []
    for pattern in tuning.trainable or ():
        matched = [
            name for name in sizes if matches_module(find_parent_module(name), pattern) or matches_module(name, pattern)
        ]
        if not matched:
            modules = dict.fromkeys(map(find_parent_module, sizes))
            raise _create_no_match_error("tuning.trainable", pattern, modules, "parameters")
        weights += matched
    chosen = {name: sizes[name] for name in sizes if name in set(weights)}
    if tuning.method is TuningMethod.FULL:
        return TrainableParameters((), frozenset(chosen), chosen)
    adapters = find_lora_targets(shape, tuning.lora)
    for module in adapters:
        outputs, width = sizes[f"{module}.weight"]
        chosen |= list_adapter_sizes(module, width, outputs, tuning.lora)
    return TrainableParameters(adapters, frozenset(weights), chosen)


def find_lora_targets(shape: ModelShape, lora: LoraConfig) -> tuple[str, ...]:
    """Return the linear modules that get an adapter, in the order of the model. Raises UserError."""
    sizes = list_projection_sizes(shape)
    chosen: set[str] = set()
    for pattern in lora.targets:
        matched = [name for name in sizes if matches_module(name, pattern)]
        if not matched and shape.tie_embeddings and matches_module(_HEAD, pattern):
            raise UserError(
                f"tuning.lora.targets has {pattern!r}, but this model's output projection is its embedding "
                "(tied): an adapter cannot be merged into one of the two; leave it out"
            )
        if not matched:
            raise _create_no_match_error("tuning.lora.targets", pattern, sizes, "linear layers")
        chosen.update(matched)
    for field, values in (("rankPattern", lora.rank_pattern), ("alphaPattern", lora.alpha_pattern)):
        _check_patterns(f"tuning.lora.{field}", values, [name for name in sizes if name in chosen])
    for name in chosen:
        if lora.rank_of(name) > min(sizes[name]):
            raise UserError(
                f"tuning.lora.rank is {lora.rank_of(name)}, but {name} is {sizes[name][0]} x {sizes[name][1]}: use a "
                f"rank of at most {min(sizes[name])}, or leave that target out"
            )
    return tuple(name for name in sizes if name in chosen)


def _check_patterns(field: str, values: Mapping[str, float], targets: Sequence[str]) -> None:
    """Raise UserError if a pattern matches no target, or two match one with different values."""
    for pattern in values:
        if not any(matches_module(name, pattern) for name in targets):
            raise _create_no_match_error(field, pattern, targets, "targets")
    for name in targets:
        matches = {pattern: value for pattern, value in values.items() if matches_module(name, pattern)}
        if len(set(matches.values())) > 1:
            raise UserError(
                f"{field} gives {name} several values ({', '.join(map(repr, matches))}): leave one pattern that means "
                "it"
            )


def list_projection_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the sizes of the weights of all linear layers, which can have an adapter, by module in order."""
    return {find_parent_module(name): item.size for name, item in list_parameters(shape).items() if item.is_projection}


def find_parent_module(name: str) -> str:
    """Return the name of the module that owns a parameter."""
    return name.rpartition(".")[0]


def list_adapter_sizes(module: str, width: int, outputs: int, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and sizes of the parameters of one adapter."""
    rank = lora.rank_of(module)
    sizes: dict[str, tuple[int, ...]] = {
        f"{module}.{LORA_A}.weight": (rank, width),
        f"{module}.{LORA_B}.weight": (outputs, rank),
    }
    return sizes | ({f"{module}.{MAGNITUDE}.weight": (outputs,)} if lora.dora else {})


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter, by its name."""
    return name.endswith((f".{LORA_A}.weight", f".{LORA_B}.weight", f".{MAGNITUDE}.weight"))


def find_adapted_module(name: str) -> str:
    """Return the target module of an adapter's parameter."""
    return find_parent_module(find_parent_module(name))


def is_reference_in_model(tuning: TuningConfig) -> bool:
    """Return whether the model without its adapters is the reference of the objective."""
    objective = tuning.objective
    return (
        objective is not None
        and objective.reference == BASE_REFERENCE
        and tuning.method is TuningMethod.LORA
        and tuning.trainable is None
    )


def refuse_untrained_rows(trainable: TrainableParameters, shape: ModelShape, location: str, rows: int) -> None:
    """Raise UserError if the vocabulary grew beyond the `rows` of the model at `location` and new rows are frozen."""
    grown = shape.vocab_size - shape.vocab_padding - rows
    modules = [_EMBEDDING] if shape.tie_embeddings else [_EMBEDDING, _HEAD]
    if grown > 0 and not {f"{module}.weight" for module in modules} <= trainable.weights:
        raise UserError(
            f"the tokenizer has {grown} more entries than the embedding of {location}, whose new rows would never be "
            f"trained: add {' and '.join(modules)} to tuning.trainable, or use the model's own tokenizer"
        )


def _create_no_match_error(field: str, pattern: str, names: Iterable[str], what: str) -> UserError:
    leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    suggestions = difflib.get_close_matches(pattern, [*leaves, *names], n=3, cutoff=0.5) or leaves[:_MAX_SUGGESTIONS]
    return UserError(f"{field} has {pattern!r}, which matches none of the model's {what}: use {', '.join(suggestions)}")
