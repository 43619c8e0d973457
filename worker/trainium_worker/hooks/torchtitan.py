"""Report the steps of torchtitan's `Trainer`, and save and exit when the agent asks for it.

Usage:

    trainer = Trainer(config)
    report_to_agent(trainer)
    trainer.train()
"""

from __future__ import annotations

from typing import Any

import trainium_worker


def report_to_agent(trainer: Any) -> None:
    """Report each step when the trainer passes it to its checkpointer, and the losses that it logs.

    It uses these parts of the trainer: `checkpointer.load(...)`, `checkpointer.save(step, last_step)` and its
    `interval`, `close()`, and `metrics_processor.log(step, loss, ...)`.
    """
    checkpointer, metrics = trainer.checkpointer, trainer.metrics_processor
    load, save, log = checkpointer.load, checkpointer.save, metrics.log
    losses: dict[int, float] = {}

    def load_and_report(*args: Any, **kwargs: Any) -> Any:
        trainium_worker.stage("load")
        is_loaded = load(*args, **kwargs)
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
        save(curr_step, last_step)
        if stops:
            trainer.close()
            raise SystemExit(trainium_worker.STOPPED)

    metrics.log, checkpointer.load, checkpointer.save = log_and_keep, load_and_report, report_and_save
