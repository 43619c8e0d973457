"""Our Llama against a second, plain implementation written for this test."""

from __future__ import annotations

import cmath
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from trainium_contract.trainer.model import ModelConfig
from trainium_trainer.configuration.model_shape import resolve_shape
from trainium_trainer.models.llama import Llama
from trainium_trainer.models.loss import IGNORED_LABEL, loss_sum

if TYPE_CHECKING:
    from trainium_contract.models.shape import ModelShape


def model_of(**overrides: Any) -> tuple[Llama, ModelShape]:
    config = ModelConfig(num_layers=2, hidden_size=16, intermediate_size=24, vocab_size=40, **overrides)
    shape = resolve_shape(config, 40)
    model = Llama(shape)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.empty(parameter.shape).uniform_(-0.5, 0.5, generator=generator))
    return model, shape


def plain_logits(weights: dict[str, torch.Tensor], shape: ModelShape, tokens: Any) -> Any:
    """One sequence, float64, loops where they are clearest; rotary pairs are (i, i + half) as in Hugging Face."""
    w = {name: value.detach().double().numpy() for name, value in weights.items()}

    def norm(x: Any, weight: Any) -> Any:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + shape.norm_eps) * weight

    def rotate(vector: Any, position: int) -> Any:
        half = len(vector) // 2
        out = np.empty_like(vector)
        for i in range(half):
            turned = complex(vector[i], vector[i + half]) * cmath.exp(
                1j * position * shape.rope_theta ** (-2 * i / len(vector))
            )
            out[i], out[i + half] = turned.real, turned.imag
        return out

    x = w["model.embed_tokens.weight"][tokens]
    for number in range(shape.num_layers):
        p = f"model.layers.{number}."
        h = norm(x, w[p + "input_layernorm.weight"])
        heads, d = shape.num_attention_heads, shape.head_dim
        q = (h @ w[p + "self_attn.q_proj.weight"].T).reshape(len(tokens), heads, d)
        k = (h @ w[p + "self_attn.k_proj.weight"].T).reshape(len(tokens), shape.num_key_value_heads, d)
        v = (h @ w[p + "self_attn.v_proj.weight"].T).reshape(len(tokens), shape.num_key_value_heads, d)
        mixed = np.zeros((len(tokens), heads, d))
        for head in range(heads):
            shared = head // (heads // shape.num_key_value_heads)
            for i in range(len(tokens)):
                scores = np.array(
                    [rotate(q[i, head], i) @ rotate(k[j, shared], j) / math.sqrt(d) for j in range(i + 1)]
                )
                weight = np.exp(scores - scores.max())
                mixed[i, head] = (weight / weight.sum()) @ v[: i + 1, shared]
        x = x + mixed.reshape(len(tokens), -1) @ w[p + "self_attn.o_proj.weight"].T
        h = norm(x, w[p + "post_attention_layernorm.weight"])
        gate = h @ w[p + "mlp.gate_proj.weight"].T
        up = h @ w[p + "mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[p + "mlp.down_proj.weight"].T
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


@pytest.mark.parametrize("key_value_heads", [4, 2, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_those_of_a_plain_implementation(key_value_heads: int, tied: bool) -> None:
    model, shape = model_of(num_attention_heads=4, num_key_value_heads=key_value_heads, tie_embeddings=tied)
    tokens = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(2))
    logits = model(tokens)
    weights = dict(model.named_parameters(remove_duplicate=False))
    for row in range(2):
        expected = plain_logits(weights, shape, tokens[row].numpy())
        np.testing.assert_allclose(logits[row].detach().numpy(), expected, rtol=1e-4, atol=1e-5)


def test_parameter_names_are_those_of_hugging_face() -> None:
    model, _ = model_of(tie_embeddings=False)
    names = [name for name, _ in model.named_parameters() if "layers.1" not in name]
    assert sorted(names) == sorted(
        ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
        + [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkvo"]
        + [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
        + [f"model.layers.0.{part}.weight" for part in ("input_layernorm", "post_attention_layernorm")]
    )


def test_the_future_does_not_change_the_past() -> None:
    model, _ = model_of()
    tokens = torch.randint(0, 40, (1, 8))
    changed = tokens.clone()
    changed[0, 5:] = 0
    torch.testing.assert_close(model(tokens)[0, :5], model(changed)[0, :5])


def test_masked_documents_are_computed_as_if_each_were_alone() -> None:
    model, _ = model_of(num_attention_heads=4, num_key_value_heads=2)
    documents = [torch.randint(0, 40, (1, length)) for length in (5, 1, 9)]
    positions = torch.cat([torch.arange(document.shape[1]) for document in documents]).unsqueeze(0)
    joined = model(torch.cat(documents, dim=1), positions=positions)
    alone = torch.cat([model(document) for document in documents], dim=1)
    torch.testing.assert_close(joined, alone, rtol=1e-5, atol=1e-6)


def test_the_loss_is_a_sum_that_leaves_out_ignored_labels() -> None:
    logits = torch.randn(1, 3, 7)
    labels = torch.tensor([[2, IGNORED_LABEL, 6]])
    expected = -torch.log_softmax(logits[0], -1)[[0, 2], [2, 6]].sum()
    torch.testing.assert_close(loss_sum(logits, labels), expected)
