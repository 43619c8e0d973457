"""Read the duration of each stage of a recovery from a file, from the ledger of a job, or from the benchmarks.

The defaults are those of the development cluster (docs/benchmarks.md and docs/fault-table.md: four workers, a small
model), without a large model's start-up, graphs and state. For a real cluster use a file (`--stages`) or a job
(`--learn-from`).
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import yaml
from pydantic import Field, ValidationError

from trainium_contract.base import ContractModel
from trainium_contract.faults.causes import Cause
from trainium_contract.job import TrainingJobStatus
from trainium_contract.status.interruptions import Interruption, RecoveryResponse
from trainium_simulator.errors import InputError, describe_errors

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

Seconds = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]
DEFAULT_STEP_SECONDS = 2.0


class StageTimes(ContractModel):
    """Durations of the stages of a recovery in seconds."""

    step_seconds: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = DEFAULT_STEP_SECONDS
    """One step at the size in the job; for another size it follows from the micro-batches."""
    detect_exit_seconds: Seconds = 0.04
    """From the end of a process until all agents have detected it."""
    publish_seconds: Seconds = 0.08
    """From a decision until the first agents have the new membership."""
    publish_per_node_seconds: Seconds = 0.0006
    """Additional time for each node until the last one has it (0.15 s at 128, 0.67 s at 1,000)."""
    leave_seconds: Seconds = 0.15
    """For a rank that is asked to leave: after the current step, until its state is saved in memory and it has
    ended."""
    restart_seconds: Seconds = 0.15
    """To start the processes of the next attempt from the warm standby."""
    rendezvous_seconds: Seconds = 0.05
    """To connect the processes and build the model."""
    load_memory_seconds: Seconds = 0.09
    """To load the state from the memory of the node."""
    load_peer_seconds: Seconds = 0.9
    """To load the state from a peer's memory or a buddy's copy, on a new node."""
    load_durable_seconds: Seconds = 1.5
    """To load the state from the durable checkpoint."""
    first_step_seconds: Seconds = 0.0
    """Additional time of the first step after a start: graphs are loaded, caches are cold."""
    newcomer_step_seconds: Seconds = 0.0
    """Further additional time of that step on a new node."""
    compile_seconds: Seconds = 0.0
    """Additional time of the first step at a size whose graphs were not compiled ahead."""
    pod_seconds: Seconds = 2.2
    """From the creation of a pod until it runs: scheduling, image, start."""
    warm_seconds: Seconds = 3.3
    """From the start of a pod until its worker can join: preflight, standby processes."""
    pod_stop_seconds: Seconds = 1.0
    """From the deletion of a pod until it has ended."""
    reconnect_seconds: Seconds = 1.0
    """From the return of an operator until the agents have connected to it."""
    save_stall_seconds: Seconds = 0.02
    """Stall of training by a durable save."""
    save_seconds: Seconds = 10.0
    """From the start of a durable save until it is committed."""

    def estimate_publication_seconds(self, nodes: int) -> float:
        """Return the seconds from a decision until the last of this many nodes has the new membership."""
        return self.publish_seconds + self.publish_per_node_seconds * nodes

    def override(self, overrides: dict[str, Any]) -> StageTimes:
        """Return these times, overridden by a mapping with camelCase names. Raises ValidationError."""
        return StageTimes.model_validate({**self.model_dump(by_alias=True), **overrides})


def read_stages(path: Path, base: StageTimes) -> StageTimes:
    """Return `base` with the times of a YAML file such as `stepSeconds: 2.2`. Raises InputError."""
    document = read_yaml(path)
    if not isinstance(document, dict):
        raise InputError(f"{path} must hold a mapping such as 'restartSeconds: 3'; it holds something else")
    try:
        return base.override(document)
    except ValidationError as error:
        names = ", ".join(sorted(field.alias or name for name, field in StageTimes.model_fields.items()))
        raise InputError(f"{path}: {describe_errors(error)}. Known are {names}") from error


def learn_stages(path: Path, base: StageTimes) -> StageTimes:
    """Return `base` with the times of a job's ledger and history. Raises InputError.

    The file is the output of `kubectl get trainingjob NAME -o yaml`. It may have more history than a status holds.
    """
    document = read_yaml(path)
    raw = document.get("status") if isinstance(document, dict) else None
    if not isinstance(raw, dict) or not raw:
        raise InputError(f"{path} has no status to learn from; save one with: kubectl get trainingjob NAME -o yaml")
    try:
        status = TrainingJobStatus.model_validate({**raw, "history": ()})
        history = tuple(Interruption.model_validate(entry) for entry in raw.get("history") or ())
    except (ValidationError, TypeError) as error:
        text = describe_errors(error) if isinstance(error, ValidationError) else "history is no list"
        raise InputError(f"{path}: status: {text}") from error
    learned = learn_medians(status, history, base)
    if not learned:
        raise InputError(
            f"{path}: its status has neither a step time nor a recovery yet; take a job that has trained on"
        )
    return base.override(learned)


def learn_medians(status: TrainingJobStatus, history: tuple[Interruption, ...], base: StageTimes) -> dict[str, float]:
    """Return the median seconds of each stage over a job's recoveries, by the camelCase name of the stage."""
    learned: dict[str, float] = {}
    sizes = [account for account in status.goodput.sizes if account.step_seconds]
    if sizes:
        largest = max(sizes, key=lambda size: size.size)
        learned["stepSeconds"] = largest.step_seconds or 0.0
    recovered = [entry for entry in history if entry.recovered_seconds is not None and entry.stages is not None]
    in_place = [entry for entry in recovered if entry.response is RecoveryResponse.IN_PLACE]
    graceful = [entry for entry in recovered if entry.cause in _GRACEFUL]
    replaced = [
        entry
        for entry in recovered
        if entry.response in (RecoveryResponse.SPARE, RecoveryResponse.REPLACE) and entry not in graceful
    ]
    crashed = [entry for entry in in_place if entry.cause is Cause.CRASH]
    _set_median(learned, "detectExitSeconds", (entry.detected_seconds or 0.0 for entry in crashed))
    _set_median(learned, "restartSeconds", (entry.stages.restart for entry in in_place or replaced if entry.stages))
    # The ledger's Load includes the rendezvous, its Restart the publication.
    _set_median(learned, "loadMemorySeconds", (entry.stages.load for entry in in_place if entry.stages))
    _set_median(learned, "loadPeerSeconds", (entry.stages.load for entry in replaced if entry.stages))
    _set_median(learned, "firstStepSeconds", _list_first_step_delays(in_place))
    first_step = learned.get("firstStepSeconds", base.first_step_seconds)
    delays = _list_first_step_delays(replaced)
    _set_median(learned, "newcomerStepSeconds", (max(0.0, seconds - first_step) for seconds in delays))
    if in_place or replaced:
        learned["rendezvousSeconds"] = 0.0
    if replaced and not in_place:
        learned |= {"publishSeconds": 0.0, "publishPerNodeSeconds": 0.0}
    return learned | _learn_handover_times(learned, replaced if in_place else [], graceful, base)


_GRACEFUL = frozenset({Cause.RESIZE, Cause.CAPACITY, Cause.PREEMPTED, Cause.STRAGGLER})
"""Interruptions in which all ranks leave together after the current step."""


def _learn_handover_times(
    learned: dict[str, float], replaced: list[Interruption], graceful: list[Interruption], base: StageTimes
) -> dict[str, float]:
    """Return the seconds of publication and of leaving: what replacements take longer than restarts in place."""
    times: dict[str, float] = {}
    restart = learned.get("restartSeconds")
    if restart is not None and replaced:
        publication = median(entry.stages.restart for entry in replaced if entry.stages) - restart
        times |= {"publishSeconds": round(max(0.0, publication), 3), "publishPerNodeSeconds": 0.0}
    if restart is not None and graceful and "stepSeconds" in learned:
        graceful_restart = median(entry.stages.restart for entry in graceful if entry.stages)
        leave = graceful_restart - restart - learned["stepSeconds"] / 2  # ranks wait half a step on average
        times["leaveSeconds"] = round(max(0.0, leave - times.get("publishSeconds", base.publish_seconds)), 3)
    return times


def _list_first_step_delays(entries: list[Interruption]) -> list[float]:
    """Return the additional seconds of the first steps of recoveries that repeated no step."""
    return [entry.stages.replay for entry in entries if entry.stages and not entry.steps_lost]


def _set_median(learned: dict[str, float], name: str, seconds: Iterable[float]) -> None:
    values = list(seconds)
    if values:
        learned[name] = round(median(values), 3)


def read_yaml(path: Path) -> Any:
    """Return the only document of a YAML file. Raises InputError."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
