"""Run the trainer with a fault injector, instead of the plain entry point, in the workers of the fault table.

It delays the steps of the small model to a constant duration, and executes commands, which are files in
`TRAINIUM_FAULTS_DIR`: `do-POD` for the ranks of one pod, `do-all` for all. A command runs once unless it is `sticky`.

The file is copied to a folder from which workers import, so it imports nothing of this package. Losses equal those of
the plain trainer, because a step without a command is only delayed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_trainer.backends.native import NativeBackend
    from trainium_trainer.data.batches.micro_batches import MicroBatch

FOLDER = Path(os.environ.get("TRAINIUM_FAULTS_DIR", "/nonexistent"))
PACE = float(os.environ.get("TRAINIUM_FAULTS_PACE", "0"))
POD = os.environ.get("TRAINIUM_POD_NAME", "")
_FOREVER = 10_000_000.0
_POLL_SECONDS = 0.05
_STATE = {"rank": False, "mute": False}


def main(argv: list[str]) -> Any:
    """Run the trainer; the agent calls this in each training process."""
    from trainium_trainer import cli  # noqa: PLC0415 - the warm standby has it already

    _STATE["rank"] = True
    name = f"pid-{POD}-{os.environ.get('LOCAL_RANK', '0')}"
    with contextlib.suppress(OSError):
        draft = FOLDER / f".{name}.{os.getpid()}"
        draft.write_text(str(os.getpid()))
        draft.rename(FOLDER / name)
    _pace_steps()
    _stall_storage()
    return cli.main(argv)


def next_command(step: int) -> dict[str, Any] | None:
    """Return the command for this process at this step, and remove it unless it is sticky."""
    for name in (f"do-{POD}", "do-all"):
        path = FOLDER / name
        try:
            found: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if step < int(found.get("step", 0)):
            continue
        if not found.get("sticky"):
            with contextlib.suppress(OSError):
                path.rename(FOLDER / f"done-{name}")
        with contextlib.suppress(OSError):
            (FOLDER / f"injected-{POD}").write_text(f"{time.time():.3f}")
        return found
    return None


def _pace_steps() -> None:
    from trainium_trainer.backends.native import NativeBackend  # noqa: PLC0415 - as above

    accumulate = NativeBackend.accumulate
    last_end = [time.monotonic()]

    def paced(self: NativeBackend, batch: MicroBatch, *, last: bool) -> None:
        accumulate(self, batch, last=last)
        if last:
            with self._pulse.work:  # observers see a longer computation
                _execute_command(self)
                time.sleep(max(0.0, last_end[0] + PACE - time.monotonic()))
            last_end[0] = time.monotonic()

    NativeBackend.accumulate = paced  # type: ignore[method-assign]


def _mute_collectives() -> None:
    """Patch collectives so that a muted rank, and a pairwise test on its pod, send nothing."""
    from torch import distributed  # noqa: PLC0415 - slow

    all_reduce = distributed.all_reduce

    def reduce(*arguments: Any, **more: Any) -> Any:
        if threading.current_thread() is threading.main_thread() and _is_mute():
            time.sleep(_FOREVER)
        return all_reduce(*arguments, **more)

    distributed.all_reduce = reduce


def _is_mute() -> bool:
    if _STATE["rank"]:
        return _STATE["mute"]
    with contextlib.suppress(OSError, ValueError):
        return bool(json.loads((FOLDER / f"do-{POD}").read_text())["what"] == "mute")
    return False


def _execute_command(backend: NativeBackend) -> None:
    found = next_command(int(backend.state.step) + 1)
    if found is not None:
        sys.stderr.write(f"fault injector: {found}\n")
        _FAULTS[found["what"]](backend, found)


def _stop_heartbeats(_: NativeBackend, __: dict[str, Any]) -> None:
    _STATE["mute"] = True  # it waits in the next collective like the others, but sends nothing


def _not_a_number(backend: NativeBackend, _: dict[str, Any]) -> None:
    backend._losses[-1] = backend._losses[-1] * float("nan")  # noqa: SLF001 - as a sample with a bad value does


def _out_of_memory(_: NativeBackend, __: dict[str, Any]) -> None:
    import torch  # noqa: PLC0415 - as above

    torch.empty(1 << 50)


def _fault_in_collective(_: NativeBackend, __: dict[str, Any]) -> None:
    def read_null() -> None:
        time.sleep(PACE + 0.005)  # by then the main thread is in the next collective
        ctypes.string_at(0)

    threading.Thread(target=read_null, daemon=True).start()


def _exit(_: NativeBackend, command: dict[str, Any]) -> None:
    os._exit(int(command["code"]))


_FAULTS: dict[str, Callable[[NativeBackend, dict[str, Any]], None]] = {
    "nan": _not_a_number,
    "oom": _out_of_memory,
    "segv": _fault_in_collective,
    "exit": _exit,
    "mute": _stop_heartbeats,
}


def _stall_storage() -> None:
    """Patch storage, so that reads and writes of checkpoints block while the file `stall` exists."""
    from trainium_trainer.storage.posix import PosixStorage  # noqa: PLC0415 - as above

    def wait() -> None:
        while (FOLDER / "stall").exists():
            time.sleep(_POLL_SECONDS)

    def waiting(method: str, *, slowly: bool) -> None:
        original = getattr(PosixStorage, method)

        def access(self: Any, *arguments: Any) -> Any:
            wait()
            with contextlib.suppress(OSError, ValueError):
                time.sleep(float((FOLDER / "slow").read_text()) if slowly else 0.0)
            return original(self, *arguments)

        setattr(PosixStorage, method, access)

    for method in ("write_stream", "write", "create"):
        waiting(method, slowly=True)
    for method in ("read", "read_into", "list"):
        waiting(method, slowly=False)


def _prepare() -> None:
    """Warm up like the plain entry point, because the standby process imports this module."""
    kernel_log = os.environ.get("TRAINIUM_KERNEL_LOG")
    if kernel_log:  # replaces /dev/kmsg, which always exists
        with contextlib.suppress(OSError):
            Path(kernel_log).touch()
    with contextlib.suppress(Exception):
        from trainium_trainer.warm import warm  # noqa: PLC0415 - slow

        warm(os.environ.get("TRAINIUM_CONFIG"))
        _mute_collectives()


_prepare()
