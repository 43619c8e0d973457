"""Llama: the presets (the models' own `config.json`) and two small shapes for a CPU."""

from __future__ import annotations

from trainium_contract.models.family import BIASES, Family, parse_presets, read_bias, write_bias
from trainium_contract.models.shape import RopeScalingKind, RopeStretch

_PLAIN = """
Tiny                     0    96     256   3   4   2   24   10_000     8192  1e-5  tied
Small                    0   384    1024   6   8   4   48   10_000     8192  1e-5  tied
Llama2-7B           32_000  4096  11_008  32  32  32  128   10_000     4096  1e-5  -
Llama2-13B          32_000  5120  13_824  40  40  40  128   10_000     4096  1e-5  -
Llama2-70B          32_000  8192  28_672  80  64   8  128   10_000     4096  1e-5  -
Llama3-8B          128_256  4096  14_336  32  32   8  128  500_000     8192  1e-5  -
Llama3-70B         128_256  8192  28_672  80  64   8  128  500_000     8192  1e-5  -
"""
_LLAMA31 = """
Llama3.1-8B        128_256  4096  14_336  32  32   8  128  500_000  131_072  1e-5  -
Llama3.1-70B       128_256  8192  28_672  80  64   8  128  500_000  131_072  1e-5  -
"""
_LLAMA32 = """
Llama3.2-1B        128_256  2048    8192  16  32   8   64  500_000  131_072  1e-5  tied
"""


def _read_stretch(factor: float) -> RopeStretch:
    return RopeStretch(
        kind=RopeScalingKind.LLAMA3,
        factor=factor,
        low_frequency_factor=1.0,
        high_frequency_factor=4.0,
        original_max_positions=8192,
    )


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults=BIASES,
    traits=read_bias,
    fields=write_bias,
    presets={
        **parse_presets("llama", _PLAIN),
        **parse_presets("llama", _LLAMA31, rope_stretch=_read_stretch(8.0)),
        **parse_presets("llama", _LLAMA32, rope_stretch=_read_stretch(32.0)),
    },
)
