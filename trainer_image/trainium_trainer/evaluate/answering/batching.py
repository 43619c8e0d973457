"""How examples become batches. Pure arithmetic on lengths, equal on every rank and at every number of ranks."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def batches(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Numbers of the examples in batches of at most `size`, similar lengths together, the longest first.

    The longest come first so that memory which does not do is found at once.
    """
    order = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
    return [order[start : start + size] for start in range(0, len(order), size)]


def share(batches: Sequence[list[int]], place: int, places: int) -> list[list[int]]:
    """The batches that one of `places` readers takes: whole ones, so that no figure depends on how many read."""
    return list(batches[place::places])


def draw_seeds(prompts: Sequence[Sequence[int]], seed: int) -> list[int]:
    """A seed for the draws of each prompt: of `seed`, the prompt's ids, and how many equal prompts stand before it."""
    before: Counter[bytes] = Counter()
    seeds = []
    for ids in prompts:
        content = ",".join(map(str, ids)).encode()
        digest = hashlib.sha256(f"{seed}/{before[content]}/".encode() + content).digest()
        before[content] += 1
        seeds.append(int.from_bytes(digest[:8]) >> 1)  # what a generator takes as its seed
    return seeds
