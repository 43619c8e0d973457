"""SmolLM3: Llama of which every fourth layer does not rotate queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_contract.models.family import (
    BIASES,
    Family,
    find_shortest_pattern,
    parse_presets,
    read_bias,
    read_window,
    write_bias,
    write_window,
)

if TYPE_CHECKING:
    from trainium_contract.models.family import Config
    from trainium_contract.models.shape import ModelShape


_SMOLLM3 = "SmolLM3-3B  128_256  2048  11_008  36  16  4  128  5_000_000  65_536  1e-6  tied"


def _read_traits(config: Config) -> dict[str, Any]:
    count, interval = config["num_hidden_layers"], config["no_rope_layer_interval"]
    default_rotated = [int((number + 1) % interval != 0) for number in range(count)]
    rotated = [bool(flag) for flag in (config["no_rope_layers"] or default_rotated)[:count]]
    return (
        read_bias(config) | {"rotated": find_shortest_pattern(rotated)} | read_window(config, [not r for r in rotated])
    )


def _write_fields(shape: ModelShape) -> dict[str, Any]:
    rotated = [int(shape.is_rotated(number)) for number in range(shape.num_layers)]
    window = {"use_sliding_window": shape.sliding_window is not None} | write_window(shape)
    return write_bias(shape) | {"no_rope_layers": rotated} | window


FAMILY = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    defaults={
        **BIASES,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
    },
    traits=_read_traits,
    fields=_write_fields,
    presets=parse_presets("smollm3", _SMOLLM3, rotated=(True, True, True, False)),
)
