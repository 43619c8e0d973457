"""Tokens per second of the whole job over the newest steps."""

from __future__ import annotations

from collections import deque

_WINDOW = 20


class Throughput:
    """A moving rate over the last 20 steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=_WINDOW)

    def add(self, tokens: int, seconds: float) -> float:
        """Count a step of all ranks together and return tokens per second."""
        self._steps.append((tokens, seconds))
        total = sum(seconds for _, seconds in self._steps)
        return sum(tokens for tokens, _ in self._steps) / total if total > 0 else 0.0
