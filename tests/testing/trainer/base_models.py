"""Real Hugging Face folders of tiny Llamas made by `transformers`, and checkpoints as a run leaves them.

model = save_base(tmp_path / "base", dtype=torch.bfloat16, num_hidden_layers=3)
write_run(tmp_path / "run", shape, {"model.norm.weight": tensor}, step=7, settings={"weights": digest})
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainium_contract.models.shape import ModelShape
from trainium_contract.trainer.config import TrainingConfig
from trainium_trainer.checkpoint.interfaces import Position
from trainium_trainer.checkpoint.whole_tensors import TensorSource, write_whole
from trainium_trainer.storage.opening import open_storage
from trainium_trainer.storage.protocol import Retry
from trainium_trainer.tuning.choice import choose
from trainium_trainer.weights import BaseWeights

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TINY: dict[str, Any] = {
    "vocab_size": 72,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def save_base(
    folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, largest: str = "5GB", **fields: Any
) -> Any:
    """Save a Llama of random weights; returns the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    # Larger than usual, so that logits of different weights differ visibly.
    model: torch.nn.Module = LlamaForCausalLM(LlamaConfig(**TINY | {"initializer_range": 0.2} | fields))
    model.to(dtype)
    model.save_pretrained(folder, max_shard_size=largest)  # type: ignore[operator]
    return model


SPECIAL_TOKENS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
"""Numbers that a class would take from a published model, beyond a small vocabulary."""


def save_family(folder: Path, model_type: str, **fields: Any) -> Path:
    """Save a model of a family whose norms and biases are random too; returns the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    given = TINY | SPECIAL_TOKENS | {"initializer_range": 0.2} | fields
    config = AutoConfig.for_model(model_type, **given)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder)  # type: ignore[operator]
    return folder


def write_run(
    root: Path | str,
    shape: ModelShape,
    weights: Mapping[str, torch.Tensor],
    *,
    step: int = 7,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """A committed checkpoint of `weights`, by the names of parameters, as a run of a model of `shape` leaves it."""
    sources = [
        TensorSource(f"model.{name}", tensor.dtype, tensor.shape, tensor.detach) for name, tensor in weights.items()
    ]
    position = Position(step=step, samples=step * 8, tokens=step * 100)
    fixed = {"model": shape.to_json(), "seed": 0, "data": "d" * 64, "globalBatch": 8} | dict(settings or {})
    write_whole(open_storage(str(root)), sources, position, fixed, Retry())


@dataclass
class Tuned:
    """A run of LoRA that has ended, with its base."""

    folder: Path
    base: Any
    """The model of `transformers`."""
    config: TrainingConfig
    shape: ModelShape
    trained: dict[str, torch.Tensor]
    step: int = 7

    @property
    def root(self) -> str:
        return str(self.folder / "run")

    @property
    def weights(self) -> BaseWeights:
        return BaseWeights.open(str(self.folder / "base"))


def save_tuned(
    folder: Path,
    *,
    base: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    trainable: list[str] | None = None,
    vocabulary: int = 72,
    padding: int = 0,
    artifacts: dict[str, Any] | None = None,
) -> Tuned:
    """A tuned model in a folder: `save_tuned(tmp_path, lora={"targets": ["lm_head"]}, artifacts={...})`."""
    model = save_base(folder / "base", **base or {})
    opened = BaseWeights.open(str(folder / "base"))
    config = TrainingConfig.model_validate(
        {
            "model": {"weights": str(folder / "base")},
            "tuning": {"method": "LoRA", "trainable": trainable, "lora": {"rank": 4, "alpha": 12} | (lora or {})},
            "artifacts": {"precision": "Float32"} | (artifacts or {}),
            "checkpoint": {"path": str(folder / "run")},
        }
    )
    shape = ModelShape(
        **{name: getattr(opened.shape, name) for name in ModelShape.__slots__}
        | {"vocab_size": vocabulary + padding, "vocab_padding": padding}
    )
    generator = torch.Generator().manual_seed(5)
    sizes = choose(shape, config.tuning).sizes
    trained = {name: torch.randn(size, generator=generator) * 0.2 for name, size in sizes.items()}
    settings = {"weights": opened.digest, "tuning": config.tuning.to_wire()}
    write_run(folder / "run", shape, trained, settings=settings)
    return Tuned(folder, model, config, shape, trained)
