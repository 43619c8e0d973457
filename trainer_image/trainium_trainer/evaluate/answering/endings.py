"""When an answer ends: at a stop text or its greatest length; end-of-text tokens are the library's own business."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import BoolTensor, FloatTensor, LongTensor
from transformers import StoppingCriteria

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_BYTES_OF_A_CHARACTER = 4


class Ending(StrEnum):
    """Why an answer ended."""

    END_OF_TEXT = "EndOfText"
    STOP = "Stop"
    LENGTH = "Length"


def cut(text: str, stop: Sequence[str]) -> str | None:
    """The text before the first stop text in it; None when there is none."""
    places = [place for place in map(text.find, stop) if place >= 0]
    return text[: min(places)] if places else None


class Endings(StoppingCriteria):
    """Ends a row at its own limit or when its newest tokens complete a stop text; a sign of life with each token."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        width: int,
        limits: Sequence[int],
        stop: Sequence[str],
        beat: Callable[[], None],
    ) -> None:
        """`width` is the length of the padded prompts, `limits` are most new tokens of each row."""
        self._decode = decode
        self._width = width
        self._limits = limits
        self._stop = stop
        # No token is shorter than a byte, so a stop text that has just been completed begins within these.
        self._tail = max((_BYTES_OF_A_CHARACTER * len(text) for text in stop), default=0) + _BYTES_OF_A_CHARACTER
        self._beat = beat
        self.lengths = list(limits)
        """New tokens of each row until it ended here; what follows is padding."""

    def __call__(self, input_ids: LongTensor, scores: FloatTensor, **_: Any) -> BoolTensor:  # noqa: ARG002
        """[rows, width + new] ids to [rows]: which rows are at their end."""
        self._beat()
        new = input_ids.shape[1] - self._width
        tails = input_ids[:, max(self._width, input_ids.shape[1] - self._tail) :].tolist() if self._stop else None
        done = []
        for row, limit in enumerate(self._limits):
            stops = tails is not None and cut(self._decode(tails[row]), self._stop) is not None
            if stops or new >= limit:
                self.lengths[row] = min(self.lengths[row], new)
            done.append(new >= self.lengths[row])
        return cast("BoolTensor", torch.tensor(done, device=input_ids.device))
