"""Format and parse the rank with the first non-finite values: the trainer writes it, the operator reads it.

A sum over all ranks is non-finite on each of them as soon as one summand is, and all of them report it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_RANK_PATTERN = re.compile(r"\(not finite on ranks? (\d{1,6})(?: alone\)|[, ])")


def format_nonfinite_ranks(ranks: Sequence[int], world_size: int) -> str:
    """Describe the ranks whose own values were not finite; empty if they explain nothing."""
    if not ranks or len(ranks) == world_size:
        return ""
    if len(ranks) == 1:
        return f" (not finite on rank {ranks[0]} alone)"
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f" (not finite on ranks {shown}, finite on the other {world_size - len(ranks)})"


def parse_nonfinite_rank(message: str) -> int | None:
    """Return the first rank in a failure's message that the values are attributed to; None without one."""
    match = _RANK_PATTERN.search(message)
    return int(match.group(1)) if match else None
