"""Fork real agents from one process that has imported torch once for all tests.

Lines of JSON on standard input: {"env": {...}, "log": path};
on standard output: {"started": pid} and {"ended": pid, "code": n}.
"""

import gc
import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as the agent does before its standby imports torch

    import torch.distributed  # noqa: F401 - each standby imports it, in 2.3 seconds

    from trainium_agent import __main__, bootstrap, supervisor  # noqa: F401
    from trainium_agent.shared_state import store  # noqa: F401
    from trainium_agent.workload import workload  # noqa: F401
    from trainium_trainer import warm  # noqa: F401
    from trainium_trainer.checks import node_test, pair_test  # noqa: F401
    from trainium_trainer.monitor import progress  # noqa: F401

    gc.freeze()

    commands = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 - lives as long as the process
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write_end)
    send_message({"ready": True})
    while True:
        readable, _, _ = select.select([commands.fileno(), read_end], [], [])
        if read_end in readable:
            os.read(read_end, 4096)
        collect_ended()
        if commands.fileno() in readable:
            line = commands.readline()
            if not line:
                return
            start_agent(json.loads(line))


def start_agent(order: dict[str, Any]) -> None:
    pid = os.fork()
    if pid != 0:
        send_message({"started": pid})
        return
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(order["env"])
    sys.path[:0] = order["env"].get("PYTHONPATH", "").split(":")
    if "WITHOUT_COLLECTOR" in order["env"]:
        gc.disable()
    from trainium_agent import __main__
    from trainium_contract.worker_process import log_lines

    log_lines.TERMINATION_LOG = Path(order["log"]).with_suffix(".termination")
    log_lines.TERMINATION_LOG.touch()
    __main__.main()


def collect_ended() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        send_message({"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def send_message(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
