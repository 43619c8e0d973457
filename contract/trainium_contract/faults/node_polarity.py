"""Which status of a node's condition is bad, and how bad: the producers disagree.

`NeuronHealth` True is bad, `AcceleratedHardwareReady` False is bad. What a bad one stands for is in `signs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Severity(IntEnum):
    """Severity of a node's problem; a higher one includes the lower ones."""

    SUSPECT = 1
    """New workers prefer other nodes."""
    DRAIN = 2
    """New workers keep away; members hand their rank over as soon as somebody can take it."""
    FATAL = 3
    """Drain at once: what is computed there cannot be trusted, and no time is given to pass."""


@dataclass(frozen=True, slots=True)
class Polarity:
    """Polarity of one type of condition."""

    bad_when: bool
    """The status that is bad: True or False; Unknown never is."""
    severity: Severity


POLARITIES: dict[str, Polarity] = {
    # Neuron's problem detector: the kernel reported an uncorrectable error.
    "NeuronHealth": Polarity(True, Severity.FATAL),
    # The EKS node monitoring agent.
    "AcceleratedHardwareReady": Polarity(False, Severity.FATAL),
    "NetworkingReady": Polarity(False, Severity.DRAIN),
    "KernelReady": Polarity(False, Severity.DRAIN),
    "StorageReady": Polarity(False, Severity.DRAIN),
    "ContainerRuntimeReady": Polarity(False, Severity.DRAIN),
    # The common node problem detector.
    "KernelDeadlock": Polarity(True, Severity.DRAIN),
    "ReadonlyFilesystem": Polarity(True, Severity.DRAIN),
    "FrequentKubeletRestart": Polarity(True, Severity.SUSPECT),
    "FrequentContainerdRestart": Polarity(True, Severity.SUSPECT),
    # The kubelet: it evicts pods by itself when it must, and most pressure passes.
    "MemoryPressure": Polarity(True, Severity.SUSPECT),
    "DiskPressure": Polarity(True, Severity.SUSPECT),
    "PIDPressure": Polarity(True, Severity.SUSPECT),
    "NetworkUnavailable": Polarity(True, Severity.SUSPECT),
}
"""By type; Ready is not among them, for a worker on a node that is merely not ready may train on."""


def bad_when(kind: str) -> bool:
    """Return the bad status of a condition of this type; unknown types follow the naming convention."""
    known = POLARITIES.get(kind)
    return known.bad_when if known is not None else not kind.endswith(("Ready", "Healthy", "Available"))
