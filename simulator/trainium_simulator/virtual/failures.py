"""Model what fails, how often, and together with what, with the sources of the figures.

Two regimes are published, ten-fold apart; a rate takes the mix of the one that it belongs to (`resolve_mix`):

* **Hardware** (up to 10 interruptions per 1,000 node-days). Shares are the 419 unexpected interruptions of Llama 3 in
  54 days on 2,048 nodes ("The Llama 3 Herd of Models", arXiv 2407.21783, table 5; 3.8 per 1,000 node-days): GPU 148,
  HBM 72, SRAM 19, system processor 17, thermal and sensors 6 (together `DeviceError`); software and dependencies 56
  (`ProcessCrash`); switches, cables and interfaces 42, of which we take one in five to be a switch (`Rack`; assumed)
  and the others to lose one node; unscheduled maintenance 32 (`Maintenance`); hosts 14 (`NodeLost`); communication
  that stalled 7 (`Hang`); silent corruption 6 (`Corruption`). Others: RSC-1, 6.5 per 1,000 node-days (arXiv
  2410.21680); FT-HSDP 2.3.
* **AllCauses** (above). About 22 per 1,000 node-days in four sources (OPT-175B's log book; ByteRobust, SOSP'25; Ant's
  DLRover; RSC-1's jobs of 1,024 GPUs). Shares: half crashes of processes, an eighth hangs (ByteRobust's 12 % of
  implicit failures), the rest nodes and devices as above (the split of the other 38 % is assumed).

Besides:

* **Lemons**: 3 of 63 nodes had more than half of all exclusions (SKT and Lablup): one machine in 21 has hardware faults
  20 times as often. A repair that changes the machine may yield another lemon.
* **Infant mortality**: a newly installed machine fails three times as often for three days (assumed; SuperBench
  found 10 % of new nodes defective).
* **Stragglers**: one per 10 interruptions, 1.3 times as slow, for hours (assumed; ByteRobust, Guard: up to 1.7).
* **Outages of the API server**: one in 30 days, ten minutes (assumed; EKS guarantees 99.95 %, 22 minutes a month).
* **Repair**: a reboot takes 10 minutes, half of lost nodes and all notices need no more. Another machine comes after 45
  minutes in the median with a long tail (log-normal, sigma 0.8; EKS waits 10 to 30 minutes before it acts, HyperPod
  then takes about 3; capacity may be absent). A switch is repaired in 30 minutes.
* **Shared nodes** are idle for four hours and in use by others for four, on the average (assumed; exponential).
* **Manual restart**: a user restarts a job that ended with a verdict, after an hour.
* **Operator failures**: none by default. Manual resizes occur only in traces.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from trainium_contract.base import ContractModel

MAX_HARDWARE_RATE = 10.0
"""Interruptions per 1,000 node-days; above this rate most have other causes."""


class FaultClass(StrEnum):
    """Classes of faults; the names that a trace uses."""

    PROCESS_CRASH = "ProcessCrash"
    HANG = "Hang"
    DEVICE_ERROR = "DeviceError"
    NODE_LOST = "NodeLost"
    CORRUPTION = "Corruption"
    """A loss or gradient that is not finite."""
    MAINTENANCE = "Maintenance"
    """The node leaves after a notice."""
    RACK = "Rack"
    """All nodes of a rack are lost at once."""
    STRAGGLER = "Straggler"
    API_OUTAGE = "ApiOutage"
    """The API server is unavailable; training continues."""
    OCCUPIED = "Occupied"
    """Pods of other users, of normal priority, need the node; a requested worker is not affected."""
    OPERATOR_LOST = "OperatorLost"
    """The operator's process ends; another one leads after a while."""
    RESIZE = "Resize"
    """A user requests another number of nodes, and later the original one."""


CLUSTER_FAULTS = frozenset({FaultClass.API_OUTAGE, FaultClass.OPERATOR_LOST})
"""Faults that concern no particular node."""


MACHINE_FAULTS = frozenset({FaultClass.DEVICE_ERROR, FaultClass.NODE_LOST, FaultClass.STRAGGLER})
"""Faults that are more frequent on a lemon or a new machine."""


class Mix(StrEnum):
    """The mixes of fault classes from which interruptions are drawn."""

    AUTO = "Auto"
    """The mix of the regime of the rate."""
    HARDWARE = "Hardware"
    ALL_CAUSES = "AllCauses"


_HARDWARE = {
    FaultClass.DEVICE_ERROR: 262 / 419,
    FaultClass.PROCESS_CRASH: 56 / 419,
    FaultClass.NODE_LOST: (14 + 34) / 419,
    FaultClass.MAINTENANCE: 32 / 419,
    FaultClass.RACK: 8 / 419,
    FaultClass.HANG: 7 / 419,
    FaultClass.CORRUPTION: 6 / 419,
}
_ALL_CAUSES = {
    FaultClass.PROCESS_CRASH: 0.50,
    FaultClass.HANG: 0.12,
    FaultClass.DEVICE_ERROR: 0.24,
    FaultClass.NODE_LOST: 0.09,
    FaultClass.MAINTENANCE: 0.032,
    FaultClass.RACK: 0.004,
    FaultClass.CORRUPTION: 0.014,
}
SHARES = {Mix.HARDWARE: _HARDWARE, Mix.ALL_CAUSES: _ALL_CAUSES}


def resolve_mix(rate: float, mix: Mix) -> Mix:
    """Return the mix for a rate (per 1,000 node-days)."""
    if mix is not Mix.AUTO:
        return mix
    return Mix.HARDWARE if rate <= MAX_HARDWARE_RATE else Mix.ALL_CAUSES


Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=31_536_000, allow_inf_nan=False)]
PerMonth = Annotated[float, Field(ge=0, le=1_000_000, allow_inf_nan=False)]


class FailureModel(ContractModel):
    """The numbers of the model; the module lists their sources."""

    lemon_share: Share = 1 / 21
    lemon_factor: Annotated[float, Field(ge=1, le=1000)] = 20.0
    infant_factor: Annotated[float, Field(ge=1, le=1000)] = 3.0
    infant_seconds: Seconds = 3 * 86_400.0
    stragglers_per_interruption: Share = 0.1
    straggler_factor: Annotated[float, Field(ge=1, le=100)] = 1.3
    straggler_seconds: Seconds = 6 * 3600.0
    outage_seconds: Seconds = 600.0
    outages_per_30_days: PerMonth = 1.0
    operator_seconds: Seconds = 20.0
    """From the end of an operator until another leads."""
    operator_losses_per_30_days: PerMonth = 0.0
    resize_seconds: Seconds = 3600.0
    """Time until a user who requested another number of nodes requests the original one."""
    rack_nodes: Annotated[int, Field(ge=1, le=1000)] = 4
    rack_seconds: Seconds = 1800.0
    reboot_seconds: Seconds = 600.0
    reboot_share: Share = 0.5
    """Share of lost nodes that return as the same machine after a reboot."""
    repair_seconds: Seconds = 2700.0
    """Median time until another machine replaces a broken one."""
    repair_sigma: Annotated[float, Field(ge=0, le=3)] = 0.8
    notice_seconds: Seconds = 120.0
    idle_seconds: Annotated[float, Field(gt=0, le=31_536_000, allow_inf_nan=False)] = 14_400.0
    """Average time for which a shared node (`--idle-nodes`) is idle."""
    occupied_seconds: Annotated[float, Field(gt=0, le=31_536_000, allow_inf_nan=False)] = 14_400.0
    """Average time for which others then use it."""
    user_response_seconds: Seconds = 3600.0
    """Time until a user restarts an ended job or a hung one."""
