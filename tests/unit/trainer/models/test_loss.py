"""Compute the loss over a divided vocabulary; `test_parallel.py` compares several ranks with one."""

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from trainium_trainer.models import loss as loss_module
from trainium_trainer.models.loss import IGNORED_LABEL, ChunkedLoss, compute_loss_sum


def test_the_loss_is_a_sum_without_ignored_labels() -> None:
    logits = torch.randn(1, 3, 7)
    expected = -torch.log_softmax(logits[0], -1)[[0, 2], [2, 6]].sum()
    torch.testing.assert_close(compute_loss_sum(logits, torch.tensor([[2, IGNORED_LABEL, 6]])), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_are_those_of_torch(single_rank_group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = 8 * torch.randn(2, 5, 11, generator=generator)
    labels = torch.randint(0, 11, (2, 5), generator=generator)
    labels[0, 3:] = IGNORED_LABEL
    divided, expected = (values.to(dtype).requires_grad_() for _ in range(2))
    loss = compute_loss_sum(divided, labels, group=single_rank_group)
    reference = compute_loss_sum(expected, labels)
    torch.testing.assert_close(loss, reference)
    assert loss.dtype == torch.float32
    (loss / 7).backward()
    (reference / 7).backward()
    assert divided.grad.dtype == dtype
    torch.testing.assert_close(divided.grad, expected.grad)
    assert not divided.grad[0, 3:].any()


def test_logits_of_any_size_neither_overflow_nor_lose_the_loss(single_rank_group: dist.ProcessGroup) -> None:
    logits = torch.tensor([[[1e4, 0.0, -1e4]]])
    assert compute_loss_sum(logits, torch.tensor([[0]]), group=single_rank_group).item() == 0.0
    assert compute_loss_sum(logits, torch.tensor([[2]]), group=single_rank_group).item() == 2e4


@pytest.mark.parametrize("divided", [True, False])
def test_columns_beyond_the_vocabulary_do_not_count(single_rank_group: dist.ProcessGroup, divided: bool) -> None:
    values = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, 8, (2, 5), generator=torch.Generator().manual_seed(1))
    padded, exact = values.clone().requires_grad_(), values[..., :8].clone().requires_grad_()
    loss = compute_loss_sum(padded, labels, group=single_rank_group if divided else None, vocabulary=8)
    reference = compute_loss_sum(exact, labels)
    torch.testing.assert_close(loss, reference)
    loss.backward()
    reference.backward()
    torch.testing.assert_close(padded.grad[..., :8], exact.grad)
    assert not padded.grad[..., 8:].any()
    assert torch.equal(padded.detach(), values), "the logits do not change"


class TestChunkedLoss:
    """Compare the loss that computes logits in chunks with the loss of all logits."""

    ROWS, LENGTH, WIDTH, VOCABULARY = 2, 21, 8, 50

    def compute(self, loss: ChunkedLoss | None, *, trained: bool) -> tuple[Tensor, list[Tensor], list[int]]:
        """Return the loss, the gradients of hidden states and projection, and the tokens of each projection."""
        torch.manual_seed(0)
        hidden = torch.randn(self.ROWS, self.LENGTH, self.WIDTH, requires_grad=True)
        weight = torch.nn.Parameter(torch.randn(self.VOCABULARY, self.WIDTH), requires_grad=trained)
        chunk_tokens: list[int] = []

        def project(part: Tensor, chunk: slice) -> Tensor:
            chunk_tokens.append(part.shape[0] * part.shape[1])
            assert part.shape[1] == chunk.stop - chunk.start
            return part @ weight.T

        parameters = [weight] if trained else []
        if loss is None:
            value = compute_loss_sum(
                project(hidden, slice(0, self.LENGTH)), self.labels, vocabulary=self.VOCABULARY - 3
            )
        else:
            value = loss(hidden, project, parameters)
        (3.0 * value).backward()  # type: ignore[no-untyped-call]
        return (
            value.detach(),
            [tensor.grad for tensor in (hidden, *parameters) if tensor.grad is not None],
            chunk_tokens,
        )

    @property
    def labels(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        labels = torch.randint(0, self.VOCABULARY - 3, (self.ROWS, self.LENGTH), generator=generator)
        labels[0, :5] = IGNORED_LABEL
        return labels

    @pytest.mark.parametrize("trained", [True, False])
    @pytest.mark.parametrize("max_tokens", [1, 10, 42])
    def test_chunks_give_the_loss_and_the_gradients_of_all_logits(
        self, monkeypatch: pytest.MonkeyPatch, max_tokens: int, trained: bool
    ) -> None:
        monkeypatch.setattr(loss_module, "logits_chunk_tokens", lambda _: max_tokens)
        chunked = ChunkedLoss(self.labels, self.VOCABULARY, None, self.VOCABULARY - 3)
        value, gradients, chunk_tokens = self.compute(chunked, trained=trained)
        expected, others, _ = self.compute(None, trained=trained)
        torch.testing.assert_close(value, expected)
        assert len(gradients) == len(others) == 1 + trained
        torch.testing.assert_close(gradients, others)
        assert sum(chunk_tokens) == self.ROWS * self.LENGTH
        assert max(chunk_tokens) <= max(max_tokens, self.ROWS)

    def test_a_loss_without_gradients_computes_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(loss_module, "logits_chunk_tokens", lambda _: 10)
        hidden = torch.randn(self.ROWS, self.LENGTH, self.VOCABULARY, requires_grad=True)
        chunked = ChunkedLoss(self.labels, self.VOCABULARY, None, self.VOCABULARY)
        with torch.no_grad():
            value = chunked(hidden, lambda part, _: self.without_gradient(part), [])
        torch.testing.assert_close(value, compute_loss_sum(hidden.detach(), self.labels))

    @staticmethod
    def without_gradient(part: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        return part
