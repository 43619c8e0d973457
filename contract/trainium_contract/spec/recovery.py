"""`spec.recovery`: classification and detection of faults, responses to them, and failure budgets.

Invariants: every limit has a default for 1 to 1,000 nodes. Infrastructure faults never use the process budget.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainium_contract.base import ContractModel
from trainium_contract.faults.causes import Cause
from trainium_contract.faults.rules import RecoveryRule

Seconds = Annotated[float, Field(ge=1, le=86_400)]


class BudgetSpec(ContractModel):
    """Failures allowed within a sliding window before the job stops with a verdict."""

    max_failures: Annotated[int, Field(ge=0, le=100_000)]
    """More than this many within the window stop the job."""
    window_seconds: Annotated[int, Field(ge=1, le=31_536_000)] = 3600
    """Length of the window."""


class BudgetsSpec(ContractModel):
    """Budgets by who is to blame; infrastructure faults never use the process budget."""

    process: BudgetSpec = BudgetSpec(max_failures=10)
    """Crashes and hangs of training processes with no known infrastructure cause, and limits of a worker's own that it
    exceeded (memory, local storage)."""
    infrastructure: BudgetSpec = BudgetSpec(max_failures=100, window_seconds=86_400)
    """Lost pods and nodes, faults of devices, hosts and the network."""
    by_cause: Annotated[dict[Cause, BudgetSpec], Field(max_length=24)] = {}
    """Further limits for single causes, for instance {Hang: {maxFailures: 3}}."""


class HangSpec(ContractModel):
    """Limits for hangs, by the phase of a process. A step's limit follows the job's own step times."""

    enabled: bool = True
    """Detect and restart processes that hang."""
    init_seconds: Seconds = 600
    """From the start of the processes until they begin to load; no step has been made yet."""
    compile_seconds: Seconds = 7200
    """Compilation of graphs, and the first step of each start."""
    load_seconds: Seconds = 1200
    """Loading a checkpoint."""
    save_seconds: Seconds = 1200
    """A save that training waits for."""
    step_floor_seconds: Seconds = 15
    """Shortest time after which a step counts as hung."""
    step_factor: Annotated[float, Field(ge=2, le=100)] = 5.0
    """A step is hung after this many times the slowest usual step (99th percentile of the last ones)."""


class StragglerSpec(ContractModel):
    """Nodes that are slower than the others."""

    slowdown: Annotated[float, Field(ge=1.02, le=10)] = 1.2
    """A node is a straggler when its own work takes this many times the median node's."""
    persist_steps: Annotated[int, Field(ge=3, le=100_000)] = 50
    """Steps for which it must stay so before the operator acts."""
    evict: bool = True
    """Hand a persistent straggler's rank to a spare, if one is free; reported in any case."""


class DisruptionSpec(ContractModel):
    """Limits of voluntary disruptions (drains, evictions)."""

    max_durable_age_seconds: Annotated[int, Field(ge=1, le=604_800)] = 1800
    """Evictions are refused while the newest durable checkpoint is older than this."""


class RecoverySpec(ContractModel):
    """Detection of faults, and the responses to them."""

    heartbeat_timeout_seconds: Annotated[float, Field(ge=1, le=600)] = 4.0
    """A member that is silent this long, while the others cannot continue, has failed."""
    max_in_place_restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """Restarts of the processes in place without a new step in between, before the pod is replaced."""
    rescale_after_seconds: Annotated[int, Field(ge=0, le=86_400)] = 120
    """Time to wait for a missing worker before the job shrinks to the best size for the available workers, and between
    two growths."""
    grace_period_seconds: Annotated[int, Field(ge=1, le=3600)] = 60
    """Time for ranks to save and leave on a resize, a suspension or a deletion."""
    budgets: BudgetsSpec = BudgetsSpec()
    """Failures allowed before the job stops with a verdict."""
    rules: Annotated[tuple[RecoveryRule, ...], Field(max_length=16)] = ()
    """Rows that precede the built-in table of faults; the first that matches counts."""
    hang: HangSpec = HangSpec()
    """When a process counts as hung."""
    stragglers: StragglerSpec = StragglerSpec()
    """When a slow node counts as a straggler."""
    disruption: DisruptionSpec = DisruptionSpec()
    """Limits of voluntary disruptions."""
