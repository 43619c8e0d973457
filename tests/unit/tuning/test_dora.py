"""Compare a DoRA layer with peft, and set the ranks of single targets."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from torch import nn

from tests.testing.trainer.base_models import SHAPE
from trainium_contract.trainer.tuning import LoraConfig, TuningConfig, TuningMethod
from trainium_trainer.exits import UserError
from trainium_trainer.models.lora import AdaptedLinear, disable_adapters
from trainium_trainer.tuning.trainable import select_trainable

WIDTH, OUTPUTS, RANK = 12, 20, 3


def create_layers() -> tuple[AdaptedLinear, nn.Module]:
    """Create the same layer here and in peft, with an adapter of random numbers."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(WIDTH, OUTPUTS, bias=False))
    config = PeftConfig(r=RANK, lora_alpha=6, target_modules=["0"], use_dora=True)
    peft_layer = get_peft_model(base, config).base_model.model[0]  # type: ignore[arg-type]
    layer = AdaptedLinear("0", WIDTH, OUTPUTS, LoraConfig(rank=RANK, alpha=6, dora=True))
    with torch.no_grad():
        for part in (peft_layer.lora_A, peft_layer.lora_B):
            part.default.weight.normal_(0, 0.3)
        peft_layer.lora_magnitude_vector.default.weight.mul_(1.3)
        layer.weight.copy_(peft_layer.base_layer.weight)
        layer.lora_A.weight.copy_(peft_layer.lora_A.default.weight)
        layer.lora_B.weight.copy_(peft_layer.lora_B.default.weight)
        layer.lora_magnitude_vector.weight.copy_(peft_layer.lora_magnitude_vector.default.weight)
    return layer, peft_layer


def test_outputs_and_gradients_are_those_of_peft() -> None:
    layer, peft_layer = create_layers()
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    targets = torch.randn(2, 5, OUTPUTS, generator=torch.Generator().manual_seed(2))
    for module in (layer, peft_layer):
        (module(x) - targets).square().sum().backward()
    torch.testing.assert_close(layer(x), peft_layer(x))
    for parameter, expected in (
        (layer.lora_A.weight, peft_layer.lora_A.default.weight),
        (layer.lora_B.weight, peft_layer.lora_B.default.weight),
        (layer.lora_magnitude_vector.weight, peft_layer.lora_magnitude_vector.default.weight),
    ):
        assert parameter.grad.any()
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-4, atol=1e-5)


def test_without_its_adapter_the_layer_is_the_base() -> None:
    layer, peft_layer = create_layers()
    x = torch.randn(2, 5, WIDTH)
    with disable_adapters(layer):
        torch.testing.assert_close(layer(x), peft_layer.base_layer(x))
    assert not torch.allclose(layer(x), peft_layer.base_layer(x))


WIDE = replace(SHAPE, hidden_size=32, intermediate_size=48, num_attention_heads=4, head_dim=8)


def lora_tuning(**lora: object) -> TuningConfig:
    settings = {"rank": 4, "targets": ["q_proj", "down_proj"]} | lora
    return TuningConfig(method=TuningMethod.LORA, lora=LoraConfig.model_validate(settings))


def test_patterns_set_the_ranks_of_single_targets() -> None:
    sizes = select_trainable(WIDE, lora_tuning(dora=True, rank_pattern={"model.layers.1.*.q_proj": 2})).sizes
    ranks = {name.removesuffix(".lora_A.weight"): size[0] for name, size in sizes.items() if "lora_A" in name}
    assert ranks == {
        "model.layers.0.self_attn.q_proj": 4,
        "model.layers.0.mlp.down_proj": 4,
        "model.layers.1.self_attn.q_proj": 2,
        "model.layers.1.mlp.down_proj": 4,
    }
    assert sizes["model.layers.1.self_attn.q_proj.lora_magnitude_vector.weight"] == (32,)


@pytest.mark.parametrize(
    ("lora", "sentence"),
    [
        ({"rank_pattern": {"up_proj": 2}}, "tuning.lora.rankPattern has 'up_proj', which matches none"),
        ({"alpha_pattern": {"q_prj": 2}}, "tuning.lora.alphaPattern has 'q_prj', which matches none .*: use q_proj"),
        ({"rank_pattern": {"q_proj": 2, "*_proj": 3}}, "gives model.layers.0.self_attn.q_proj several values"),
        ({"rank_pattern": {"q_proj": 33}}, "tuning.lora.rank is 33, but model.layers.[01].self_attn.q_proj is 32 x 32"),
    ],
)
def test_unmatched_and_contradictory_patterns_are_refused(lora: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        select_trainable(WIDE, lora_tuning(**lora))
