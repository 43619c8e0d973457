"""A dry run (`trainium_trainer.compile.dry_run`) on torch_xla's lazy device, with collectives that move nothing.

On a Neuron device that is what extracting graphs does: they are made, and none is run. Started as the dry run is;
prints the groups of its collectives and how many graphs were launched, as one JSON object.
"""

import json
import os
from typing import NoReturn

os.environ["NXD_CPU_MODE"] = "0"

import standins

standins.install()
standins.move_nothing()

from torch_xla.debug import metrics  # noqa: E402 - the stand-ins come first

from trainium_trainer import exits  # noqa: E402
from trainium_trainer.backends.nxd.backend import NxdBackend  # noqa: E402
from trainium_trainer.compile import dry_run  # noqa: E402

leave = exits.leave
close = NxdBackend.close
place = -1


def asked(self: NxdBackend) -> None:
    global place  # noqa: PLW0603 - the backend is gone when the answer is given
    place = self.mesh.tp_rank
    close(self)


def report_and_exit(code: int) -> NoReturn:
    launched = (metrics.metric_data("ExecuteTime") or [0])[0]
    answer = {"launched": launched, "groups": standins.moved, "place": place}
    print(json.dumps(answer), flush=True)  # noqa: T201 - the answer
    leave(code)


exits.leave, NxdBackend.close = report_and_exit, asked  # type: ignore[method-assign]
dry_run.main()
