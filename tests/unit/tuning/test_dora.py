"""DoRA against peft: outputs and gradients of one layer, and the loss that a run begins with."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from torch import nn

from tests.testing.trainer.base_models import SHAPE
from trainium_contract.trainer.tuning import LoraConfig, TuningConfig, TuningMethod
from trainium_trainer.exits import UserError
from trainium_trainer.models.lora import AdaptedLinear, adapters_disabled
from trainium_trainer.tuning.trainable import select_trainable

WIDTH, OUTPUTS, RANK = 12, 20, 3


def pair() -> tuple[AdaptedLinear, nn.Module]:
    """Create the same layer here and in peft, with an adapter of random numbers."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(WIDTH, OUTPUTS, bias=False))
    config = PeftConfig(r=RANK, lora_alpha=6, target_modules=["0"], use_dora=True)
    theirs = get_peft_model(base, config).base_model.model[0]  # type: ignore[arg-type]
    ours = AdaptedLinear("0", WIDTH, OUTPUTS, LoraConfig(rank=RANK, alpha=6, dora=True))
    with torch.no_grad():
        for part in (theirs.lora_A, theirs.lora_B):
            part.default.weight.normal_(0, 0.3)
        theirs.lora_magnitude_vector.default.weight.mul_(1.3)
        ours.weight.copy_(theirs.base_layer.weight)
        ours.lora_A.weight.copy_(theirs.lora_A.default.weight)
        ours.lora_B.weight.copy_(theirs.lora_B.default.weight)
        ours.lora_magnitude_vector.weight.copy_(theirs.lora_magnitude_vector.default.weight)
    return ours, theirs


def test_outputs_and_gradients_are_those_of_peft() -> None:
    ours, theirs = pair()
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    wanted = torch.randn(2, 5, OUTPUTS, generator=torch.Generator().manual_seed(2))
    for layer in (ours, theirs):
        (layer(x) - wanted).square().sum().backward()
    torch.testing.assert_close(ours(x), theirs(x))
    for mine, other in (
        (ours.lora_A.weight, theirs.lora_A.default.weight),
        (ours.lora_B.weight, theirs.lora_B.default.weight),
        (ours.lora_magnitude_vector.weight, theirs.lora_magnitude_vector.default.weight),
    ):
        assert mine.grad.any()
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_without_its_adapter_the_layer_is_the_base() -> None:
    ours, theirs = pair()
    x = torch.randn(2, 5, WIDTH)
    with adapters_disabled(ours):
        torch.testing.assert_close(ours(x), theirs.base_layer(x))
    assert not torch.allclose(ours(x), theirs.base_layer(x))


WIDE = replace(SHAPE, hidden_size=32, intermediate_size=48, num_attention_heads=4, head_dim=8)


def chosen(**lora: object) -> TuningConfig:
    given = {"rank": 4, "targets": ["q_proj", "down_proj"]} | lora
    return TuningConfig(method=TuningMethod.LORA, lora=LoraConfig.model_validate(given))


def test_patterns_set_the_ranks_of_single_targets() -> None:
    sizes = select_trainable(WIDE, chosen(dora=True, rank_pattern={"model.layers.1.*.q_proj": 2})).sizes
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
        select_trainable(WIDE, chosen(**lora))
