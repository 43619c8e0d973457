"""Examples that are longer than a sequence: dropped or cut, never without being counted.

Invariants: what is left fits and has something to learn; cut on the left, the last answer is whole and follows at least
one token of its prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from trainium_contract.trainer.examples import TooLong

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Encoded:
    """An example as tokens."""

    ids: NDArray[np.int64]
    trained: NDArray[np.bool_]
    """Whether each token is to be learned; the first one never is, since nothing stands before it."""
    answer: int
    """Where the last answer begins."""
    frame: int = 0
    """Tokens at the beginning that stay whatever is cut: the beginning of a text."""


def fitted(example: Encoded, most: int, rule: TooLong) -> Encoded | None:
    """The example in at most `most` tokens; None when it is dropped."""
    if len(example.ids) <= most:
        return example
    if rule is TooLong.DROP:
        return None
    if rule is TooLong.CUT_RIGHT:
        kept = replace(
            example, ids=example.ids[:most], trained=example.trained[:most], answer=min(example.answer, most)
        )
        return kept if kept.trained[1:].any() else None
    over = len(example.ids) - most
    begin = example.frame + over
    if begin >= example.answer:  # not one token of the prompt would be left
        return None
    frame = slice(0, example.frame)
    return replace(
        example,
        ids=np.concatenate([example.ids[frame], example.ids[begin:]]),
        trained=np.concatenate([example.trained[frame], example.trained[begin:]]),
        answer=example.answer - over,
    )
