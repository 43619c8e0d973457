"""Describe a job of another platform in the terms that all of them share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
YEAR_SECONDS = 31_536_000
"""Longest window of a budget: platforms that count restarts count them over the life of a job."""


@dataclass(frozen=True, slots=True)
class Note:
    """A decision of the import, or a part of the input that has no counterpart."""

    text: str
    field: str = ""
    """Field of the TrainingJob that the note explains; empty: nothing in the TrainingJob corresponds."""


@dataclass(frozen=True, slots=True)
class Program:
    """Command of one rank, and what the launcher before it decided."""

    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    min_nodes: int | None = None
    max_nodes: int | None = None
    launched: bool = False
    """Whether torchrun starts the ranks; else the program is the only process of its node, or starts them itself."""
    processes: int | None = None
    """Processes on each node as the options of the launcher have it."""
    one_for_each_device: bool = False
    max_restarts: int | None = None
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that are assigned before the launcher."""
    notes: tuple[Note, ...] = ()

    def set_processes(self, given: object) -> Program:
        """Return the program with the processes that a field of the job gives to a launcher without that option."""
        if not self.launched or self.processes is not None or self.one_for_each_device:
            return self
        number = given if isinstance(given, int) else int(given) if isinstance(given, str) and given.isdigit() else None
        return replace(self, processes=number, one_for_each_device=number is None)


@dataclass(frozen=True, slots=True)
class Budget:
    """Failures of processes that the job survives."""

    max_failures: int
    window_seconds: int
    reason: str
    """Field of the input, for the comment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodParts:
    """Parts of a pod that the workers keep."""

    image: str = ""
    working_directory: str = ""
    template: dict[str, Any] = field(default_factory=dict)
    """Partial pod template, with the training container as `worker`."""
    devices: dict[str, str] | None = None
    """Extended resources of a pod; None: not known."""
    instance_type: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that apply where `SourceJob` has none."""
    storage: dict[str, Any] = field(default_factory=dict)
    """`checkpoint.storage`, where a volume is mounted at its place."""
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceJob:
    """A job of another platform."""

    kind: str
    name: str
    namespace: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    nodes: int = 1
    min_nodes: int | None = None
    max_nodes: int | None = None
    spares: int = 0
    program: Program
    pod: PodParts
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of `spec` of the TrainingJob by their paths, as the source has them; None for none."""
    budget: Budget | None = None
    notes: tuple[Note, ...] = ()
