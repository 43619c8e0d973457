"""`spec.health`: checks before a worker joins, and the avoidance of bad nodes.

Invariant: a check that cannot run, or whose outcome cannot be read, never fails a worker.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from trainium_contract.base import ContractModel


class PreflightCheck(StrEnum):
    """One check of a worker before it registers."""

    DEVICES = "Devices"
    """All Neuron devices that the worker was given are visible."""
    MEMORY = "Memory"
    """The host has memory to spare, and the memory volume is writable."""
    DISK = "Disk"
    """The scratch volume has space and can be written."""
    CLOCK = "Clock"
    """The clock agrees with the coordinator's."""
    MATMUL = "Matmul"
    """A short matrix product gives the right numbers, on each core."""
    LOOPBACK = "Loopback"
    """An all-reduce among processes of this node gives the right numbers."""
    PAIRWISE = "Pairwise"
    """An all-reduce with another node, when a bad node hides among the members."""
    BANDWIDTH = "Bandwidth"
    """The bandwidth of an all-reduce with another node, before the ranks of a generation start."""


class PreflightSpec(ContractModel):
    """Checks in the agent."""

    checks: Annotated[tuple[PreflightCheck, ...], Field(max_length=16)] = (
        PreflightCheck.DEVICES,
        PreflightCheck.MEMORY,
        PreflightCheck.DISK,
        PreflightCheck.CLOCK,
        PreflightCheck.MATMUL,
        PreflightCheck.LOOPBACK,
        PreflightCheck.PAIRWISE,
    )
    """Which checks run."""
    minimum_bandwidth_gbps: Annotated[float, Field(ge=0, le=1_000_000)] = 0.0
    """Lowest bandwidth of check Bandwidth, in Gbit/s: of an all-reduce between two nodes, and, with check Loopback,
    among the processes of a node. 0: it is measured only."""
    timeout_seconds: Annotated[int, Field(ge=1, le=600)] = 60
    """Time limit; a check that has not finished by then counts as passed."""


class QuarantineSpec(ContractModel):
    """Part of this job in the fleet's record of bad nodes."""

    enabled: bool = True
    """Keep this job's workers off quarantined nodes, and count its failures against the nodes."""
    debounce_seconds: Annotated[int, Field(ge=0, le=3600)] = 0
    """Time that a bad node condition must last before it counts; fatal device faults count at once."""


class HealthSpec(ContractModel):
    """Health of nodes."""

    preflight: PreflightSpec = PreflightSpec()
    """Checks before a worker may join."""
    quarantine: QuarantineSpec = QuarantineSpec()
    """Avoidance of bad nodes."""
