"""A tuned model: a base, the adapter of a run beside it, and the run's checkpoint."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.testing.trainer.base_models import save_base, write_run
from tests.testing.trainer.fork_server import fork_context
from trainium_contract.models.shape import ModelShape
from trainium_contract.trainer.config import TrainingConfig
from trainium_trainer.tuning.choice import choose
from trainium_trainer.weights import BaseWeights

if TYPE_CHECKING:
    from collections.abc import Callable

sys.path.insert(0, str(Path(__file__).parent))

from artifact_ranks import PRELOADED


@pytest.fixture(scope="session", autouse=True)
def _preloaded_processes() -> None:
    fork_context(*PRELOADED)


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


@pytest.fixture
def tuned(tmp_path: Path) -> Callable[..., Tuned]:
    """Make one: `tuned(base={"tie_word_embeddings": False}, lora={"targets": ["lm_head"]}, artifacts={...})`."""

    def make(
        *,
        base: dict[str, Any] | None = None,
        lora: dict[str, Any] | None = None,
        trainable: list[str] | None = None,
        vocabulary: int = 72,
        padding: int = 0,
        artifacts: dict[str, Any] | None = None,
    ) -> Tuned:
        model = save_base(tmp_path / "base", **base or {})
        opened = BaseWeights.open(str(tmp_path / "base"))
        config = TrainingConfig.model_validate(
            {
                "model": {"weights": str(tmp_path / "base")},
                "tuning": {"method": "LoRA", "trainable": trainable, "lora": {"rank": 4, "alpha": 12} | (lora or {})},
                "artifacts": {"precision": "Float32"} | (artifacts or {}),
                "checkpoint": {"path": str(tmp_path / "run")},
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
        write_run(tmp_path / "run", shape, trained, settings=settings)
        return Tuned(tmp_path, model, config, shape, trained)

    return make
