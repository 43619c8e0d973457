"""Make a dry run (`trainium_trainer.compile.dry_run`) on the lazy device of torch_xla, without communication.

The extraction of graphs on a Neuron device does the same: it builds graphs and runs none. The program has the input of
a dry run, and prints the groups of its collectives and the number of launched graphs as one JSON object.
"""

import json
import os
from typing import NoReturn

os.environ["NXD_CPU_MODE"] = "0"

import standins

standins.install()
standins.disable_communication()

from torch_xla.debug import metrics  # noqa: E402 - the stand-ins come first

from trainium_trainer import exits  # noqa: E402
from trainium_trainer.backends.nxd.backend import NxdBackend  # noqa: E402
from trainium_trainer.compile import dry_run  # noqa: E402

leave = exits.leave
build = NxdBackend.build
tp_rank = -1


def record_tp_rank(self: NxdBackend) -> None:
    global tp_rank  # noqa: PLW0603 - the backend is built before the program prints
    tp_rank = self.mesh.tp_rank
    build(self)


def report_and_exit(code: int) -> NoReturn:
    launched = (metrics.metric_data("ExecuteTime") or [0])[0]
    result = {"launched": launched, "groups": standins.collective_groups, "tpRank": tp_rank}
    print(json.dumps(result), flush=True)  # noqa: T201 - the result
    leave(code)


exits.leave, NxdBackend.build = report_and_exit, record_tp_rank  # type: ignore[method-assign]
dry_run.main()
