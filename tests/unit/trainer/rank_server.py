"""Fork ranks on request from a process that has imported the trainer, like the agent of a worker.

The process reads one JSON object per line: {"ranks", "argv", "last", "environment", "logs"} starts ranks, the last one
with further arguments, and answers {"pids"}; {"wait": pids, "seconds"} answers {"codes"} (null for a rank that had to
be killed). Both have a "number", and so has the answer.
"""

import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from trainium_devcluster.ports import release_ports, reserve_port

PR_SET_PDEATHSIG = 1
_IMPORTED = ("pyarrow", "pyarrow.ipc", "trainium_trainer.loop.after_training")
"""Modules that a rank imports beyond those of `warm`."""


def start(order: dict[str, Any]) -> list[int]:
    port = reserve_port()
    pids = []
    for rank in range(order["ranks"]):
        pid = os.fork()
        if pid == 0:
            release_ports()
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank outlives an aborted test
            log = os.open(Path(order["logs"]) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": order["ranks"], "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in variables.items()} | {"MASTER_ADDR": "127.0.0.1"})
            os.environ.update(order["environment"])
            from trainium_trainer.cli import main

            if "TEST_OPEN_FILES" in os.environ:
                resource.setrlimit(resource.RLIMIT_NOFILE, json.loads(os.environ["TEST_OPEN_FILES"]))
            if str(rank) == os.environ.get("TEST_NAN_RANK"):
                compute_nan(json.loads(os.environ["TEST_NAN_STEPS"]))
            if rank == 0 and "TEST_EXIT_STEP" in os.environ:
                request_exit(int(os.environ["TEST_EXIT_STEP"]))
            main(order["argv"] + order["last"] * (rank == order["ranks"] - 1))
        pids.append(pid)
    return pids


def request_exit(step: int) -> None:
    """Send SIGTERM to this rank during a step."""
    from trainium_trainer.backends.native import NativeBackend

    original, steps = NativeBackend.all_reduce_totals, [0]

    def totals(self: NativeBackend, **options: Any) -> Any:
        steps[0] += 1
        if steps[0] == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, **options)

    NativeBackend.all_reduce_totals = totals  # type: ignore[method-assign]


def compute_nan(steps: dict[str, int]) -> None:
    """Let this rank compute NaN in its first layer, at the step "forward" or "backward", or from the step "loss" on."""
    from trainium_trainer.backends.native import NativeBackend
    from trainium_trainer.models.llama import Block

    original, block_forward, done = NativeBackend.all_reduce_totals, Block.forward, [0]

    def forward(self: Block, x: Any, *arguments: Any) -> Any:
        if done[0] + 1 == steps.get("forward"):
            x = x * float("nan")
        elif done[0] + 1 == steps.get("backward") and x.requires_grad:
            x = x.view_as(x)  # a pipeline reuses its tensors
            x.register_hook(lambda gradient: gradient * float("nan"))
        return block_forward(self, x, *arguments)

    Block.forward = forward  # type: ignore[method-assign]

    def totals(self: NativeBackend, **options: Any) -> Any:
        done[0] += 1
        if done[0] >= steps.get("loss", done[0] + 1):
            self._losses[-1] = self._losses[-1] * float("nan")
        return original(self, **options)

    NativeBackend.all_reduce_totals = totals  # type: ignore[method-assign]


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
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # like a standby: the collector of a rank does not touch, and so not copy, imported objects
    gc.enable()
    for line in sys.stdin:
        order = json.loads(line)
        answer = {"codes": wait(order["wait"], order["seconds"])} if "wait" in order else {"pids": start(order)}
        print(json.dumps({"number": order["number"], **answer}), flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    serve()
