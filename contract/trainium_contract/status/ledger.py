"""`status.goodput`: where the time of a job went (definitions: docs/goodput.md).

`internal.py` has the state for further accounting.

Guarantees:
- Productive and lost seconds together are the wall time, which excludes the stages after the last step.
- Every ratio is between 0 and 1.
- The object stays small however long the job runs (sums, at most eight sizes and one window of samples).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainium_contract.base import StatusModel

MAX_SIZES = 8
"""Maximum number of sizes whose steps are counted separately."""
STARTUP = "Startup"
"""Lost before the first step, and before the first step after a suspension: no fault, but no training either."""
OVERHEAD = "Overhead"
"""Time in steps beyond the reference step time: slow nodes, saves, input, and the step that a fault cut short."""

ROLE_WAIT = "RoleWait"
"""Time without steps while fewer pods of a role than its minReady were ready."""
DOWN_STAGES = ("Detect", "Decide", "Restart", "Load", "Compile", STARTUP, ROLE_WAIT)
"""Stages in which nothing trains; repeated and slow steps count as up."""


class StageSeconds(StatusModel):
    """Seconds lost to one interruption, by stage; the reference time of the first new step is not lost."""

    detect: float = 0.0
    """From the failure until it was known."""
    decide: float = 0.0
    """Time until the response was decided: the wait for a replacement, 0 if one was available."""
    restart: float = 0.0
    """Time until the processes of the next attempt had started."""
    load: float = 0.0
    """Time until they had connected, built the model and loaded its state."""
    compile: float = 0.0
    """Time until the first step at a size that was not compiled ahead, in a job that compiles ahead."""
    replay: float = 0.0
    """Time until the first step that had not been done before."""

    @property
    def total(self) -> float:
        """Return the sum."""
        return self.detect + self.decide + self.restart + self.load + self.compile + self.replay


STAGES = tuple(StageSeconds.model_fields)
"""The names of the stages of a recovery, in their order."""


class SizeAccount(StatusModel):
    """Steps of the final history that were made at one size."""

    size: int
    """Nodes."""
    steps: int = 0
    """Steps, each counted once."""
    step_seconds: float | None = None
    """Reference step time: the median of a clean window; absent until there is a sample."""
    settled: bool = False
    """Whether a whole window was measured."""


class PublicGoodput(StatusModel):
    """Where the time went since the first generation of workers (definitions: docs/goodput.md)."""

    ratio: float | None = 0.0
    """Strict goodput: productive over wall time, 0 to 1; absent for a program that has reported no step."""
    percent: Annotated[str, Field(max_length=16)] = ""
    """The ratio in per cent, for kubectl get."""
    uptime_ratio: float = 0.0
    """Share of the wall time in which training ran; repeated and slow steps count as up."""
    fleet_ratio: float | None = 0.0
    """Productive node time over all node time that the job held, spares and its quarantined nodes included; absent as
    the ratio.
    """
    productive_seconds: float = 0.0
    """Steps in the final history, at the reference step time; without reported steps the time that was not lost."""
    wall_seconds: float = 0.0
    """Seconds since the first generation of workers, without suspensions and the stages after the last step."""
    lost_seconds: Annotated[dict[str, float], Field(max_length=32)] = {}
    """By cause; Startup, Overhead and RoleWait stand for time that no fault of a worker took."""
    lost_by_stage: Annotated[dict[str, float], Field(max_length=16)] = {}
    """The same seconds by stage: Detect, Decide, Restart, Load, Compile, Replay, Startup, Overhead, RoleWait."""
    stage_seconds: Annotated[dict[str, float], Field(max_length=8)] = {}
    """Time in the stages after the last step, Export and Evaluate; neither part of the wall time nor lost."""
    node_seconds: float = 0.0
    """Node time that the job held or kept others from, until its last step."""
    accounted_until: float | None = None
    """Unix seconds up to which time is accounted; absent while the job holds no node."""
    sizes: Annotated[tuple[SizeAccount, ...], Field(max_length=MAX_SIZES)] = ()
    """Counted steps by size, the newest size last."""
