"""Run one rank on the lazy device of torch_xla (its CPU), and count compilations, launches and fetches of each step.

The program has the arguments of the trainer, and prints one JSON object per step.
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

METRICS = {
    "compiled": "CompileTime",
    "launched": "ExecuteTime",
    "fetched": "TransferFromDeviceTime",
}
step = backend.NxdBackend.step


def count_step(self: backend.NxdBackend, **options: Any) -> StepOutcome:
    outcome = step(self, **options)
    xm.wait_device_ops()  # a launch is counted at its end
    counts = {name: (metrics.metric_data(metric) or [0])[0] for name, metric in METRICS.items()}
    missing = [name for name in metrics.counter_names() if name.startswith("aten::")]
    print(json.dumps({**counts, "loss": outcome.loss, "not lowered": missing}), flush=True)  # noqa: T201 - the answer
    return outcome


backend.NxdBackend.step = count_step  # type: ignore[method-assign]
main(sys.argv[1:])
