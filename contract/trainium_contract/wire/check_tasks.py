"""The tasks of the check processes that an agent starts in the trainer's image, and their results."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class NodeTask:
    """The arguments of one check process."""

    index: int
    """Index of the process on the node, and of the core that it tests."""
    size: int
    folder: str
    seconds: float
    """Longest wait for the node's other processes, in seconds."""
    matmul: bool = True
    loopback: bool = True
    bandwidth: bool = False
    """Measure the all-reduce of `loopback` too."""

    @property
    def result(self) -> Path:
        """File for the result."""
        return Path(self.folder) / f"{self.index}.json"


@dataclass(frozen=True, slots=True)
class PairTask:
    """The arguments of one process of an exchange."""

    index: int
    """Index in the group."""
    size: int
    host: str
    port: int
    seconds: float
    """Longest wait for the other members of the group, in seconds."""
    result: str
    """Path of the file for the result."""
    bandwidth: bool = False
    """Measure only the bandwidth of the job's collectives."""


@dataclass(frozen=True, slots=True)
class PairingResult:
    """The result of one node in one exchange."""

    passed: bool
    """Whether the exchange completed with correct numbers."""
    seconds: float = 0.0
    healthy: bool = True
    """Whether the node's own computation was correct."""
    detail: str = ""
    gigabits: float = 0.0
    """Bandwidth of the exchange in Gbit/s: the data that a node sends in a ring, over the time; 0 if unknown."""

    def encode(self) -> str:
        """Return the value as text."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> PairingResult:
        """Decode a text of an agent of the same generation."""
        return PairingResult(**json.loads(text))
