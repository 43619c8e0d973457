"""Multiply by a projection with either library, and compute only the required gradients."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - the common name

from trainium_trainer.models import linear as linear_module
from trainium_trainer.models.linear import apply_linear

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.skipif(not HAS_ONEDNN, reason="built without"))])
def onednn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Choose either library, whatever the processor."""
    monkeypatch.setattr(linear_module, "_is_onednn_faster", lambda: request.param)
    return bool(request.param)


def random_float64(*size: int) -> torch.Tensor:
    return torch.randn(size, dtype=torch.float64)


def test_values_and_gradients_are_those_of_float64_rounded(*, onednn: bool) -> None:
    torch.manual_seed(0)
    x, weight, gradient = random_float64(4, 64, 96), random_float64(160, 96), random_float64(4, 64, 160)
    exact = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    expected = F.linear(*exact)
    expected.backward(gradient)
    inputs = [x.float().requires_grad_(), weight.float().requires_grad_()]
    out = apply_linear(*inputs)
    assert ("_Product" in type(out.grad_fn).__name__) is onednn
    assert not out._is_view(), "FSDP registers hooks on the outputs of modules"
    out.backward(gradient.float())
    gradients = [(single.grad, double.grad) for single, double in zip(inputs, exact, strict=True)]
    for value, expected_value in ((out, expected), *gradients):
        torch.testing.assert_close(value.double(), expected_value, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("trained", ["x", "weight", "neither"])
def test_frozen_inputs_get_no_gradient(trained: str) -> None:
    x = random_float64(2, 128, 128).float().requires_grad_(trained == "x")
    weight = random_float64(96, 128).float().requires_grad_(trained == "weight")
    out = apply_linear(x, weight)
    assert out.requires_grad is (trained != "neither")
    if out.requires_grad:
        out.sum().backward()
    assert (x.grad is not None) is (trained == "x")
    assert (weight.grad is not None) is (trained == "weight")


@pytest.mark.usefixtures("onednn")
def test_non_contiguous_inputs_are_supported() -> None:
    x = random_float64(2, 160, 128).float().transpose(1, 2)  # [2, 128, 160]
    weight = random_float64(160, 96).float().t()
    torch.testing.assert_close(apply_linear(x, weight), torch.matmul(x, weight.t()), rtol=1e-4, atol=1e-4)


def test_other_types_and_small_products_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "_is_onednn_faster", lambda: True)
    for x, weight in (
        (torch.randn(2, 4), torch.randn(3, 4)),
        (torch.randn(256, 128).bfloat16(), torch.randn(96, 128).bfloat16()),
        (torch.empty(256, 128, device="meta"), torch.empty(96, 128, device="meta")),
    ):
        out = apply_linear(x, weight.requires_grad_())
        assert "_Product" not in type(out.grad_fn).__name__
    with torch.autocast("cpu", torch.bfloat16):
        assert apply_linear(torch.randn(256, 128), torch.randn(96, 128)).dtype is torch.bfloat16
