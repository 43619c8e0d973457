"""From a checkpoint, its base and a configuration to what has to be written: the blueprints of model and adapter.

Invariant: the identity of a blueprint is a digest of everything that its files follow from, so what is complete is
never made again and what is of another run is never taken for ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainium_contract.models.parameters import EMBEDDING, HEAD, parameter_sizes
from trainium_contract.trainer.artifacts import ArtifactKind, ArtifactPrecision
from trainium_contract.trainer.tuning import TuningConfig
from trainium_trainer.artifacts.card import Card, read_lines
from trainium_trainer.artifacts.companions import model_files, tokenizer_files
from trainium_trainer.artifacts.manifest import CARD_NAME, FORMAT_VERSION, identity_of
from trainium_trainer.artifacts.peft_format import adapter_config, file_metadata, parameter_name, tensor_names
from trainium_trainer.artifacts.result import Boxes, CheckpointWeights, Result
from trainium_trainer.artifacts.writer import Blueprint
from trainium_trainer.checkpoint.format.contents import Contents
from trainium_trainer.checkpoint.root.selection import shape_of
from trainium_trainer.monitor.writers import METRICS_NAME
from trainium_trainer.tuning.choice import choose, projection_sizes
from trainium_trainer.weights.adapter import CONFIG_NAME as ADAPTER_CONFIG
from trainium_trainer.weights.adapter import AdapterWeights

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    import torch
    from torch import Tensor

    from trainium_contract.models.shape import ModelShape
    from trainium_trainer.checkpoint.root.survey import Committed
    from trainium_trainer.storage.protocol import Retry, Storage
    from trainium_trainer.weights.base import BaseWeights

TYPES = {
    ArtifactPrecision.FLOAT32: "F32",
    ArtifactPrecision.BFLOAT16: "BF16",
    ArtifactPrecision.FLOAT16: "F16",
}
_TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """All that artifacts of one step follow from."""

    shape: ModelShape
    """Shape of the run; rows of padding are not written."""
    tuning: TuningConfig
    trained: Boxes
    names: Collection[str]
    """Names of the trained parameters: those of `trained`."""
    source: str
    """Digest of the numbers in `trained`."""
    base: BaseWeights | None
    seed: int
    """Seed of the run: part of the identity."""
    step: int
    tokens: int
    settings: dict[str, Any]
    tokenizer: Path | None = None
    """The `tokenizer.json` that the run was trained with."""
    history: tuple[dict[str, Any], ...] = ()
    """Lines of metrics.jsonl, for the card."""

    @staticmethod
    def of_checkpoint(
        storage: Storage,
        checkpoint: Committed,
        retry: Retry,
        *,
        tuning: TuningConfig,
        base: BaseWeights | None,
        seed: int,
        tokenizer: Path | None,
        records: Path | None,
    ) -> Making:
        """Return what artifacts of a checkpoint follow from; `records` is the folder of the run's metrics.

        Raises DamagedFileError, StorageError, and UserError when it does not name its model.
        """
        trained = CheckpointWeights(Contents(storage, checkpoint, retry))
        return Making(
            shape=shape_of(checkpoint),
            tuning=tuning,
            trained=trained,
            names=trained.names,
            source=identity_of(sorted((file.name, file.size, file.digest) for file in checkpoint.manifest.files)),
            base=base,
            seed=seed,
            step=checkpoint.step,
            tokens=checkpoint.manifest.tokens,
            settings=dict(checkpoint.manifest.settings),
            tokenizer=tokenizer,
            history=() if records is None else read_lines(records / METRICS_NAME),
        )

    @property
    def real(self) -> ModelShape:
        """The shape without rows that no token has."""
        return replace(self.shape, vocab_size=self.shape.vocab_size - self.shape.vocab_padding, vocab_padding=0)

    def blueprint(self, kind: ArtifactKind, precision: ArtifactPrecision, largest: int | None = None) -> Blueprint:
        """Return the plan of an artifact. Raises UserError when the checkpoint does not fit the shape."""
        return self._adapter() if kind is ArtifactKind.ADAPTER else self._model(TYPES[precision], largest)

    def _model(self, dtype: str, largest: int | None) -> Blueprint:
        sizes = parameter_sizes(self.real)
        result = Result(self.trained, self.names, self.base, self.tuning.lora.scale_of)
        result.check(sizes)

        def companions() -> dict[str, bytes]:
            source = None if self.base is None else self.base.source
            name = _TORCH_NAMES[dtype]
            files = model_files(self.real, name, source, self.tokenizer)
            return files | {CARD_NAME: self._card(ArtifactKind.MODEL, name)}

        return Blueprint(
            kind=ArtifactKind.MODEL,
            step=self.step,
            identity=self._identity(ArtifactKind.MODEL, dtype),
            stem="model",
            dtype=dtype,
            sizes=sizes,
            rows=result.rows,
            companions=companions,
            largest=largest,
        )

    def _adapter(self) -> Blueprint:
        shape = self.real
        sizes = dict(choose(shape, self.tuning).sizes)
        result = Result(self.trained, self.names, None, self.tuning.lora.scale_of)
        result.check(sizes)
        shared = shape.tie_embeddings and EMBEDDING in sizes
        if shared:
            sizes[HEAD] = sizes[EMBEDDING]  # peft keeps one copy for each of the two

        def rows(name: str, first: int, count: int, dtype: torch.dtype) -> Tensor:
            ours = parameter_name(name)
            return result.rows(EMBEDDING if shared and ours == HEAD else ours, first, count, dtype)

        def companions() -> dict[str, bytes]:
            source = None if self.base is None else self.base.source
            config = adapter_config(
                self.tuning.lora,
                sizes,
                list(projection_sizes(shape)),
                None if self.base is None else self.base.location,
            )
            files = tokenizer_files(source, self.tokenizer, shape.max_positions)
            return files | {ADAPTER_CONFIG: config, CARD_NAME: self._card(ArtifactKind.ADAPTER, "float32")}

        return Blueprint(
            kind=ArtifactKind.ADAPTER,
            step=self.step,
            identity=self._identity(ArtifactKind.ADAPTER, "F32"),
            stem="adapter_model",
            dtype="F32",
            sizes=tensor_names(sizes),
            rows=rows,
            companions=companions,
            metadata=file_metadata("" if self.base is None else self.base.digest),
            largest=max(1, sum(math.prod(size) for size in sizes.values()) * 4),
        )

    def _card(self, kind: ArtifactKind, precision: str) -> bytes:
        grown = 0 if self.base is None else max(0, self.real.vocab_size - self.base.shape.vocab_size)
        card = Card(
            kind=kind,
            step=self.step,
            tokens=self.tokens,
            settings=self.settings,
            tuning=self.tuning,
            base=None if self.base is None else self.base.location,
            precision=precision,
            history=self.history,
            grown=grown,
        )
        return card.to_markdown().encode()

    def _identity(self, kind: ArtifactKind, dtype: str) -> str:
        base = "" if self.base is None else self.base.digest
        tuning, shape = self.tuning.to_wire(), self.shape.to_json()
        return identity_of([FORMAT_VERSION, kind, dtype, self.step, self.source, base, self.seed, tuning, shape])


def of_adapter(adapter: AdapterWeights, base: BaseWeights, tokenizer: Path | None = None) -> Making:
    """Return the tuning that an adapter of another program implies; its targets are the adapter's.

    `tokenizer` is the `tokenizer.json` that came with the adapter.
    """
    lora = {
        "rank": adapter.rank,
        "alpha": adapter.alpha,
        "rankStabilized": adapter.rank_stabilized,
        "dora": adapter.dora,
        "bias": adapter.bias,
        "rankPattern": {
            name: adapter.rank_of(name) for name in adapter.targets if adapter.rank_of(name) != adapter.rank
        },
        "alphaPattern": {
            name: adapter.alpha_of(name) for name in adapter.targets if adapter.alpha_of(name) != adapter.alpha
        },
        "dropout": adapter.dropout,
        "targets": adapter.leaves,
    }
    whole = [name for name in adapter.whole if not (base.shape.tie_embeddings and name == HEAD)]
    trainable = [name.removesuffix(".weight") for name in whole] or None
    tuning = TuningConfig.model_validate({"method": "LoRA", "lora": lora, "trainable": trainable})
    return Making(
        shape=base.shape,
        tuning=tuning,
        trained=adapter,
        names=adapter.names,
        source=adapter.digest,
        base=base,
        seed=0,
        step=0,
        tokens=0,
        settings={"weights": base.digest},
        tokenizer=tokenizer,
    )
