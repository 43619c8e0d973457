"""Derive the plans of model and adapter from a checkpoint, its base and a configuration.

Guarantees:
- The identity of a plan is a digest of everything that determines its files, so complete artifacts are never
  written again and artifacts of another run are never mistaken for this run's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainium_contract.models.parameters import EMBEDDING, HEAD, parameter_sizes
from trainium_contract.trainer.artifacts import ArtifactKind, ArtifactPrecision
from trainium_contract.trainer.tuning import TuningConfig
from trainium_trainer.artifacts.card import Card, read_lines
from trainium_trainer.artifacts.manifest import CARD_NAME, FORMAT_VERSION, hash_json
from trainium_trainer.artifacts.merged_parameters import CheckpointWeights, MergedParameters, TrainedWeights
from trainium_trainer.artifacts.peft_format import create_adapter_config
from trainium_trainer.artifacts.small_files import create_model_files, create_tokenizer_files
from trainium_trainer.artifacts.writer import ArtifactPlan
from trainium_trainer.checkpoint.format.reader import CheckpointReader
from trainium_trainer.checkpoint.root.selection import parse_shape
from trainium_trainer.data.tokens.tokenizer import CHAT_TEMPLATE_SETTING
from trainium_trainer.monitor.writers import METRICS_NAME
from trainium_trainer.tuning.trainable import list_projection_sizes, select_trainable
from trainium_trainer.weights.adapter import BASE_DIGEST, AdapterWeights, from_tensor, to_tensor
from trainium_trainer.weights.adapter_config import CONFIG_NAME as ADAPTER_CONFIG

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor

    from trainium_contract.models.shape import ModelShape
    from trainium_trainer.checkpoint.root.survey import CommittedCheckpoint
    from trainium_trainer.storage.protocol import Retry, Storage
    from trainium_trainer.weights.base import BaseWeights

TYPES = {
    ArtifactPrecision.FLOAT32: "F32",
    ArtifactPrecision.BFLOAT16: "BF16",
    ArtifactPrecision.FLOAT16: "F16",
}
_TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactInputs:
    """The inputs of the artifacts of one step."""

    shape: ModelShape
    """The shape of the run; rows of padding are not written."""
    tuning: TuningConfig
    trained: TrainedWeights
    source: str
    """The digest of the values in `trained`."""
    base: BaseWeights | None
    seed: int
    """The seed of the run: part of the identity."""
    step: int
    tokens: int
    settings: dict[str, Any]
    tokenizer: Path | None = None
    """The `tokenizer.json` of the run."""
    history: tuple[dict[str, Any], ...] = ()
    """The lines of metrics.jsonl, for the card."""

    @staticmethod
    def from_checkpoint(
        storage: Storage,
        checkpoint: CommittedCheckpoint,
        retry: Retry,
        *,
        tuning: TuningConfig,
        base: BaseWeights | None,
        seed: int,
        tokenizer: Path | None,
        records: Path | None,
    ) -> ArtifactInputs:
        """Return the inputs of the artifacts of a checkpoint; `records` is the folder of the run's metrics.

        Raises DamagedFileError, StorageError, and UserError if the checkpoint does not describe its model.
        """
        trained = CheckpointWeights(CheckpointReader(storage, checkpoint, retry))
        return ArtifactInputs(
            shape=parse_shape(checkpoint),
            tuning=tuning,
            trained=trained,
            source=hash_json(sorted((file.name, file.size, file.digest) for file in checkpoint.manifest.files)),
            base=base,
            seed=seed,
            step=checkpoint.step,
            tokens=checkpoint.manifest.tokens,
            settings=dict(checkpoint.manifest.settings),
            tokenizer=tokenizer,
            history=() if records is None else read_lines(records / METRICS_NAME),
        )

    @property
    def unpadded_shape(self) -> ModelShape:
        """The shape without padding of the vocabulary."""
        return replace(self.shape, vocab_size=self.shape.vocab_size - self.shape.vocab_padding, vocab_padding=0)

    def plan_artifact(
        self, kind: ArtifactKind, precision: ArtifactPrecision, max_file_bytes: int | None = None
    ) -> ArtifactPlan:
        """Return the plan of an artifact. Raises UserError if the checkpoint does not match the shape."""
        return (
            self._plan_adapter() if kind is ArtifactKind.ADAPTER else self._plan_model(TYPES[precision], max_file_bytes)
        )

    def _plan_model(self, dtype: str, max_file_bytes: int | None) -> ArtifactPlan:
        sizes = parameter_sizes(self.unpadded_shape)
        result = MergedParameters(self.trained, self.base, self.tuning.lora.find_scale)
        result.check(sizes)

        def create_small_files() -> dict[str, bytes]:
            source = None if self.base is None else self.base.source
            name = _TORCH_NAMES[dtype]
            template = self.settings.get(CHAT_TEMPLATE_SETTING)
            files = create_model_files(self.unpadded_shape, name, source, self.tokenizer, template)
            return files | {CARD_NAME: self._create_card(ArtifactKind.MODEL, name)}

        return ArtifactPlan(
            kind=ArtifactKind.MODEL,
            step=self.step,
            identity=self._identify(ArtifactKind.MODEL, dtype),
            stem="model",
            dtype=dtype,
            sizes=sizes,
            rows=result.read_rows,
            small_files=create_small_files,
            max_file_bytes=max_file_bytes,
        )

    def _plan_adapter(self) -> ArtifactPlan:
        shape = self.unpadded_shape
        sizes = dict(select_trainable(shape, self.tuning).sizes)
        result = MergedParameters(self.trained, None, self.tuning.lora.find_scale)
        result.check(sizes)
        shared = shape.tie_embeddings and EMBEDDING in sizes
        if shared:
            sizes[HEAD] = sizes[EMBEDDING]  # peft stores one copy for each of the two

        def read_rows(name: str, first: int, count: int, dtype: torch.dtype) -> Tensor:
            parameter = from_tensor(name)
            return result.read_rows(EMBEDDING if shared and parameter == HEAD else parameter, first, count, dtype)

        def create_small_files() -> dict[str, bytes]:
            source = None if self.base is None else self.base.source
            config = create_adapter_config(
                self.tuning.lora,
                sizes,
                list(list_projection_sizes(shape)),
                None if self.base is None else self.base.location,
            )
            template = self.settings.get(CHAT_TEMPLATE_SETTING)
            files = create_tokenizer_files(source, self.tokenizer, shape.longest_sequence, template)
            return files | {ADAPTER_CONFIG: config, CARD_NAME: self._create_card(ArtifactKind.ADAPTER, "float32")}

        return ArtifactPlan(
            kind=ArtifactKind.ADAPTER,
            step=self.step,
            identity=self._identify(ArtifactKind.ADAPTER, "F32"),
            stem="adapter_model",
            dtype="F32",
            sizes={to_tensor(name): size for name, size in sorted(sizes.items())},
            rows=read_rows,
            small_files=create_small_files,
            metadata={BASE_DIGEST: self.base.digest} if self.base is not None else {},
            max_file_bytes=max(1, sum(math.prod(size) for size in sizes.values()) * 4),
        )

    def _create_card(self, kind: ArtifactKind, precision: str) -> bytes:
        added_rows = 0 if self.base is None else max(0, self.unpadded_shape.vocab_size - self.base.shape.vocab_size)
        card = Card(
            kind=kind,
            step=self.step,
            tokens=self.tokens,
            settings=self.settings,
            tuning=self.tuning,
            base=None if self.base is None else self.base.location,
            precision=precision,
            history=self.history,
            added_rows=added_rows,
        )
        return card.to_markdown().encode()

    def _identify(self, kind: ArtifactKind, dtype: str) -> str:
        base = "" if self.base is None else self.base.digest
        tuning, shape = self.tuning.to_wire(), self.shape.to_json()
        return hash_json([FORMAT_VERSION, kind, dtype, self.step, self.source, base, self.seed, tuning, shape])


def create_merge_inputs(adapter: AdapterWeights, base: BaseWeights, tokenizer: Path | None = None) -> ArtifactInputs:
    """Return the inputs of merging an adapter of another program into its base, with the tuning that it implies.

    `tokenizer` is the adapter's `tokenizer.json`.
    """
    shape = adapter.compute_shape(base.shape)
    replaced = [name for name in adapter.replaced_parameters if not (shape.tie_embeddings and name == HEAD)]
    trainable = [name.removesuffix(".weight") for name in replaced] or None
    tuning = TuningConfig.model_validate({"method": "LoRA", "lora": adapter.lora, "trainable": trainable})
    return ArtifactInputs(
        shape=shape,
        tuning=tuning,
        trained=adapter,
        source=adapter.digest,
        base=base,
        seed=0,
        step=0,
        tokens=0,
        settings={"weights": base.digest},
        tokenizer=tokenizer,
    )
