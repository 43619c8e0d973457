"""What is fuzzed: a target makes first cases, and plays any case to its end or raises what should not have happened."""

from __future__ import annotations

from typing import Any, Protocol


class Target(Protocol):
    """One entrance of the operator."""

    @property
    def name(self) -> str:
        """As it is named on a command line."""
        ...

    @property
    def expected(self) -> frozenset[str]:
        """Loggers that may log an error."""
        ...

    @property
    def storable(self) -> bool:
        """Its cases are objects that the API server has stored: see `unfolded`."""
        ...

    def seeds(self) -> list[Any]:
        """Cases to begin with; each is played without an error."""
        ...

    def values(self) -> dict[str, list[Any]]:
        """Values that a field of this name may have, and some that it may not."""
        ...

    async def play(self, case: Any) -> None:
        """Play it in an event loop of virtual time. Raises whatever should not happen."""
        ...
