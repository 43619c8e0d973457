"""Define the parameters of a model in one list: names, sizes, division, initial values.

Tensor parallelism, pipelines, adapters, initialization, the memory estimate, export, conversion and backend Nxd all
read this list.

Guarantee: names are Hugging Face's, in the order in which the network registers them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from trainium_contract.models.shape import NormPlacement, QueryKeyNorm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_contract.models.shape import ModelShape

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
"""The output projection; a tied model has it under the name of the embedding."""
_LAYERS = "model.layers."


class Unit(StrEnum):
    """The unit of which ranks of a tensor-parallel group hold whole ones."""

    QUERY_HEADS = "query heads"
    KEY_VALUE_HEADS = "key/value heads"
    """Repeated where there are more ranks than heads."""
    FEATURES = "features"
    """The inner width of the feed-forward, or rows of the vocabulary."""


class Initial(StrEnum):
    """Distribution of a parameter's initial values."""

    NORMAL = "normal"
    RESIDUAL = "residual"
    """Normal, narrower in a deeper model: a projection that ends a residual branch."""
    ONES = "ones"
    ZEROS = "zeros"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a layer, or of the model outside its layers."""

    name: str
    """Within the layer, such as `mlp.up_proj.weight`, or within the model."""
    size: tuple[int, ...]
    dimension: int | None = None
    """The dimension that tensor parallelism divides: 0 for outputs, 1 for inputs; None: every rank holds it whole."""
    unit: Unit = Unit.FEATURES
    initial: Initial = Initial.NORMAL
    summed: bool = False
    """Whether ranks that hold it whole each compute a summand of its gradient."""

    @property
    def is_drawn(self) -> bool:
        """Return whether its initial value is random."""
        return self.initial in (Initial.NORMAL, Initial.RESIDUAL)

    @property
    def module(self) -> str:
        """Name of the module that owns it."""
        return self.name.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        """Return the name within the module: `weight` or `bias`."""
        return self.name.rpartition(".")[2]

    @property
    def is_projection(self) -> bool:
        """Return whether it is the weight of a linear layer, which may have an adapter."""
        return len(self.size) == 2 and self.name != EMBEDDING

    def numbers(self, tensor: int = 1, key_value_heads: int = 1) -> int:
        """Return the number of elements on one of `tensor` tensor-parallel ranks."""
        elements = math.prod(self.size)
        if self.dimension is None:
            return elements
        repeated = max(1, tensor // key_value_heads) if self.unit is Unit.KEY_VALUE_HEADS else 1
        return elements * repeated // tensor


@functools.lru_cache(maxsize=64)
def layer_parameters(shape: ModelShape) -> Mapping[str, Parameter]:
    """Return the parameters of one layer by their names within it; all layers have the same."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    query, key_value = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    parameters = [] if shape.norm_placement is NormPlacement.OUTPUTS else [_build_norm(shape, "input_layernorm")]
    for projection, outputs, unit in (
        ("q", query, Unit.QUERY_HEADS),
        ("k", key_value, Unit.KEY_VALUE_HEADS),
        ("v", key_value, Unit.KEY_VALUE_HEADS),
    ):
        parameters += _build_column_parallel(
            f"self_attn.{projection}_proj", (outputs, hidden), unit, bias=shape.attention_bias
        )
    parameters += _build_row_parallel("self_attn.o_proj", (hidden, query), Unit.QUERY_HEADS, bias=shape.output_bias)
    parameters += _build_query_key_norms(shape)
    parameters.append(_build_norm(shape, "post_attention_layernorm"))
    for projection in ("gate", "up"):
        parameters += _build_column_parallel(
            f"mlp.{projection}_proj", (inner, hidden), Unit.FEATURES, bias=shape.mlp_bias
        )
    parameters += _build_row_parallel("mlp.down_proj", (hidden, inner), Unit.FEATURES, bias=shape.mlp_bias)
    if shape.norm_placement is NormPlacement.BOTH:
        parameters.append(_build_norm(shape, "pre_feedforward_layernorm"))
    if shape.norm_placement is not NormPlacement.INPUTS:
        parameters.append(_build_norm(shape, "post_feedforward_layernorm"))
    return {parameter.name: parameter for parameter in parameters}


def _build_column_parallel(module: str, size: tuple[int, int], unit: Unit, *, bias: bool) -> list[Parameter]:
    """Return the parameters of a projection whose outputs are divided."""
    parameters = [Parameter(f"{module}.weight", size, 0, unit)]
    return [*parameters, Parameter(f"{module}.bias", size[:1], 0, unit, Initial.ZEROS)] if bias else parameters


def _build_row_parallel(module: str, size: tuple[int, int], unit: Unit, *, bias: bool) -> list[Parameter]:
    """Return the parameters of a projection whose inputs are divided, at the end of a residual branch."""
    parameters = [Parameter(f"{module}.weight", size, 1, unit, Initial.RESIDUAL)]
    return (
        [*parameters, Parameter(f"{module}.bias", size[:1], initial=Initial.ZEROS, summed=True)] if bias else parameters
    )


def _build_query_key_norms(shape: ModelShape) -> list[Parameter]:
    parameters = []
    initial = _choose_initial_norm(shape)
    for projection, heads, unit in (
        ("q", shape.num_attention_heads, Unit.QUERY_HEADS),
        ("k", shape.num_key_value_heads, Unit.KEY_VALUE_HEADS),
    ):
        name = f"self_attn.{projection}_norm.weight"
        match shape.query_key_norm:
            case QueryKeyNorm.EACH_HEAD:
                parameters.append(Parameter(name, (shape.head_dim,), initial=initial, summed=True))
            case QueryKeyNorm.ALL_HEADS:
                parameters.append(Parameter(name, (heads * shape.head_dim,), 0, unit, initial))
    return parameters


def _build_norm(shape: ModelShape, module: str) -> Parameter:
    return Parameter(f"{module}.weight", (shape.hidden_size,), initial=_choose_initial_norm(shape))


def _choose_initial_norm(shape: ModelShape) -> Initial:
    return Initial.ZEROS if shape.has_centered_norms else Initial.ONES


@functools.lru_cache(maxsize=64)
def non_layer_parameters(shape: ModelShape) -> Mapping[str, Parameter]:
    """Return the parameters outside the layers by name; a tied model has no separate output projection."""
    embedding = Parameter(EMBEDDING, (shape.vocab_size, shape.hidden_size), 0)
    parameters = {EMBEDDING: embedding, "model.norm.weight": _build_norm(shape, "model.norm")}
    return parameters if shape.tie_embeddings else parameters | {HEAD: replace(embedding, name=HEAD)}


@functools.lru_cache(maxsize=16)
def list_parameters(shape: ModelShape) -> Mapping[str, Parameter]:
    """Return all parameters of a model by name, in order; those of layers have their names within the layer."""
    embedding, *others = non_layer_parameters(shape).items()
    layers = {
        f"{_LAYERS}{number}.{name}": parameter
        for number in range(shape.num_layers)
        for name, parameter in layer_parameters(shape).items()
    }
    return dict([embedding]) | layers | dict(others)


def parameter_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return names and sizes of all parameters in order."""
    return {name: parameter.size for name, parameter in list_parameters(shape).items()}


def find_parameter(shape: ModelShape, name: str) -> Parameter:
    """Return a parameter by its name in the model; the output projection of a tied model is the embedding.

    Raises KeyError.
    """
    if name.startswith(_LAYERS):
        return layer_parameters(shape)[name.removeprefix(_LAYERS).partition(".")[2]]
    return non_layer_parameters(shape)[EMBEDDING if name == HEAD and shape.tie_embeddings else name]


def count_parameters(shape: ModelShape) -> int:
    """Return the number of elements of a whole model."""
    layer = sum(parameter.numbers() for parameter in layer_parameters(shape).values())
    return shape.num_layers * layer + sum(parameter.numbers() for parameter in non_layer_parameters(shape).values())
