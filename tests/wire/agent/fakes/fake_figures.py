"""The start of a fake rank, and the figures of its steps."""

import json
import os
from pathlib import Path
from typing import Any

from trainium_trainer.monitor.step_metrics import StepMetrics


def record_start(**more: Any) -> tuple[Path, int, int, int, int]:
    """Append this start to `starts.jsonl`; return the control folder, rank, world size, generation and attempt."""
    control = Path(os.environ["FAKE_CONTROL"])
    names = ("RANK", "WORLD_SIZE", "TRAINIUM_GENERATION", "TRAINIUM_ATTEMPT")
    rank, world_size, generation, attempt = (int(os.environ[name]) for name in names)
    row = {"rank": rank, "world_size": world_size, "generation": generation, "attempt": attempt, "pid": os.getpid()}
    with (control / "starts.jsonl").open("a") as log:
        log.write(json.dumps({**row, "pod": os.environ["TRAINIUM_POD_NAME"], **more}) + "\n")
    return control, rank, world_size, generation, attempt


def figures(step: int) -> StepMetrics:
    """Return figures that differ from those of every other step."""
    from trainium_trainer.monitor.step_metrics import StepMetrics

    return StepMetrics(
        step=step,
        loss=1.0 / step,
        grad_norm=1.0,
        learning_rate=0.1,
        tokens=step,
        samples=step,
        batch=1,
        tokens_per_second=1.0,
    )
