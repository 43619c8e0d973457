"""The loss: summed cross-entropy in float32, also over a vocabulary that tensor parallelism divides.

Logits of a long sequence exist only chunk by chunk: the gradients of a chunk are computed with its loss.

Guarantees:
- Divided logits are never gathered.
- Ranks exchange three numbers per token instead (greatest logit, sum of exponentials, logit of the label; Megatron-LM,
  arXiv 1909.08053, section 3).
- Every rank of the group gets the same loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp, all_reduce, get_rank
from torch.nn import functional as F  # noqa: N812 - the name everybody uses

from trainium_contract.requirements.memory_estimate import logits_chunk_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn
    from torch.distributed import ProcessGroup

    Projection = Callable[[Tensor, slice], Tensor]
    """Maps a chunk of the hidden states and its range in the sequence to logits."""
    LossOfHidden = Callable[[Tensor, Projection, Sequence[nn.Parameter]], Tensor]
    """Maps the last hidden states, the output projection and its trained parameters to the loss."""

IGNORED_LABEL = -100


def compute_loss_sum(
    logits: Tensor, labels: Tensor, *, group: ProcessGroup | None = None, vocabulary: int | None = None
) -> Tensor:
    """Return the sum of the token losses of a micro-batch, a float32 scalar; ignored labels add nothing.

    `logits` are [batch, sequence, vocabulary] in any type, `labels` [batch, sequence] int64. With a `group`, rank r of
    n holds the r-th of n equal parts of the vocabulary. Columns from `vocabulary` on are padding and do not count.
    Collective over the group.
    """
    if group is None:
        return _compute_cross_entropy(logits, labels, vocabulary, "sum")
    return compute_token_losses(logits, labels, group=group, vocabulary=vocabulary).sum()


@dataclass(frozen=True, slots=True)
class ChunkedLoss:
    """The sum of the token losses of a micro-batch, as `compute_loss_sum`, without materialising all logits."""

    labels: Tensor
    width: int
    """The number of columns of this rank's logits."""
    group: ProcessGroup | None
    vocabulary: int

    def __call__(self, hidden: Tensor, project: Projection, trained: Sequence[nn.Parameter]) -> Tensor:
        """Return the loss of [batch, sequence, hidden], a scalar; `trained` are the trained parameters of `project`."""
        chunks = list(self.divide_into_chunks())
        if len(chunks) == 1:
            return self.compute(project(hidden, chunks[0]), chunks[0])
        if not torch.is_grad_enabled():
            return torch.stack([self.compute(project(hidden[:, chunk], chunk), chunk) for chunk in chunks]).sum()
        loss: Tensor = _ChunkedLossFunction.apply(self, project, hidden, *trained)  # type: ignore[no-untyped-call]
        return loss

    def compute(self, logits: Tensor, chunk: slice) -> Tensor:
        """Return the sum over one chunk."""
        return compute_loss_sum(logits, self.labels[:, chunk], group=self.group, vocabulary=self.vocabulary)

    def divide_into_chunks(self) -> Iterator[slice]:
        """Yield the chunks of the sequence, as even as possible."""
        rows, length = self.labels.shape
        max_length = max(1, logits_chunk_tokens(self.width) // rows)
        chunk_length = -(-length // -(-length // max_length))
        for start in range(0, length, chunk_length):
            yield slice(start, min(start + chunk_length, length))


class _ChunkedLossFunction(torch.autograd.Function):
    """Computes the gradients of a chunk in the forward pass, while its logits exist; the backward pass scales them."""

    @staticmethod
    def forward(ctx: Any, loss: ChunkedLoss, project: Projection, hidden: Tensor, *trained: Tensor) -> Tensor:
        """Return the loss and save its gradients."""
        _, _, for_hidden, *for_trained = ctx.needs_input_grad
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        of_hidden = torch.empty_like(hidden) if for_hidden else None
        sums: list[Tensor | None] = [None] * len(trained)
        wanted = [index for index, needed in enumerate(for_trained) if needed]
        for chunk in loss.divide_into_chunks():
            part = hidden[:, chunk].detach().requires_grad_(for_hidden)
            with torch.set_grad_enabled(for_hidden or bool(wanted)):
                value = loss.compute(project(part, chunk), chunk)
            total += value.detach()
            inputs = [*([part] if for_hidden else []), *(trained[index] for index in wanted)]
            gradients = list(torch.autograd.grad(value, inputs)) if inputs else []
            if of_hidden is not None:
                of_hidden[:, chunk] = gradients.pop(0)
            for index, gradient in zip(wanted, gradients, strict=True):
                before = sums[index]
                sums[index] = gradient.float() if before is None else before.add_(gradient)
        ctx.of_hidden = of_hidden
        ctx.sums = [None if sum_ is None else sum_.to(w.dtype) for sum_, w in zip(sums, trained, strict=True)]
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states and parameters, scaled in place."""
        gradients, ctx.of_hidden, ctx.sums = (ctx.of_hidden, *ctx.sums), None, []
        for part in gradients:
            if part is not None:
                local = part.to_local() if type(part).__name__ == "DTensor" else part
                local.mul_(gradient)
        return None, None, *gradients


def compute_token_losses(
    logits: Tensor, labels: Tensor, *, group: ProcessGroup | None = None, vocabulary: int | None = None
) -> Tensor:
    """Return the loss of each token, [batch, sequence] float32, zero for ignored labels, see `compute_loss_sum`."""
    if group is None:
        return _compute_cross_entropy(logits, labels, vocabulary, "none").view(labels.shape)
    flat: Tensor = _DividedVocabulary.apply(logits.flatten(0, 1), labels.flatten(), group, vocabulary)  # type: ignore[no-untyped-call]
    return flat.view(labels.shape)


def _compute_cross_entropy(logits: Tensor, labels: Tensor, vocabulary: int | None, reduction: str) -> Tensor:
    flat = logits.flatten(0, 1)[:, :vocabulary]
    return F.cross_entropy(flat.float(), labels.flatten(), ignore_index=IGNORED_LABEL, reduction=reduction)


class _DividedVocabulary(torch.autograd.Function):
    """Cross-entropy whose backward pass needs no communication: softmax minus one at the label."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: ProcessGroup, vocabulary: int | None) -> Tensor:
        """Map logits [tokens, part of the vocabulary] and labels [tokens] to losses [tokens]."""
        width = logits.shape[-1]
        wide = logits.float()
        unpadded = width if vocabulary is None else vocabulary - get_rank(group) * width
        if unpadded < width:
            wide = wide.clone() if wide is logits else wide
            wide[:, max(0, unpadded) :] = -torch.inf
        top = wide.amax(-1)
        all_reduce(top, ReduceOp.MAX, group)
        shifted = wide - top[:, None] if wide is logits else wide.sub_(top[:, None])
        local_labels = labels - get_rank(group) * width
        is_local = (local_labels >= 0) & (local_labels < width)  # an ignored label is negative
        column = torch.where(is_local, local_labels, 0)[:, None]
        at_label = torch.where(is_local, shifted.gather(-1, column).squeeze(-1), 0.0)
        exponentials = shifted.exp_()
        sums = torch.stack((exponentials.sum(-1), at_label))
        all_reduce(sums, group=group)
        valid = labels != IGNORED_LABEL
        ctx.save_for_backward(exponentials, sums[0], column, is_local, valid)
        ctx.dtype = logits.dtype
        return (sums[0].log() - sums[1]) * valid

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of the logits, in their type; it reuses the memory of the saved exponentials."""
        exponentials, sums, column, is_local, valid = ctx.saved_tensors
        (gradient,) = gradients
        softmax = exponentials.mul_((gradient * valid / sums)[:, None])
        softmax.scatter_add_(-1, column, (-gradient * is_local)[:, None])
        return softmax.to(ctx.dtype), None, None, None
