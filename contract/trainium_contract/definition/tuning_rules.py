"""Rules of the API server for fine-tuning in `spec.trainer`, in the Common Expression Language; see `rules.py`.

Invariant: they agree with the checks of the trainer's own configuration (`trainer/config.py`, `model.py`, `tuning.py`),
which check a file that a person wrote.
"""

from __future__ import annotations

from trainium_contract.definition.cel import RefusalReason, Rule, format_message
from trainium_contract.definition.rules import ON_NXD

_LORA = "self.trainer.tuning.method == 'LoRA'"
_WEIGHTS = "has(self.trainer.model.weights)"

TUNING_RULES: tuple[Rule, ...] = (
    Rule(
        f"!{_WEIGHTS} || self.trainer.model.preset == 'Tiny'",
        "trainer.model.weights and trainer.model.preset both name a shape: leave model.preset out",
        ".trainer.model.preset",
        format_message(
            "trainer.model.weights is %s and trainer.model.preset is %s: both name a shape, leave model.preset out",
            "self.trainer.model.?weights.orValue('')",
            "self.trainer.model.preset",
        ),
    ),
    Rule(
        f"!{_WEIGHTS} || !has(self.trainer.model.path)",
        "trainer.model.weights and trainer.model.path both name a shape: leave model.path out",
        ".trainer.model.path",
    ),
    Rule(
        f"(!({_LORA}) && !has(self.trainer.tuning.trainable)) || {_WEIGHTS}",
        "trainer.tuning leaves weights as they are, but there are none: give trainer.model.weights, the folder of a "
        "base model",
        ".trainer.model.weights",
        reason=RefusalReason.REQUIRED,
    ),
    Rule(
        f"{_LORA} || !has(self.trainer.tuning.lora.adapter)",
        "trainer.tuning.lora.adapter is given but trainer.tuning.method is Full: set tuning.method to LoRA",
        ".trainer.tuning.lora.adapter",
    ),
    Rule(
        f"!({_LORA}) || self.trainer.precision != 'BFloat16Stochastic'",
        "trainer.precision is BFloat16Stochastic but trainer.tuning.method is LoRA, whose adapters are in float32: use "
        "BFloat16",
        ".trainer.precision",
    ),
    Rule(
        f"{_LORA} || !has(self.trainer.artifacts.kinds) || !('Adapter' in self.trainer.artifacts.kinds)",
        "trainer.artifacts.kinds names Adapter but trainer.tuning.method is Full: leave Adapter out, or set "
        "tuning.method to LoRA",
        ".trainer.artifacts.kinds",
    ),
    Rule(
        "self.trainer.data.format != 'Function' || has(self.trainer.data.examples.function)",
        "trainer.data.format is Function but trainer.data.examples.function is not given: name module:function",
        ".trainer.data.examples.function",
        reason=RefusalReason.REQUIRED,
    ),
    Rule(
        "!self.trainer.evaluate.enabled || has(self.trainer.data.validation)",
        "trainer.evaluate.enabled is true but no examples are held back: give trainer.data.validation",
        ".trainer.data.validation",
        reason=RefusalReason.REQUIRED,
    ),
    Rule(
        f"{ON_NXD} || self.trainer.data.format == 'Text' || !self.trainer.data.examples.packing",
        "trainer.data.examples.packing cannot be had on trn1: its backend Nxd has no mask that keeps examples apart; "
        "leave it out",
        ".trainer.data.examples.packing",
    ),
)
"""Of `spec`, beside `rules.SPEC_RULES`."""
