"""Run the reference of fine-tuning in one process: `transformers.Trainer`, with `peft` for adapters.

The trainer computes nothing here. It only provides the samples of each step and the adapter's initial values; learning
rate and optimizer are those of `reference`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, SequentialSampler
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.parity.preference_peer import strip_peft_prefixes
from benchmarks.parity.reference import build_shape, compute_learning_rate, create_optimizer, iterate_micro_batches
from trainium_contract.trainer.tuning import TuningMethod
from trainium_trainer.tuning.apply import draw_initial_adapter
from trainium_trainer.tuning.trainable import MAGNITUDE, select_trainable

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from trainium_contract.trainer.config import TrainingConfig
    from trainium_trainer.data.loader import MicroBatch

Sample = dict[str, "Tensor"]


@dataclass(frozen=True, slots=True)
class TunedReference:
    """Result of a reference run."""

    losses: list[float]
    model: PreTrainedModel | PeftModel

    def list_trained(self) -> dict[str, Tensor]:
        """Return the trained parameters, by their names in a base or an adapter."""
        return {
            strip_peft_prefixes(name): parameter.detach()
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    def merge(self) -> PreTrainedModel:
        """Return the merged model; this object must not be used afterwards."""
        merged = self.model.merge_and_unload() if isinstance(self.model, PeftModel) else self.model
        model: PreTrainedModel = merged
        model.train(mode=False)
        return model


def tune_reference(config: TrainingConfig, folder: Path) -> TunedReference:
    """Train for all steps of the configuration; the library may write below `folder`."""
    torch.use_deterministic_algorithms(mode=True)
    model = load_base(config)
    samples = [sample for batch in iterate_micro_batches(config) for sample in _build_samples(batch)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch.global_size,
        max_grad_norm=config.optimizer.clip_norm,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
    )
    optimizer = create_optimizer(model, config)
    peak = config.optimizer.learning_rate
    schedule = LambdaLR(
        optimizer, lambda step: compute_learning_rate(config, step) / peak if step < config.steps else 0.0
    )
    trainer = _Trainer(model=model, args=arguments, train_dataset=_Samples(samples), optimizers=(optimizer, schedule))
    trainer.train()
    return TunedReference(trainer.losses, model)


@torch.no_grad()
def compute_loss(model: nn.Module, batch: MicroBatch) -> float:
    """Return the mean loss of a model on a batch."""
    fields = torch.utils.data.default_collate(_build_samples(batch))
    return float(model(**fields, num_items_in_batch=batch.valid_tokens).loss)


class _Samples(Dataset[Sample]):
    def __init__(self, samples: list[Sample]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index]


class _Trainer(transformers.Trainer):
    """Uses the samples in order and records the exact loss of every step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.losses: list[float] = []

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        samples: Any = train_dataset or self.train_dataset
        return SequentialSampler(samples)

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        """Compute the library's loss, which is divided by the valid tokens of the batch."""
        loss: Any = super().compute_loss(*args, **options)
        self.losses.append(loss.item())
        return loss


def _build_samples(batch: MicroBatch) -> list[Sample]:
    """Return the arguments of the model, with a mask of [1, positions, positions] that separates documents."""
    samples = []
    for row in range(len(batch.inputs)):
        labels = batch.labels[row]
        sample = {"input_ids": batch.inputs[row], "labels": labels, "shift_labels": labels}
        if batch.positions is not None:
            positions = batch.positions[row]
            documents = (positions == 0).cumsum(0)
            is_same_document = documents.unsqueeze(0) == documents.unsqueeze(1)
            sample |= {"position_ids": positions, "attention_mask": is_same_document.tril().unsqueeze(0)}
        samples.append(sample)
    return samples


def load_base(config: TrainingConfig) -> PreTrainedModel | PeftModel:
    """Load the base, with peft's adapter if one is trained."""
    assert config.model.weights is not None
    model = AutoModelForCausalLM.from_pretrained(config.model.weights, dtype=torch.float32, attn_implementation="sdpa")
    tuning = config.tuning
    if tuning.method is TuningMethod.FULL:
        return model
    lora = tuning.lora
    targets = select_trainable(build_shape(config), tuning).adapters
    alpha: Any = lora.alpha  # peft multiplies by it, so it may be fractional
    peft = LoraConfig(
        r=lora.rank,
        lora_alpha=alpha,
        use_rslora=lora.rank_stabilized,
        use_dora=lora.dora,
        rank_pattern={name: lora.rank_of(name) for name in targets},
        alpha_pattern={name: lora.find_alpha(name) for name in targets},
        target_modules=list(targets),
        task_type="CAUSAL_LM",
    )
    adapted: PeftModel = get_peft_model(model, peft)
    _initialize_adapter(adapted, config.seed)
    return adapted


@torch.no_grad()
def _initialize_adapter(model: nn.Module, seed: int) -> None:
    """Set the adapter to the trainer's initial values; peft computes the initial magnitudes of DoRA."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and f".{MAGNITUDE}." not in name:
            parameter.copy_(draw_initial_adapter(strip_peft_prefixes(name), parameter.shape, seed))
