"""Open the initial weights of a run, a base model and an adapter, and check them against the configuration."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.trainer.tuning import TuningMethod

if TYPE_CHECKING:
    from trainium_contract.trainer.config import TrainingConfig
    from trainium_trainer.models.shapes import ModelShape
    from trainium_trainer.weights.adapter import AdapterWeights
    from trainium_trainer.weights.base import BaseWeights


@dataclass(frozen=True, slots=True)
class InitialWeights:
    """Weights that others made; None where the run has none."""

    base: BaseWeights | None
    adapter: AdapterWeights | None

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
        return InitialWeights(base, adapter)

    @property
    def base_digest(self) -> str:
        """Digest of the base; empty for none."""
        return "" if self.base is None else self.base.digest

    @property
    def fingerprint(self) -> int:
        """A 62-bit number that differs where ranks begin with something else."""
        return int(hashlib.sha256(f"{self.base_digest} {self.adapter_digest}".encode()).hexdigest()[:16], 16) >> 2

    @property
    def adapter_digest(self) -> str:
        """Digest of the adapter; empty for none."""
        return "" if self.adapter is None else self.adapter.digest
