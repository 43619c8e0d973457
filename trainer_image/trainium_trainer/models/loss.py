"""The loss: summed cross-entropy in float32, also over a vocabulary that tensor parallelism has divided.

Invariants: divided logits are never gathered, three numbers per token travel instead (greatest logit, sum of
exponentials, logit of the label; Megatron-LM, arXiv 1909.08053, section 3); every rank of the group gets the same loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp, all_reduce, get_rank
from torch.nn import functional as F  # noqa: N812 - the name everybody uses

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

IGNORED_LABEL = -100


def loss_sum(
    logits: Tensor, labels: Tensor, *, group: ProcessGroup | None = None, vocabulary: int | None = None
) -> Tensor:
    """Sum of the token losses of a micro-batch, a float32 scalar; ignored labels add nothing.

    `logits` are [batch, sequence, vocabulary] in any type, `labels` [batch, sequence] int64. With a `group`, rank r of
    n holds the r-th of n equal parts of the vocabulary. Columns from `vocabulary` on are of no token and do not count.
    Collective over the group.
    """
    if group is None:
        return _whole_vocabulary(logits, labels, vocabulary, "sum")
    return token_losses(logits, labels, group=group, vocabulary=vocabulary).sum()


def token_losses(
    logits: Tensor, labels: Tensor, *, group: ProcessGroup | None = None, vocabulary: int | None = None
) -> Tensor:
    """Return the loss of each token, [batch, sequence] float32, zero for ignored labels; else as `loss_sum`."""
    if group is None:
        return _whole_vocabulary(logits, labels, vocabulary, "none").view(labels.shape)
    flat: Tensor = _DividedVocabulary.apply(logits.flatten(0, 1), labels.flatten(), group, vocabulary)  # type: ignore[no-untyped-call]
    return flat.view(labels.shape)


def _whole_vocabulary(logits: Tensor, labels: Tensor, vocabulary: int | None, reduction: str) -> Tensor:
    flat = logits.flatten(0, 1)[:, :vocabulary]
    return F.cross_entropy(flat.float(), labels.flatten(), ignore_index=IGNORED_LABEL, reduction=reduction)


class _DividedVocabulary(torch.autograd.Function):
    """Cross-entropy whose gradient needs no further communication: softmax minus one at the label."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: ProcessGroup, vocabulary: int | None) -> Tensor:
        """[tokens, part of the vocabulary] and [tokens] to [tokens]."""
        width = logits.shape[-1]
        wide = logits.float()
        known = width if vocabulary is None else vocabulary - get_rank(group) * width
        if known < width:
            wide = wide.clone() if wide is logits else wide
            wide[:, max(0, known) :] = -torch.inf
        top = wide.amax(-1)
        all_reduce(top, ReduceOp.MAX, group)
        shifted = wide - top[:, None] if wide is logits else wide.sub_(top[:, None])
        here = labels - get_rank(group) * width
        own = (here >= 0) & (here < width)  # an ignored label is far below zero
        column = torch.where(own, here, 0)[:, None]
        at_label = torch.where(own, shifted.gather(-1, column).squeeze(-1), 0.0)
        exponentials = shifted.exp_()
        sums = torch.stack((exponentials.sum(-1), at_label))
        all_reduce(sums, group=group)
        valid = labels != IGNORED_LABEL
        ctx.save_for_backward(exponentials, sums[0], column, own, valid)
        ctx.dtype = logits.dtype
        return (sums[0].log() - sums[1]) * valid

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of the logits, in their type; the saved exponentials become it."""
        exponentials, sums, column, own, valid = ctx.saved_tensors
        (gradient,) = gradients
        softmax = exponentials.mul_((gradient * valid / sums)[:, None])
        softmax.scatter_add_(-1, column, (-gradient * own)[:, None])
        return softmax.to(ctx.dtype), None, None, None
