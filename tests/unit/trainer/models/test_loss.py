"""The loss over a divided vocabulary; that two and four ranks agree with one is in `test_parallel.py`."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist

from trainium_trainer.models.loss import IGNORED_LABEL, loss_sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_are_those_of_torch(world_of_one: dist.ProcessGroup, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = 8 * torch.randn(2, 5, 11, generator=generator)
    labels = torch.randint(0, 11, (2, 5), generator=generator)
    labels[0, 3:] = IGNORED_LABEL
    found, expected = (values.to(dtype).requires_grad_() for _ in range(2))
    loss = loss_sum(found, labels, group=world_of_one)
    reference = loss_sum(expected, labels)
    torch.testing.assert_close(loss, reference)
    assert loss.dtype == torch.float32
    (loss / 7).backward()
    (reference / 7).backward()
    assert found.grad is not None
    assert found.grad.dtype == dtype
    torch.testing.assert_close(found.grad, expected.grad)
    assert not found.grad[0, 3:].any()


def test_logits_of_any_size_neither_overflow_nor_lose_the_loss(world_of_one: dist.ProcessGroup) -> None:
    logits = torch.tensor([[[1e4, 0.0, -1e4]]])
    assert loss_sum(logits, torch.tensor([[0]]), group=world_of_one).item() == 0.0
    assert loss_sum(logits, torch.tensor([[2]]), group=world_of_one).item() == 2e4


@pytest.mark.parametrize("divided", [True, False])
def test_columns_beyond_the_vocabulary_do_not_count(world_of_one: dist.ProcessGroup, divided: bool) -> None:
    values = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, 8, (2, 5), generator=torch.Generator().manual_seed(1))
    padded, exact = values.clone().requires_grad_(), values[..., :8].clone().requires_grad_()
    loss = loss_sum(padded, labels, group=world_of_one if divided else None, vocabulary=8)
    reference = loss_sum(exact, labels)
    torch.testing.assert_close(loss, reference)
    loss.backward()
    reference.backward()
    assert padded.grad is not None
    torch.testing.assert_close(padded.grad[..., :8], exact.grad)
    assert not padded.grad[..., 8:].any()
    assert torch.equal(padded.detach(), values), "the logits stay as they are"
