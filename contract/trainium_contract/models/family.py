"""Describe a family of models: its `config.json`, and its presets.

A family is one module of this package, listed in `families`. What its models compute beside Llama are fields of
`ModelShape`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainium_contract.models.shape import Activation, ModelShape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Config = Mapping[str, Any]
    """Validated fields of a `config.json`, those that it does not have with the family's defaults."""

SLIDING, FULL = "sliding_attention", "full_attention"
"""Values of `layer_types`."""
BIASES: Mapping[str, Any] = {"attention_bias": False, "mlp_bias": False}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_theta",
    "max_positions",
    "norm_eps",
)
_TIED = "tied"


def parse_presets(family: str, table: str, **traits: Any) -> dict[str, ModelShape]:
    """Return the shapes of a table by name, all with these traits; a row has a name, `_SIZES`, and `tied` or `-`."""
    shapes = {}
    for name, *sizes, embeddings in map(str.split, table.strip().splitlines()):
        values: dict[str, Any] = {
            size: float(text) if size in ("rope_theta", "norm_eps") else int(text)
            for size, text in zip(_SIZES, sizes, strict=True)
        }
        shapes[name] = ModelShape(family=family, tie_embeddings=embeddings == _TIED, **values, **traits)
    return shapes


def _return_nothing(_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of models."""

    model_type: str
    """Value in `config.json`; the name of the family in a shape."""
    architecture: str
    """The language model class of `transformers`."""
    defaults: Config = field(default_factory=dict)
    """Defaults of `transformers` for omitted fields; has all fields that not every family has."""
    traits: Callable[[Config], dict[str, Any]] = _return_nothing
    """Convert a `config.json` to the fields of ModelShape that differ from Llama's."""
    fixed: Config = field(default_factory=lambda: {"hidden_act": Activation.SILU.value})
    """Fields of `config.json` for which only this value is computed; None: must be absent, null or false."""
    has_windowed_rope: bool = False
    """Whether layers with a window have a separate rotary embedding."""
    fields: Callable[[ModelShape], dict[str, Any]] = _return_nothing
    """Convert a shape to the fields of `config.json` that not all families have."""
    presets: Mapping[str, ModelShape]
    """Published shapes by name."""


def read_bias(config: Config) -> dict[str, Any]:
    """Return the traits of `attention_bias`, which includes the output projection, and of `mlp_bias`."""
    attention, mlp = config["attention_bias"], config.get("mlp_bias") or False
    return {"attention_bias": attention, "output_bias": attention, "mlp_bias": mlp}


def write_bias(shape: ModelShape) -> dict[str, Any]:
    """Return the reverse of `read_bias`."""
    return {"attention_bias": shape.attention_bias, "mlp_bias": shape.mlp_bias}


def read_window(config: Config, default_windowed: Sequence[bool]) -> dict[str, Any]:
    """Return the traits of an attention window; `default_windowed` names its layers if `layer_types` is missing."""
    size, layer_types = config["sliding_window"], config["layer_types"]
    windowed = [layer_type == SLIDING for layer_type in layer_types] if layer_types else list(default_windowed)
    if size is None or not config.get("use_sliding_window", True) or not any(windowed):
        return {}
    return {"sliding_window": size, "windowed": find_shortest_pattern(windowed)}


def write_window(shape: ModelShape) -> dict[str, Any]:
    """Return the reverse of `read_window`."""
    windows = [shape.window_size(number) for number in range(shape.num_layers)]
    return {
        "sliding_window": shape.sliding_window,
        "layer_types": [FULL if window is None else SLIDING for window in windows],
    }


def read_optional_window(config: Config) -> dict[str, Any]:
    """Return the traits of Qwen's window: only if it is enabled, and only in the upper layers."""
    return read_window(config, [n >= config["max_window_layers"] for n in range(config["num_hidden_layers"])])


def write_optional_window(shape: ModelShape) -> dict[str, Any]:
    """Return the reverse of `read_optional_window`."""
    fields = write_window(shape)
    types = [*fields["layer_types"], SLIDING]
    return {"use_sliding_window": shape.sliding_window is not None, "max_window_layers": types.index(SLIDING)} | fields


def find_shortest_pattern(values: Sequence[bool]) -> tuple[bool, ...]:
    """Return the shortest prefix whose repetition gives the values."""
    lengths = range(1, len(values) + 1)
    period = next(n for n in lengths if all(value == values[i % n] for i, value in enumerate(values)))
    return tuple(values[:period])
