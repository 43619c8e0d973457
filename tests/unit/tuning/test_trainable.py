"""Which parameters a tuning method trains, and how they are counted and selected."""

import pytest
import torch

from trainium_contract.models.parameters import count_parameters
from trainium_contract.models.shape import ModelShape
from trainium_contract.trainer.model import ModelConfig, ModelPreset
from trainium_contract.trainer.tuning import TuningConfig
from trainium_trainer.configuration.model_shape import resolve_shape
from trainium_trainer.exits import UserError
from trainium_trainer.models.llama import Llama
from trainium_trainer.tuning.apply import apply_tuning
from trainium_trainer.tuning.trainable import refuse_untrained_rows, select_trainable

LLAMA3_8B = resolve_shape(ModelConfig(preset=ModelPreset.LLAMA3_8B), 128_256)


def tuning(**fields: object) -> TuningConfig:
    return TuningConfig.model_validate(fields)


def lora(**fields: object) -> TuningConfig:
    return tuning(method="LoRA", lora=fields)


def small_shape(**fields: object) -> ModelShape:
    return resolve_shape(ModelConfig.model_validate({"numLayers": 2, "hiddenSize": 32} | fields), 64)


def test_rank_16_on_query_and_value_of_llama3_8b_trains_the_published_number() -> None:
    trainable = select_trainable(LLAMA3_8B, lora(rank=16, targets=["q_proj", "v_proj"]))
    assert trainable.trained == 6_815_744
    assert len(trainable.adapters) == 64


def test_full_tuning_trains_every_parameter() -> None:
    assert select_trainable(LLAMA3_8B, TuningConfig()).trained == count_parameters(LLAMA3_8B) == 8_030_261_248


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "tuning_config",
    [
        lora(rank=4, targets=["*_proj"]),
        lora(rank=4),
        tuning(trainable=["model.layers.1.*", "norm"]),
        tuning(method="LoRA", trainable=["model.embed_tokens"]),
    ],
    ids=["lora everywhere", "lora", "a layer and the last norm", "lora and the embedding"],
)
def test_the_trained_parameters_of_the_model_are_those_that_were_counted(
    tuning_config: TuningConfig, tied: bool
) -> None:
    shape = small_shape(tieEmbeddings=tied)
    trainable = select_trainable(shape, tuning_config)
    with torch.device("meta"):
        model = Llama(shape)
    apply_tuning(model, trainable, tuning_config.lora, frozen=torch.bfloat16)
    trained = {name: tuple(weight.shape) for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained == dict(trainable.sizes)
    for weight in model.parameters():
        assert weight.dtype is (torch.float32 if weight.requires_grad else torch.bfloat16)


def test_patterns_match_whole_names_and_last_parts() -> None:
    shape = small_shape()
    assert select_trainable(shape, lora(rank=4, targets=["model.layers.1.mlp.*"])).adapters == tuple(
        f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")
    )
    assert select_trainable(shape, tuning(trainable=["model.norm.weight"])).weights == {"model.norm.weight"}
    assert "lm_head" in select_trainable(small_shape(tieEmbeddings=False), lora(rank=4, targets=["lm_head"])).adapters


@pytest.mark.parametrize(
    ("tuning_config", "sentence"),
    [
        (lora(targets=["query"]), "tuning.lora.targets has 'query', which matches none of the model's linear layers"),
        (lora(targets=["q_projection"]), "q_proj"),
        (lora(rank=33, targets=["q_proj"]), "use a rank of at most 32"),
        (lora(rank=4, targets=["lm_head"]), "is its embedding"),
        (tuning(trainable=["layers.9"]), "tuning.trainable has 'layers.9', which matches none"),
    ],
)
def test_an_invalid_choice_is_refused_in_one_sentence(tuning_config: TuningConfig, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        select_trainable(small_shape(), tuning_config)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_new_rows_of_a_frozen_embedding_are_refused() -> None:
    shape = small_shape(tieEmbeddings=False)
    with pytest.raises(UserError, match=r"4 more entries than the embedding of base.*model.embed_tokens and lm_head"):
        refuse_untrained_rows(select_trainable(shape, lora(rank=4)), shape, "base", 60)
    trained = tuning(method="LoRA", lora={"rank": 4}, trainable=["model.embed_tokens", "lm_head"])
    refuse_untrained_rows(select_trainable(shape, trained), shape, "base", 60)
