"""Open the initial weights of a run, a base model and an adapter, and check them against the configuration."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainium_contract.trainer.tuning import BASE_REFERENCE, TuningMethod
from trainium_trainer.exits import UserError
from trainium_trainer.tuning.trainable import is_reference_in_model

if TYPE_CHECKING:
    from trainium_contract.models.shape import ModelShape
    from trainium_contract.trainer.config import TrainingConfig
    from trainium_contract.trainer.tuning import TuningConfig
    from trainium_trainer.weights.adapter import AdapterWeights
    from trainium_trainer.weights.base import BaseWeights


@dataclass(frozen=True, slots=True)
class InitialWeights:
    """The initial weights of a run; None for those that it does not use."""

    base: BaseWeights | None
    adapter: AdapterWeights | None
    reference: BaseWeights | None = None
    """The reference model of the objective, if its log-probabilities are computed ahead."""

    @staticmethod
    def open(config: TrainingConfig, shape: ModelShape) -> InitialWeights:
        """Open the models of the configuration. Raises UserError, StorageError."""
        base, adapter = None, None
        if config.model.weights is not None:
            from trainium_trainer.weights.base import BaseWeights  # noqa: PLC0415 - only who begins with a model

            base = BaseWeights.open(config.model.weights)
        lora = config.tuning.lora
        if config.tuning.method is TuningMethod.LORA and lora.adapter is not None:
            from trainium_trainer.weights.adapter import AdapterWeights  # noqa: PLC0415 - as above

            adapter = AdapterWeights.open(lora.adapter, tied=base is not None and base.shape.tie_embeddings)
            adapter.check(config.tuning, shape, base)
        return InitialWeights(base, adapter, _open_reference(config.tuning, shape, base))

    @property
    def digests(self) -> dict[str, str]:
        """The digests of the initial weights, by the names of the settings that must not change."""
        by_name: dict[str, BaseWeights | AdapterWeights | None] = {
            "weights": self.base,
            "adapter": self.adapter,
            "reference": self.reference,
        }
        return {name: weights.digest for name, weights in by_name.items() if weights is not None}

    @property
    def fingerprint(self) -> int:
        """A 62-bit number that differs between ranks with different initial weights."""
        return int(hashlib.sha256(str(self.digests).encode()).hexdigest()[:16], 16) >> 2


def _open_reference(tuning: TuningConfig, shape: ModelShape, base: BaseWeights | None) -> BaseWeights | None:
    """Open the reference model whose log-probabilities are computed ahead, if there is one. Raises UserError."""
    objective = tuning.objective
    if objective is None or is_reference_in_model(tuning):
        return None
    if objective.reference == BASE_REFERENCE:
        return base
    from trainium_trainer.weights.base import BaseWeights  # noqa: PLC0415 - as above

    field = "tuning.objective.reference"
    reference = BaseWeights.open(objective.reference, field=field)
    initial = shape if base is None else base.shape
    vocabulary, other = shape.vocab_size - shape.vocab_padding, reference.shape.vocab_size
    if other not in (vocabulary, initial.vocab_size):
        raise UserError(
            f"{field} {objective.reference}: has a vocabulary of {other:,} tokens, but the trained model has "
            f"{vocabulary:,}: use a reference with the same tokenizer"
        )
    if replace(reference.shape, vocab_size=0, vocab_padding=0) != replace(initial, vocab_size=0, vocab_padding=0):
        raise UserError(
            f"{field} {objective.reference}: its config.json describes a model of another shape than the trained one: "
            "use a model of the same family and size"
        )
    return reference
