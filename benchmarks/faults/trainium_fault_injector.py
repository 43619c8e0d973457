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
    from trainium_trainer.data.loader import MicroBatch

FOLDER = Path(os.environ.get("TRAINIUM_FAULTS_DIR", "/nonexistent"))
STEP_SECONDS = float(os.environ.get("TRAINIUM_FAULTS_STEP_SECONDS", "0"))
POD = os.environ.get("TRAINIUM_POD_NAME", "")
_FOREVER_SECONDS = 10_000_000.0
_POLL_SECONDS = 0.05
_STATE = {"rank": False, "mute": False}


def main(argv: list[str]) -> Any:
    """Run the trainer with the fault injector; the agent calls this in each training process."""
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


def take_next_command(step: int) -> dict[str, Any] | None:
    """Return the command for this process at this step, and remove it unless it is sticky."""
    for name in (f"do-{POD}", "do-all"):
        path = FOLDER / name
        try:
            command: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if step < int(command.get("step", 0)):
            continue
        if not command.get("sticky"):
            with contextlib.suppress(OSError):
                path.rename(FOLDER / f"done-{name}")
        with contextlib.suppress(OSError):
            (FOLDER / f"injected-{POD}").write_text(f"{time.time():.3f}")
        return command
    return None


def _pace_steps() -> None:
    from trainium_trainer.backends.native import NativeBackend  # noqa: PLC0415 - as above

    accumulate = NativeBackend.accumulate
    last_end = [time.monotonic()]

    def accumulate_at_pace(self: NativeBackend, batch: MicroBatch, *, last: bool) -> None:
        accumulate(self, batch, last=last)
        if last:
            with self._pulse.local_work:  # monitors count the delay as computation
                _execute_command(self)
                time.sleep(max(0.0, last_end[0] + STEP_SECONDS - time.monotonic()))
            last_end[0] = time.monotonic()

    NativeBackend.accumulate = accumulate_at_pace  # type: ignore[method-assign]


def _mute_collectives() -> None:
    """Patch collectives so that a muted rank, and a pairwise test on its pod, send nothing."""
    from torch import distributed  # noqa: PLC0415 - slow

    all_reduce = distributed.all_reduce

    def all_reduce_unless_mute(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is threading.main_thread() and _is_mute():
            time.sleep(_FOREVER_SECONDS)
        return all_reduce(*arguments, **options)

    distributed.all_reduce = all_reduce_unless_mute


def _is_mute() -> bool:
    if _STATE["rank"]:
        return _STATE["mute"]
    with contextlib.suppress(OSError, ValueError):
        return bool(json.loads((FOLDER / f"do-{POD}").read_text())["fault"] == "mute")
    return False


def _execute_command(backend: NativeBackend) -> None:
    command = take_next_command(int(backend.state.step) + 1)
    if command is not None:
        sys.stderr.write(f"fault injector: {command}\n")
        _FAULTS[command["fault"]](backend, command)


def _mute(_: NativeBackend, __: dict[str, Any]) -> None:
    _STATE["mute"] = True  # the rank waits in the next collective like its peers, but sends nothing


def _set_loss_to_nan(backend: NativeBackend, _: dict[str, Any]) -> None:
    backend._losses[-1] = backend._losses[-1] * float("nan")  # noqa: SLF001 - as a sample with a bad value does


def _exhaust_memory(_: NativeBackend, __: dict[str, Any]) -> None:
    import torch  # noqa: PLC0415 - as above

    torch.empty(1 << 50)


def _crash_in_collective(_: NativeBackend, __: dict[str, Any]) -> None:
    def read_null() -> None:
        time.sleep(STEP_SECONDS + 0.005)  # by then the main thread is in the next collective
        ctypes.string_at(0)

    threading.Thread(target=read_null, daemon=True).start()


def _exit(_: NativeBackend, command: dict[str, Any]) -> None:
    os._exit(int(command["code"]))


_FAULTS: dict[str, Callable[[NativeBackend, dict[str, Any]], None]] = {
    "nan": _set_loss_to_nan,
    "oom": _exhaust_memory,
    "segv": _crash_in_collective,
    "exit": _exit,
    "mute": _mute,
}


def _stall_storage() -> None:
    """Patch storage: block while the file `stall` exists, and delay writes by the seconds in the file `slow`."""
    from trainium_trainer.storage.posix import PosixStorage  # noqa: PLC0415 - as above

    def patch(method: str, *, writes: bool) -> None:
        original = getattr(PosixStorage, method)

        def access_or_stall(self: Any, *arguments: Any) -> Any:
            while (FOLDER / "stall").exists():
                time.sleep(_POLL_SECONDS)
            with contextlib.suppress(OSError, ValueError):
                time.sleep(float((FOLDER / "slow").read_text()) if writes else 0.0)
            return original(self, *arguments)

        setattr(PosixStorage, method, access_or_stall)

    for method in ("write_stream", "write", "create"):
        patch(method, writes=True)
    for method in ("read", "read_into", "list"):
        patch(method, writes=False)


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
