"""The loss: summed cross-entropy in float32, also over a vocabulary that tensor parallelism has divided.

Invariants: divided logits are never gathered, three numbers per token travel instead (greatest logit, sum of
exponentials, logit of the label; Megatron-LM, arXiv 1909.08053, section 3); every rank of the group gets the same loss.
Logits of a long sequence exist only stretch by stretch: the gradients of a stretch are computed with its loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp, all_reduce, get_rank
from torch.nn import functional as F  # noqa: N812 - the name everybody uses

from trainium_contract.requirements.memory_estimate import stretch_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn
    from torch.distributed import ProcessGroup

    Projection = Callable[[Tensor, slice], Tensor]
    """From a stretch of the hidden states, and where in the sequence it is, to its logits."""
    LossOfHidden = Callable[[Tensor, Projection, Sequence[nn.Parameter]], Tensor]
    """From the last hidden states, their projection, and the parameters that this one trains, to the loss."""

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


@dataclass(frozen=True, slots=True)
class StretchedLoss:
    """The sum of the token losses of a micro-batch whose logits never exist as a whole; else as `loss_sum`."""

    labels: Tensor
    width: int
    """Columns of this rank's logits."""
    group: ProcessGroup | None
    vocabulary: int

    def __call__(self, hidden: Tensor, project: Projection, trained: Sequence[nn.Parameter]) -> Tensor:
        """[batch, sequence, hidden] to a scalar; `trained` are the parameters that `project` has."""
        stretches = list(self.stretches())
        if len(stretches) == 1:
            return self.of(project(hidden, stretches[0]), stretches[0])
        if not torch.is_grad_enabled():
            return torch.stack([self.of(project(hidden[:, each], each), each) for each in stretches]).sum()
        found: Tensor = _Stretched.apply(self, project, hidden, *trained)  # type: ignore[no-untyped-call]
        return found

    def of(self, logits: Tensor, stretch: slice) -> Tensor:
        """Return the sum over one stretch."""
        return loss_sum(logits, self.labels[:, stretch], group=self.group, vocabulary=self.vocabulary)

    def stretches(self) -> Iterator[slice]:
        """Yield the stretches of the sequence, as even as possible."""
        rows, length = self.labels.shape
        most = max(1, stretch_tokens(self.width) // rows)
        each = -(-length // -(-length // most))
        for start in range(0, length, each):
            yield slice(start, min(start + each, length))


class _Stretched(torch.autograd.Function):
    """Compute a stretch's gradients when its logits exist; the backward pass has only to scale their sums."""

    @staticmethod
    def forward(ctx: Any, loss: StretchedLoss, project: Projection, hidden: Tensor, *trained: Tensor) -> Tensor:
        """See `StretchedLoss`."""
        _, _, for_hidden, *for_trained = ctx.needs_input_grad
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        of_hidden = torch.empty_like(hidden) if for_hidden else None
        sums: list[Tensor | None] = [None] * len(trained)
        wanted = [place for place, needed in enumerate(for_trained) if needed]
        for stretch in loss.stretches():
            part = hidden[:, stretch].detach().requires_grad_(for_hidden)
            with torch.set_grad_enabled(for_hidden or bool(wanted)):
                value = loss.of(project(part, stretch), stretch)
            total += value.detach()
            inputs = [*([part] if for_hidden else []), *(trained[place] for place in wanted)]
            found = list(torch.autograd.grad(value, inputs)) if inputs else []
            if of_hidden is not None:
                of_hidden[:, stretch] = found.pop(0)
            for place, gradient in zip(wanted, found, strict=True):
                before = sums[place]
                sums[place] = gradient.float() if before is None else before.add_(gradient)
        ctx.of_hidden = of_hidden
        ctx.sums = [None if each is None else each.to(one.dtype) for each, one in zip(sums, trained, strict=True)]
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states and parameters; they exist once."""
        found, ctx.of_hidden, ctx.sums = (ctx.of_hidden, *ctx.sums), None, []
        for each in found:
            if each is not None:
                local = each.to_local() if type(each).__name__ == "DTensor" else each
                local.mul_(gradient)
        return None, None, *found


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
