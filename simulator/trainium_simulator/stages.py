"""Read the duration of each stage of a recovery from a file, from the ledger of a job, or from our benchmarks.

The defaults are those of the development cluster (docs/benchmarks.md and docs/fault-table.md: four workers, a small
model): they are the machinery alone. A model's own start-up, its graphs and its state come on top on a real cluster, so
use a file (`--stages`) or a job (`--learn-from`).
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import yaml
from pydantic import Field, ValidationError

from trainium_contract.base import ContractModel
from trainium_contract.faults.causes import Cause
from trainium_contract.job import TrainingJobStatus
from trainium_contract.status.interruptions import Interruption, Rung
from trainium_simulator.errors import InputError, describe_errors

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

Seconds = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]
DEFAULT_STEP_SECONDS = 2.0


class StageTimes(ContractModel):
    """Seconds of each stage, in the order in which they happen."""

    step_seconds: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = DEFAULT_STEP_SECONDS
    """One step at the size that the job asks for; at another size it follows from the micro-batches."""
    detect_exit_seconds: Seconds = 0.04
    """From the end of a process until its agent, and the agents of the others, know it."""
    publish_seconds: Seconds = 0.08
    """From a decision until the first agents know the new membership."""
    publish_per_node_seconds: Seconds = 0.0006
    """Addition of each node until the last one knows (0.15 s at 128, 0.67 s at 1,000)."""
    leave_seconds: Seconds = 0.15
    """A rank that is asked to leave: after the step in hand, until its state is saved in memory and it is gone."""
    restart_seconds: Seconds = 0.15
    """Time until the processes of the next attempt are up, from the warm standby."""
    rendezvous_seconds: Seconds = 0.05
    """Time until they have met and built the model."""
    load_memory_seconds: Seconds = 0.09
    """Loading the state from the node's own memory."""
    load_peer_seconds: Seconds = 0.9
    """Loading it from a peer's memory or a buddy's copy, where a node is new."""
    load_durable_seconds: Seconds = 1.5
    """Loading it from the durable checkpoint."""
    first_step_seconds: Seconds = 0.0
    """Delay of the first step after a start: graphs are loaded, caches are cold."""
    newcomer_step_seconds: Seconds = 0.0
    """Further delay of that step where a node is new."""
    compile_seconds: Seconds = 0.0
    """Delay of the first step at a size whose graphs were not compiled ahead."""
    pod_seconds: Seconds = 2.2
    """From the creation of a pod until it runs: scheduling, image, start."""
    warm_seconds: Seconds = 3.3
    """From then until its worker can join: preflight, standby processes."""
    pod_stop_seconds: Seconds = 1.0
    """From the deletion of a pod until it is gone."""
    reconnect_seconds: Seconds = 1.0
    """Time until the agents have found an operator that is back."""
    save_stall_seconds: Seconds = 0.02
    """Time that a durable save takes from training."""
    save_seconds: Seconds = 10.0
    """From the beginning of a durable save until it is committed."""

    def publish(self, nodes: int) -> float:
        """From a decision until the last of so many nodes knows it."""
        return self.publish_seconds + self.publish_per_node_seconds * nodes

    def replaced_by(self, given: dict[str, Any]) -> StageTimes:
        """Return these times, with those that a mapping of camelCase names gives. Raises ValidationError."""
        return StageTimes.model_validate({**self.model_dump(by_alias=True), **given})


def read_stages(path: Path, base: StageTimes) -> StageTimes:
    """Return the times of a YAML file, `stepSeconds: 2.2` and so on; what it leaves out stays. Raises InputError."""
    document = read_yaml(path)
    if not isinstance(document, dict):
        raise InputError(f"{path} must hold a mapping such as 'restartSeconds: 3'; it holds something else")
    try:
        return base.replaced_by(document)
    except ValidationError as error:
        known = ", ".join(sorted(field.alias or name for name, field in StageTimes.model_fields.items()))
        raise InputError(f"{path}: {describe_errors(error)}. Known are {known}") from error


def learn_stages(path: Path, base: StageTimes) -> StageTimes:
    """Return the times of a job's ledger and history (`kubectl get trainingjob NAME -o yaml`). Raises InputError.

    The file may have more of the history than a status keeps.
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
    learnt = learnt_from(status, history, base)
    if not learnt:
        raise InputError(
            f"{path}: its status has neither a step time nor a recovery yet; take a job that has trained on"
        )
    return base.replaced_by(learnt)


def learnt_from(status: TrainingJobStatus, history: tuple[Interruption, ...], base: StageTimes) -> dict[str, float]:
    """Return the median seconds of a job's recoveries, by stage that it had."""
    learnt: dict[str, float] = {}
    sizes = [each for each in status.goodput.sizes if each.step_seconds]
    if sizes:
        newest = max(sizes, key=lambda each: each.size)
        learnt["stepSeconds"] = newest.step_seconds or 0.0
    over = [entry for entry in history if entry.recovered_seconds is not None and entry.stages is not None]
    in_place = [entry for entry in over if entry.rung is Rung.IN_PLACE]
    asked = [entry for entry in over if entry.cause in _GRACEFUL]
    moved = [entry for entry in over if entry.rung in (Rung.SPARE, Rung.REPLACE) and entry not in asked]
    crashed = [entry for entry in in_place if entry.cause is Cause.CRASH]
    _learn(learnt, "detectExitSeconds", (entry.detected_seconds or 0.0 for entry in crashed))
    _learn(learnt, "restartSeconds", (entry.stages.restart for entry in in_place or moved if entry.stages))
    # The ledger's Load includes the meeting of the ranks, its Restart what the publication takes.
    _learn(learnt, "loadMemorySeconds", (entry.stages.load for entry in in_place if entry.stages))
    _learn(learnt, "loadPeerSeconds", (entry.stages.load for entry in moved if entry.stages))
    _learn(learnt, "firstStepSeconds", _replays(in_place))
    first = learnt.get("firstStepSeconds", base.first_step_seconds)
    _learn(learnt, "newcomerStepSeconds", (max(0.0, seconds - first) for seconds in _replays(moved)))
    if in_place or moved:
        learnt["rendezvousSeconds"] = 0.0
    if moved and not in_place:
        learnt |= {"publishSeconds": 0.0, "publishPerNodeSeconds": 0.0}
    return learnt | _leaving(learnt, moved if in_place else [], asked, base)


_GRACEFUL = frozenset({Cause.RESIZE, Cause.CAPACITY, Cause.PREEMPTED, Cause.STRAGGLER})
"""Interruptions in which all ranks leave together after the current step."""


def _leaving(
    learnt: dict[str, float], moved: list[Interruption], asked: list[Interruption], base: StageTimes
) -> dict[str, float]:
    """Return the seconds of publication and leaving: a move less a restart in place, less half a step's wait."""
    found: dict[str, float] = {}
    restart = learnt.get("restartSeconds")
    if restart is not None and moved:
        published = median(entry.stages.restart for entry in moved if entry.stages) - restart
        found |= {"publishSeconds": round(max(0.0, published), 3), "publishPerNodeSeconds": 0.0}
    if restart is not None and asked and "stepSeconds" in learnt:
        left = median(entry.stages.restart for entry in asked if entry.stages) - restart - learnt["stepSeconds"] / 2
        found["leaveSeconds"] = round(max(0.0, left - found.get("publishSeconds", base.publish_seconds)), 3)
    return found


def _replays(entries: list[Interruption]) -> list[float]:
    """Return the delays of first steps, where none was repeated."""
    return [entry.stages.replay for entry in entries if entry.stages and not entry.steps_lost]


def _learn(learnt: dict[str, float], name: str, seconds: Iterable[float]) -> None:
    known = list(seconds)
    if known:
        learnt[name] = round(median(known), 3)


def read_yaml(path: Path) -> Any:
    """Return the one document of a YAML file. Raises InputError."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
