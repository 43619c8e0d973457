"""Define which status of a node condition is bad, and how bad, because producers disagree.

`NeuronHealth` True is bad, `AcceleratedHardwareReady` False is bad. The cause of a bad one is in `signs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Severity(IntEnum):
    """Severity of a node's problem; a higher one includes the lower ones."""

    SUSPECT = 1
    """New workers prefer other nodes."""
    DRAIN = 2
    """New workers avoid it; members hand their rank over as soon as another worker can take it."""
    FATAL = 3
    """Drain at once: results of the node cannot be trusted, so it is not debounced."""


@dataclass(frozen=True, slots=True)
class Polarity:
    """Polarity of one type of condition."""

    is_bad_when_true: bool
    """Whether the bad status is True, else False; Unknown is never bad."""
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
"""By type, without Ready, because a worker on a node that is merely not ready may train on."""


def is_bad_when_true(kind: str) -> bool:
    """Return whether True is the bad status of this type of condition; unknown types follow the naming convention."""
    polarity = POLARITIES.get(kind)
    return not kind.endswith(("Ready", "Healthy", "Available")) if polarity is None else polarity.is_bad_when_true
