"""Report the steps of torchtitan's `Trainer`, save and exit when the agent asks for it, and recover from memory.

Usage:

    trainer = Trainer(config)
    report_to_agent(trainer)
    trainer.train()
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import trainium_worker
from trainium_worker.dcp import MemoryReader, MemoryWriter

if TYPE_CHECKING:
    from concurrent.futures import Future


def report_to_agent(trainer: Any, *, memory: bool = False) -> None:
    """Report each step when the trainer passes it to its checkpointer, and the losses that it logs.

    It uses these parts of the trainer: `checkpointer.load(...)`, `checkpointer.save(step, last_step)` and its
    `interval`, `close()`, and `metrics_processor.log(step, loss, ...)`. memory: also keep each step in the memory of
    the nodes, and resume from it where it is newer; collective then.
    """
    checkpointer, metrics = trainer.checkpointer, trainer.metrics_processor
    load, save, log = checkpointer.load, checkpointer.save, metrics.log
    losses: dict[int, float] = {}
    states = _MemoryStates(checkpointer) if memory else None

    def load_and_report(*args: Any, **kwargs: Any) -> Any:
        trainium_worker.stage("load")
        is_loaded = (states is not None and states.load()) or load(*args, **kwargs)
        trainium_worker.stage("compile")  # until the first step
        return is_loaded

    def log_and_keep(step: int, global_avg_loss: float, *args: Any, **kwargs: Any) -> None:
        losses.clear()
        losses[step] = global_avg_loss
        log(step, global_avg_loss, *args, **kwargs)

    def report_and_save(curr_step: int, last_step: bool = False) -> None:
        trainium_worker.step(curr_step, loss=losses.get(curr_step))
        stops = trainium_worker.should_stop() and not last_step
        if stops:
            checkpointer.interval = 1  # the trainer saves this step as an ordinary checkpoint
        if states is not None:
            states.save(curr_step)
        save(curr_step, last_step)
        if states is not None and (stops or last_step):
            states.wait()
        if stops:
            trainer.close()
            raise SystemExit(trainium_worker.STOPPED)

    metrics.log, checkpointer.load, checkpointer.save = log_and_keep, load_and_report, report_and_save


class _MemoryStates:
    """The states of a checkpointer in the memory of the nodes, one save at a time."""

    def __init__(self, checkpointer: Any) -> None:
        self._checkpointer = checkpointer
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._saving: Future[Any] | None = None
        wait_for_staging = checkpointer.maybe_wait_for_staging

        def wait_before_step() -> None:
            self.wait()  # for the save of the step before: a fault costs at most one step
            wait_for_staging()

        checkpointer.maybe_wait_for_staging = wait_before_step

    def load(self) -> bool:
        """Load the newest step from memory, unless storage has a newer one; return whether it did. Collective."""
        checkpointer = self._checkpointer
        reader = MemoryReader(Path(checkpointer.folder, "step-{step}"))
        if reader.source != trainium_worker.MEMORY:
            return False
        states = checkpointer._states_to_load(model_only=False)
        dcp.load(states, storage_reader=reader, process_group=self._group)
        checkpointer.states["model"].load_state_dict(states)  # torchtitan flattens it
        return True

    def save(self, step: int) -> None:
        """Copy the states after a step, and save them in the background. Collective."""
        writer = MemoryWriter(step)
        if not writer.is_enabled:
            return
        states = self._checkpointer._flattened_model_states_sd()
        saving: Any = dcp.async_save(states, storage_writer=writer, process_group=self._group)
        self._saving = saving

    def wait(self) -> None:
        """Wait for the save in progress. Raises its error."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()
