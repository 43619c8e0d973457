"""Define the port at which the ranks of an attempt meet, and whether it is served."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MasterPort:
    """The port of the ranks' store, on node 0."""

    port: int
    is_served: bool = False
    """Whether the agent of node 0 serves torch's store there; otherwise rank 0 does."""

    def encode(self) -> str:
        """Return the text for the other agents."""
        return f"{self.port} {self.is_served:d}"

    @staticmethod
    def decode(text: str) -> MasterPort:
        """Return the port of a text."""
        port, is_served = map(int, text.split())
        return MasterPort(port, bool(is_served))
