"""Which parameters of a model are trained: patterns held against the names that its shape implies.

Invariants: pure, no torch; what is chosen is known, with its sizes and their sum, before a model is built; a pattern
that chooses nothing is refused with the names that it may have meant.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.models.parameters import EMBEDDING, HEAD, parameter_sizes, parameters_of
from trainium_contract.trainer.tuning import BASE_REFERENCE, TuningMethod, matches_module
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from trainium_contract.models.shape import ModelShape
    from trainium_contract.trainer.tuning import LoraConfig, TuningConfig

LORA_A, LORA_B, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude_vector"
"""Names of the matrices of an adapter, and of the lengths of DoRA, below its target, as peft has them."""
_EMBEDDING, _HEAD = EMBEDDING.removesuffix(".weight"), HEAD.removesuffix(".weight")
_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Choice:
    """The parameters that a tuning trains."""

    adapters: tuple[str, ...]
    """Linear modules that get an adapter, in the order of the model."""
    weights: frozenset[str]
    """Parameters of the model itself that are trained."""
    sizes: Mapping[str, tuple[int, ...]]
    """Name and size of everything that is trained."""

    @property
    def trained(self) -> int:
        """Return how many numbers are trained."""
        return sum(math.prod(size) for size in self.sizes.values())


def choose(shape: ModelShape, tuning: TuningConfig) -> Choice:
    """Return what `tuning` trains in a model of this shape. Raises UserError."""
    sizes = parameter_sizes(shape)
    if tuning.method is TuningMethod.FULL and tuning.trainable is None:
        return Choice((), frozenset(sizes), sizes)
    weights: list[str] = []
    for pattern in tuning.trainable or ():
        matched = [name for name in sizes if matches_module(module_of(name), pattern) or matches_module(name, pattern)]
        if not matched:
            modules = dict.fromkeys(map(module_of, sizes))
            raise _nothing("tuning.trainable", pattern, modules, "parameters")
        weights += matched
    chosen = {name: sizes[name] for name in sizes if name in set(weights)}
    if tuning.method is TuningMethod.FULL:
        return Choice((), frozenset(chosen), chosen)
    adapters = lora_targets(shape, tuning.lora)
    for module in adapters:
        outputs, width = sizes[f"{module}.weight"]
        chosen |= adapter_sizes(module, width, outputs, tuning.lora)
    return Choice(adapters, frozenset(weights), chosen)


def lora_targets(shape: ModelShape, lora: LoraConfig) -> tuple[str, ...]:
    """Return the linear modules that get an adapter, in the order of the model. Raises UserError."""
    sizes = projection_sizes(shape)
    chosen: set[str] = set()
    for pattern in lora.targets:
        matched = [name for name in sizes if matches_module(name, pattern)]
        if not matched and shape.tie_embeddings and matches_module(_HEAD, pattern):
            raise UserError(
                f"tuning.lora.targets has {pattern!r}, but this model's output projection is its embedding "
                "(tied): an adapter cannot be merged into one of the two; leave it out"
            )
        if not matched:
            raise _nothing("tuning.lora.targets", pattern, sizes, "linear layers")
        chosen.update(matched)
    known = parameters_of(shape)
    if lora.bias and (bare := [name for name in sizes if name in chosen and f"{name}.bias" not in known]):
        raise UserError(
            f"tuning.lora.bias is true, but {bare[0]} has no bias that one could be merged into: leave bias or this "
            "target out"
        )
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
    """Raise UserError where a pattern means no target, or two mean one with different values."""
    for pattern in values:
        if not any(matches_module(name, pattern) for name in targets):
            raise _nothing(field, pattern, targets, "targets")
    for name in targets:
        found = {pattern: value for pattern, value in values.items() if matches_module(name, pattern)}
        if len(set(found.values())) > 1:
            raise UserError(
                f"{field} gives {name} several values ({', '.join(map(repr, found))}): leave one pattern that means it"
            )


def projection_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the sizes of the weights of all linear layers, beside which an adapter can stand, by module in order."""
    return {module_of(name): each.size for name, each in parameters_of(shape).items() if each.is_projection}


def module_of(name: str) -> str:
    """Return the name of the module that owns a parameter."""
    return name.rpartition(".")[0]


def adapter_sizes(module: str, width: int, outputs: int, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Names and sizes of the parameters of one adapter."""
    rank = lora.rank_of(module)
    sizes: dict[str, tuple[int, ...]] = {
        f"{module}.{LORA_A}.weight": (rank, width),
        f"{module}.{LORA_B}.weight": (outputs, rank),
    }
    sizes |= {f"{module}.{LORA_B}.bias": (outputs,)} if lora.bias else {}
    return sizes | ({f"{module}.{MAGNITUDE}.weight": (outputs,)} if lora.dora else {})


def is_adapter(name: str) -> bool:
    """Return whether a parameter's name is that of a part of an adapter."""
    return name.endswith((f".{LORA_A}.weight", f".{LORA_B}.weight", f".{LORA_B}.bias", f".{MAGNITUDE}.weight"))


def target_of(name: str) -> str:
    """Return the module that an adapter is beside, by the name of a part of the adapter."""
    return module_of(module_of(name))


def is_reference_in_model(tuning: TuningConfig) -> bool:
    """Return whether the model without its adapters is the reference of the objective."""
    objective = tuning.objective
    return (
        objective is not None
        and objective.compares_with_reference
        and objective.reference == BASE_REFERENCE
        and tuning.method is TuningMethod.LORA
        and tuning.trainable is None
    )


def refuse_untrained_rows(choice: Choice, shape: ModelShape, location: str, rows: int) -> None:
    """Raise UserError where the vocabulary grew beyond the `rows` of the model at `location` and the new are frozen."""
    grown = shape.vocab_size - shape.vocab_padding - rows
    modules = [_EMBEDDING] if shape.tie_embeddings else [_EMBEDDING, _HEAD]
    if grown > 0 and not {f"{module}.weight" for module in modules} <= choice.weights:
        raise UserError(
            f"the tokenizer has {grown} more entries than the embedding of {location}, whose new rows would never be "
            f"trained: add {' and '.join(modules)} to tuning.trainable, or use the model's own tokenizer"
        )


def _nothing(field: str, pattern: str, names: Iterable[str], what: str) -> UserError:
    leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    near = difflib.get_close_matches(pattern, [*leaves, *names], n=3, cutoff=0.5) or leaves[:_SHOWN]
    return UserError(f"{field} has {pattern!r}, which matches none of the model's {what}: use {', '.join(near)}")
