"""The trainer with a place to hurt it: what the workers of the fault table run in place of the plain entry point.

It paces the steps, so that a small model has steps of a steady length, and it carries out orders that lie as files in
`TRAINIUM_FAULTS_DIR`: `do-POD` for the ranks of one pod, `do-all` for all. An order is taken once unless it says
`sticky`. Everything else is the trainer as it is: what is not ordered does not happen. The file is copied to where the
workers can import it, so it imports nothing of this folder.

Invariant: losses are those of the plain trainer, since nothing but waiting is added to a step without an order.
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
    from trainium_trainer.backends.native import NativeBackend
    from trainium_trainer.data.batches.loader import MicroBatch

FOLDER = Path(os.environ.get("TRAINIUM_FAULTS_DIR", "/nonexistent"))
PACE = float(os.environ.get("TRAINIUM_FAULTS_PACE", "0"))
PASS_PACE = float(os.environ.get("TRAINIUM_FAULTS_PASS_PACE", "0"))
"""Seconds of each micro-batch, so that steps are longer where there are more of them."""
POD = os.environ.get("TRAINIUM_POD_NAME", "")
NODE = os.environ.get("TRAINIUM_NODE_NAME", "")
_FOREVER = 10_000_000.0
_POLL_SECONDS = 0.05
_STATE = {"rank": False, "mute": False}


def main(argv: list[str]) -> Any:
    """What the agent calls in each training process."""
    from trainium_trainer import cli  # noqa: PLC0415 - the warm standby has it already

    _STATE["rank"] = True
    name = f"pid-{POD}-{os.environ.get('LOCAL_RANK', '0')}"
    with contextlib.suppress(OSError):
        draft = FOLDER / f".{name}.{os.getpid()}"
        draft.write_text(str(os.getpid()))
        draft.rename(FOLDER / name)
    _pace_and_obey()
    _stall_storage()
    return cli.main(argv)


def order(*, step: int | None = None, kinds: frozenset[str]) -> dict[str, Any] | None:
    """The order of one of these kinds that is due for this process, taken unless it is sticky."""
    for name in (f"do-{POD}", "do-all"):
        path = FOLDER / name
        try:
            found: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if found["what"] not in kinds or (step is not None and step < int(found.get("step", 0))):
            continue
        if not found.get("sticky"):
            with contextlib.suppress(OSError):
                path.rename(FOLDER / f"done-{name}")
        with contextlib.suppress(OSError):
            (FOLDER / f"struck-{POD}").write_text(f"{time.time():.3f}")
        return found
    return None


def _pace_and_obey() -> None:
    from trainium_trainer.backends.native import NativeBackend  # noqa: PLC0415 - as above

    accumulate = NativeBackend.accumulate
    last_end = [time.monotonic()]
    begun: list[float] = []

    def paced(self: NativeBackend, batch: MicroBatch, *, last: bool) -> None:
        begun.append(time.monotonic())
        accumulate(self, batch, last=last)
        if last:
            # From the step's own beginning: from the last one's end a rank that was late once would look slow for ever.
            own_end = begun[0] + len(begun) * PASS_PACE * _slowness()
            with self._pulse.work:  # a longer computation, for all who look at this process
                _obey(self)
                time.sleep(max(0.0, last_end[0] + PACE - time.monotonic(), own_end - time.monotonic()))
            last_end[0] = time.monotonic()
            begun.clear()

    NativeBackend.accumulate = paced  # type: ignore[method-assign]


def _slowness() -> float:
    """How many times as long as elsewhere a step takes on this node: what the file `straggle-NODE` says, else 1."""
    with contextlib.suppress(OSError, ValueError):
        return float((FOLDER / f"straggle-{NODE}").read_text())
    return 1.0


def _mute_collectives() -> None:
    """A node whose collectives send nothing: in a rank that was told so, and in a test of pairs on the same pod."""
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


def _obey(backend: NativeBackend) -> None:
    found = order(step=int(backend.state.step) + 1, kinds=frozenset(_DEEDS))
    if found is not None:
        sys.stderr.write(f"saboteur: {found}\n")
        _DEEDS[found["what"]](backend)


def _fall_silent(_: Any) -> None:
    _STATE["mute"] = True  # it waits in the next collective like all others, and sends nothing


def _not_a_number(backend: NativeBackend) -> None:
    backend._losses[-1] = backend._losses[-1] * float("nan")  # noqa: SLF001 - what a sample with a bad value does


def _out_of_memory(_: Any) -> None:
    import torch  # noqa: PLC0415 - as above

    torch.empty(1 << 50)


def _sleep_for_ever(_: Any) -> None:
    time.sleep(_FOREVER)


def _fault_in_collective(_: Any) -> None:
    def strike() -> None:
        time.sleep(PACE + 0.005)  # the main thread is in the next collective by then
        ctypes.string_at(0)

    threading.Thread(target=strike, daemon=True).start()


def _crash(_: Any) -> None:
    os._exit(1)


_DEEDS = {
    "nan": _not_a_number,
    "oom": _out_of_memory,
    "sleep": _sleep_for_ever,
    "segv": _fault_in_collective,
    "exit": _crash,
    "mute": _fall_silent,
}


def _stall_storage() -> None:
    """A store that hangs: writes and reads of checkpoints wait while the file `stall` is there."""
    from trainium_trainer.checkpoint.storage.posix import PosixStorage  # noqa: PLC0415 - as above

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
    """The standby imports this module in its warm-up: be as warm as the plain entry point."""
    kernel_log = os.environ.get("TRAINIUM_KERNEL_LOG")
    if kernel_log:  # stands for /dev/kmsg, which is always there
        with contextlib.suppress(OSError):
            Path(kernel_log).touch()
    with contextlib.suppress(Exception):
        from trainium_trainer.warm import warm  # noqa: PLC0415 - slow

        warm(os.environ.get("TRAINIUM_CONFIG"))
        _mute_collectives()


_prepare()
