"""Open the initial weights of a run, a base model and an adapter, and check them against the configuration."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainium_contract.trainer.tuning import BASE_REFERENCE, TuningMethod
from trainium_trainer.exits import UserError
from trainium_trainer.tuning.choice import is_reference_in_model

if TYPE_CHECKING:
    from trainium_contract.models.shape import ModelShape
    from trainium_contract.trainer.config import TrainingConfig
    from trainium_contract.trainer.tuning import TuningConfig
    from trainium_trainer.weights.adapter import AdapterWeights
    from trainium_trainer.weights.base import BaseWeights


@dataclass(frozen=True, slots=True)
class InitialWeights:
    """Weights that others made; None where the run has none."""

    base: BaseWeights | None
    adapter: AdapterWeights | None
    reference: BaseWeights | None = None
    """Reference model of the objective, where its log-probabilities are computed ahead."""

    @staticmethod
    def open(config: TrainingConfig, shape: ModelShape) -> InitialWeights:
        """Open what the configuration names. Raises UserError, StorageError."""
        base, adapter = None, None
        if config.model.weights is not None:
            from trainium_trainer.weights.base import BaseWeights  # noqa: PLC0415 - only who begins with a model

            base = BaseWeights.open(config.model.weights)
        lora = config.tuning.lora
        if config.tuning.method is TuningMethod.LORA and lora.adapter is not None:
            from trainium_trainer.weights.adapter import AdapterWeights  # noqa: PLC0415 - as above

            adapter = AdapterWeights.open(lora.adapter)
            adapter.check(config.tuning, shape, base)
        return InitialWeights(base, adapter, _open_reference(config.tuning, shape, base))

    @property
    def base_digest(self) -> str:
        """Digest of the base; empty for none."""
        return "" if self.base is None else self.base.digest

    @property
    def fingerprint(self) -> int:
        """A 62-bit number that differs where ranks begin with something else."""
        digests = f"{self.base_digest} {self.adapter_digest} {self.reference_digest}"
        return int(hashlib.sha256(digests.encode()).hexdigest()[:16], 16) >> 2

    @property
    def reference_digest(self) -> str:
        """Digest of the reference model; empty where it is not computed ahead."""
        return "" if self.reference is None else self.reference.digest

    @property
    def adapter_digest(self) -> str:
        """Digest of the adapter; empty for none."""
        return "" if self.adapter is None else self.adapter.digest


def _open_reference(tuning: TuningConfig, shape: ModelShape, base: BaseWeights | None) -> BaseWeights | None:
    """Return the reference model whose log-probabilities are computed ahead, if there is one. Raises UserError."""
    objective = tuning.objective
    if objective is None or not objective.compares_with_reference or is_reference_in_model(tuning):
        return None
    if objective.reference == BASE_REFERENCE:
        return base
    from trainium_trainer.weights.base import BaseWeights  # noqa: PLC0415 - as above

    field = "tuning.objective.reference"
    reference = BaseWeights.open(objective.reference, field=field)
    known = shape if base is None else base.shape
    ours, theirs = shape.vocab_size - shape.vocab_padding, reference.shape.vocab_size
    if theirs not in (ours, known.vocab_size):
        raise UserError(
            f"{field} {objective.reference}: has a vocabulary of {theirs:,} tokens, but the trained model has {ours:,}"
            ": use a reference with the same tokenizer"
        )
    if replace(reference.shape, vocab_size=0, vocab_padding=0) != replace(known, vocab_size=0, vocab_padding=0):
        raise UserError(
            f"{field} {objective.reference}: its config.json describes a model of another shape than the trained one: "
            "use a model of the same family and size"
        )
    return reference
