"""A process with the trainer already imported that forks ranks on request, as a worker's agent does.

Reads one JSON object per line: {"ranks", "argv", "environment", "logs"} starts ranks and answers {"pids"};
{"wait": pids, "seconds"} answers {"codes"} (null for a rank that had to be killed). Both have a "number", and so has
the answer.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from trainium_devcluster.ports import let_go, reserved_port

PR_SET_PDEATHSIG = 1
_ASKED_FOR = ("pyarrow", "pyarrow.ipc", "trainium_trainer.loop.after_training")
"""What a rank imports besides what `warm` knows without a configuration."""


def start(order: dict[str, Any]) -> list[int]:
    port = reserved_port()
    pids = []
    for rank in range(order["ranks"]):
        pid = os.fork()
        if pid == 0:
            let_go()
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank outlives an aborted test
            log = os.open(Path(order["logs"]) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(order["ranks"]),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                **order["environment"],
            )
            from trainium_trainer.cli import main

            if str(rank) == os.environ.get("FORGE_BROKEN_RANK"):
                break_from(int(os.environ["FORGE_BROKEN_STEP"]), os.environ.get("FORGE_BROKEN_PART", "loss"))
            main(order["argv"])
        pids.append(pid)
    return pids


def break_from(step: int, part: str) -> None:
    """This rank's device computes nonsense from a step on: the loss, the first layer forward, or backward."""
    from trainium_trainer.backends.native import NativeBackend
    from trainium_trainer.models.llama import Block

    original, block, taken = NativeBackend.totals, Block.forward, [0]

    def forward(self: Block, x: Any, *rest: Any) -> Any:
        if taken[0] + 1 == step:
            if part == "forward":
                x = x * float("nan")
            elif part == "backward" and x.requires_grad:
                x = x.view_as(x)  # a pipeline reuses its tensors
                x.register_hook(lambda gradient: gradient * float("nan"))
        return block(self, x, *rest)

    Block.forward = forward  # type: ignore[method-assign]

    def totals(self: NativeBackend, **words: Any) -> Any:
        taken[0] += 1
        if taken[0] >= step and part == "loss":
            self._losses[-1] = self._losses[-1] * float("nan")
        return original(self, **words)

    NativeBackend.totals = totals  # type: ignore[method-assign]


def wait(pids: list[int], seconds: float) -> list[int | None]:
    deadline = time.monotonic() + seconds
    codes = {}
    while len(codes) < len(pids) and time.monotonic() < deadline:
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for pid in pids:
        if pid not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [codes.get(pid) for pid in pids]


def serve() -> None:
    from trainium_trainer.warm import warm

    gc.disable()
    warm()
    for name in _ASKED_FOR:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # as a standby does: the collector of a rank leaves alone, and so does not copy, what is imported here
    gc.enable()
    for line in sys.stdin:
        order = json.loads(line)
        answer = {"codes": wait(order["wait"], order["seconds"])} if "wait" in order else {"pids": start(order)}
        print(json.dumps({"number": order["number"], **answer}), flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    serve()
