"""A run on torch_xla's lazy device (its CPU), alone: counts, after each step, what was compiled, launched and fetched.

Prints one JSON object per step. Started with the trainer's arguments.
"""

import json
import os
import sys
from typing import Any

os.environ["NXD_CPU_MODE"] = "0"

import standins

standins.install()

import torch_xla.core.xla_model as xm  # noqa: E402 - the stand-ins come first
from torch_xla.debug import metrics  # noqa: E402

from trainium_trainer.backends.base import StepOutcome  # noqa: E402
from trainium_trainer.backends.nxd import backend  # noqa: E402
from trainium_trainer.cli import main  # noqa: E402

COUNTED = {
    "compiled": "CompileTime",
    "launched": "ExecuteTime",
    "fetched": "TransferFromDeviceTime",
}
step = backend.NxdBackend.step


def counting(self: backend.NxdBackend, **given: Any) -> StepOutcome:
    outcome = step(self, **given)
    xm.wait_device_ops()  # a launch is counted when it has ended
    counts = {name: (metrics.metric_data(metric) or [0])[0] for name, metric in COUNTED.items()}
    missing = [name for name in metrics.counter_names() if name.startswith("aten::")]
    print(json.dumps({**counts, "loss": outcome.loss, "not lowered": missing}), flush=True)  # noqa: T201 - the answer
    return outcome


backend.NxdBackend.step = counting  # type: ignore[method-assign]
main(sys.argv[1:])
