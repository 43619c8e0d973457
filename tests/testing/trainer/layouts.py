"""Command-line overrides that choose the layout of a run."""

import pytest

from trainium_trainer.backends.pipeline import check_torch
from trainium_trainer.exits import UserError

TP, SP = "parallelism.tensor=2", "parallelism.sequence=true"
PP, CP = "parallelism.pipeline=2", "parallelism.context=2"
SHARDED, ZERO = "dataParallel=FullySharded", "dataParallel=ShardedOptimizer"
TWO_PASSES = "batch.microSize=4"
"""Half as many passes in a step as by default, for layouts with slow passes."""
VALIDATION = "data.validation={fraction: 0.2, split: Tail, everySteps: 4, samples: 5}"
"""An odd number of samples, so that ranks have different numbers of samples."""


def has_pipelines() -> bool:
    """Return whether the installed torch has pipeline schedules that can be used."""
    try:
        check_torch()
    except UserError:
        return False
    return True


needs_pipelines = pytest.mark.skipif(not has_pipelines(), reason="this torch has no usable pipeline schedules")
