"""The store that the agents of a generation share, in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainium_agent.exits.restart_policy import GenerationState

if TYPE_CHECKING:
    from collections.abc import Callable


class Shared:
    """Values, counters and the shared state."""

    connected = True

    def __init__(self, **state: Any) -> None:
        self._state = GenerationState(**state)
        self.values: dict[str, str] = {}
        self.counts: dict[str, int] = {}

    def change(self, follow: Callable[[GenerationState], GenerationState]) -> GenerationState:
        self._state = follow(self._state)
        return self._state

    def state(self) -> GenerationState:
        return self._state

    def key(self, attempt: int, *parts: object) -> str:
        return "/".join(map(str, (attempt, *parts)))

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> str:
        return self.values[key]

    def has(self, key: str) -> bool:
        return key in self.values

    def count(self, key: str, more: int = 0) -> int:
        self.counts[key] = self.counts.get(key, 0) + more
        return self.counts[key]
