"""Write tiny Llamas as Hugging Face folders with `transformers`, and checkpoints of runs.

model = save_base(tmp_path / "base", dtype=torch.bfloat16, num_hidden_layers=3)
write_run(tmp_path / "run", shape, {"model.norm.weight": tensor}, step=7, settings={"weights": digest})
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainium_contract.models.shape import ModelShape
from trainium_contract.trainer.config import TrainingConfig
from trainium_trainer.checkpoint.interfaces import Position
from trainium_trainer.checkpoint.whole_tensors import TensorSource, write_whole
from trainium_trainer.models.initialization import draw_initial_tensor
from trainium_trainer.models.llama import Llama
from trainium_trainer.storage import open_storage
from trainium_trainer.storage.protocol import Retry
from trainium_trainer.tuning.trainable import select_trainable
from trainium_trainer.weights.base import BaseWeights

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
    """Save a Llama of random weights and return the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    # Larger than usual, so that logits of different weights differ visibly.
    model: torch.nn.Module = LlamaForCausalLM(LlamaConfig(**TINY | {"initializer_range": 0.2} | fields))
    model.to(dtype)
    model.save_pretrained(folder, max_shard_size=largest)  # type: ignore[operator]
    return model


SPECIAL_TOKENS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
"""Without these, a class takes the ids of a published model, which are beyond a small vocabulary."""


def save_family(folder: Path, model_type: str, **fields: Any) -> Path:
    """Save a model of a family with random norms and biases, and return the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = TINY | SPECIAL_TOKENS | {"initializer_range": 0.2} | fields
    config = AutoConfig.for_model(model_type, **settings)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder)  # type: ignore[operator]
    return folder


def with_flipped_bit(data: bytes, offset: int = -1) -> bytes:
    """Return the data with one altered bit."""
    altered = bytearray(data)
    altered[offset] ^= 1
    return bytes(altered)


def flip_bit(path: Path, offset: int = -1) -> None:
    """Alter one bit of a file."""
    path.write_bytes(with_flipped_bit(path.read_bytes(), offset))


def write_run(
    root: Path | str,
    shape: ModelShape,
    weights: Mapping[str, torch.Tensor],
    *,
    step: int = 7,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write a committed checkpoint of `weights`, by parameter name, as a run of a model of `shape` does."""
    sources = [
        TensorSource(f"model.{name}", tensor.dtype, tensor.shape, tensor.detach) for name, tensor in weights.items()
    ]
    position = Position(step=step, samples=step * 8, tokens=step * 100)
    all_settings = {"model": shape.to_json(), "seed": 0, "data": "d" * 64, "globalBatch": 8} | dict(settings or {})
    write_whole(open_storage(str(root)), sources, position, all_settings, Retry())


SHAPE = ModelShape(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=4,
    rope_theta=10_000.0,
    max_positions=64,
    norm_eps=1e-5,
    tie_embeddings=False,
)
"""A small Llama whose queries share key/value heads; `replace(SHAPE, num_layers=3)` is another."""


def initial_model(shape: ModelShape) -> Llama:
    """Return a model of the initial weights of seed 0."""
    model = Llama(shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(draw_initial_tensor(name, parameter.shape, seed=0, shape=shape))
    return model


@dataclass
class TunedModel:
    """A finished LoRA run and its base."""

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
) -> TunedModel:
    """Save a tuned model: `save_tuned(tmp_path, lora={"targets": ["lm_head"]}, artifacts={...})`."""
    model = save_base(folder / "base", **base or {})
    base_weights = BaseWeights.open(str(folder / "base"))
    config = TrainingConfig.model_validate(
        {
            "model": {"weights": str(folder / "base")},
            "tuning": {"method": "LoRA", "trainable": trainable, "lora": {"rank": 4, "alpha": 12} | (lora or {})},
            "artifacts": {"precision": "Float32"} | (artifacts or {}),
            "checkpoint": {"path": str(folder / "run")},
        }
    )
    shape = ModelShape(
        **{name: getattr(base_weights.shape, name) for name in ModelShape.__slots__}
        | {"vocab_size": vocabulary + padding, "vocab_padding": padding}
    )
    generator = torch.Generator().manual_seed(5)
    sizes = select_trainable(shape, config.tuning).sizes
    trained = {name: torch.randn(size, generator=generator) * 0.2 for name, size in sizes.items()}
    settings = {"weights": base_weights.digest, "tuning": config.tuning.to_wire()}
    write_run(folder / "run", shape, trained, settings=settings)
    return TunedModel(folder, model, config, shape, trained)
