"""Record traces of steps with torch.profiler, as `monitor.profile` or `kubectl trn profile` requests them.

Guarantees:
- A step that is not recorded runs the same code as without this module.
- A trace that cannot be recorded or written stops nothing.
- The newest ten traces of a rank are kept, and none is larger than 512 MiB before it is compressed.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import logging
import os
import shutil
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainium_contract.trainer.addresses import is_address
from trainium_contract.trainer.monitor import MAX_PROFILED_STEPS
from trainium_trainer.checkpoint.root.metrics_copy import find_records_folder
from trainium_trainer.neuron_environment import CAPTURE_ENABLED
from trainium_trainer.storage import open_storage
from trainium_worker.progress_record import PROFILE_SIGNAL, profile_request_path, replace_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainium_trainer.configuration.config import Settings
    from trainium_trainer.loop.setup import Run

_log = logging.getLogger("trainium.profile")
TRACES_FOLDER = "profiles"
_MAX_BYTES = 512 << 20
_KEPT = 10
_PARTS = (
    ("loader", "read_batch", "wait for data"),
    ("backend", "accumulate", "forward and backward"),
    ("backend", "all_reduce_totals", "sum totals"),
    ("backend", "step", "reduce gradients and update"),
    ("manager", "save_step", "checkpoint"),
    ("recorder", "step", "write records"),
)
"""Parts of a step that become spans: an object of the run, its method, and the name of the span."""


def capture_folder(settings: Settings) -> Path | None:
    """Return the folder for the Neuron runtime's captures of this rank; None if none are requested."""
    profile, rank = settings.config.monitor.profile, settings.launch.rank
    if profile is None or not profile.neuron or rank not in profile.ranks:
        return None
    return find_records_folder(settings.config.checkpoint) / TRACES_FOLDER / f"neuron-rank-{rank}"


@dataclass(frozen=True, slots=True)
class StepWindow:
    """A range of steps to record."""

    first: int
    steps: int
    answer: Path | None = None
    """File for the outcome of a request; None for the steps of the configuration."""


class StepProfiler:
    """Records the windows of one rank."""

    def __init__(self, run: Run) -> None:
        self.windows: list[StepWindow] = []
        """Windows still to record; while there are any, the loop calls `start_window` and `end_window`. A signal
        handler appends to it.
        """
        self._run = run
        self._window: StepWindow | None = None
        self._began = 0
        self._recording: Any = None
        self._step_span: Any = None

    def start_window(self, step: int) -> float:
        """Start recording where a window begins; return the seconds that it took."""
        began = time.perf_counter()
        window = min(self.windows, key=lambda pending: pending.first)
        if self._window is None and window.first <= step + 1:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the library writes to standard error
            from torch import profiler  # noqa: PLC0415 - only a step that is recorded needs it

            with self._run.progress.pulse.saving():
                recording = profiler.profile()  # all kinds of activity that this machine has
                recording.start()
                if window.first == step + 1:
                    recording.stop()  # the first start in a process loads libraries
                else:
                    recording.add_metadata_json("trainium", json.dumps({"rank": self._run.backend.mesh.rank}))
                    self._window, self._began, self._recording = window, step, recording
                    _wrap_parts(self._run, profiler.record_function)
        if self._recording is not None:
            from torch import profiler  # noqa: PLC0415 - as above

            self._step_span = profiler.record_function(f"step {step}")
            self._step_span.__enter__()
        return time.perf_counter() - began

    def end_window(self, step: int) -> float:
        """End recording after the last step of a window; return the seconds that it took."""
        if self._recording is None or self._window is None:
            return 0.0
        began = time.perf_counter()
        self._step_span.__exit__(None, None, None)
        if step - self._began + 1 == self._window.steps:
            with self._run.progress.pulse.saving():
                window, recording = self._window, self._stop()
                _write_outcome(window, self._write(recording, step))
            self.windows.remove(window)
        return time.perf_counter() - began

    def close(self) -> None:
        """End the recording and report that the pending windows were not recorded."""
        if self._recording is not None:
            self._stop()
        for window in self.windows:
            problem = f"step {window.first + window.steps - 1} was not reached: the ranks ended their steps before"
            _log.warning("no trace of %d steps from %d on: %s", window.steps, window.first, problem)
            _write_outcome(window, {"problem": problem})

    def _stop(self) -> Any:
        """End the recording and return it."""
        recording, self._window, self._recording = self._recording, None, None
        recording.stop()
        for owner, method, _ in _PARTS:
            delattr(getattr(self._run, owner), method)
        return recording

    def _write(self, recording: Any, last: int) -> dict[str, Any]:
        """Write the trace; return the answer."""
        mesh, address = self._run.backend.mesh, self._run.config.checkpoint.records
        folder = find_records_folder(self._run.config.checkpoint) / TRACES_FOLDER
        suffix = f"-rank-{mesh.rank}.json.gz"
        path = folder / f"steps-{self._began}-{last}{suffix}"
        draft = path.with_suffix(".draft")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            recording.export_chrome_trace(str(draft))
            _compress(draft, path)
            removed = sorted(folder.glob(f"steps-*{suffix}"), key=lambda trace: trace.stat().st_mtime)[:-_KEPT]
            for old in removed:
                old.unlink()
            if is_address(address):
                data, storage = path.read_bytes(), open_storage(address)
                storage.write_stream(f"{TRACES_FOLDER}/{path.name}", [memoryview(data)], len(data))
                for old in removed:
                    storage.remove_file(f"{TRACES_FOLDER}/{old.name}")
        except (OSError, RuntimeError) as error:
            problem = f"the trace of steps {self._began} to {last} cannot be written to {folder}: {error}"
            _log.warning("%s", problem)
            self._run.progress.write_notice(problem)
            return {"problem": problem}
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()
        where = f"{address.rstrip('/')}/{TRACES_FOLDER}/{path.name}" if is_address(address) else str(path)
        _log.info("trace of steps %d to %d: %s (%d bytes)", self._began, last, where, path.stat().st_size)
        return {"file": str(path), "stored": where, "first": self._began, "last": last}


@contextlib.contextmanager
def step_profiler(run: Run, progress: Path | None) -> Iterator[StepProfiler]:
    """Yield a profiler of the configured steps and of those requested in the folder of the progress record."""
    profile, profiler = run.config.monitor.profile, StepProfiler(run)
    if profile is not None and run.backend.mesh.rank in profile.ranks and CAPTURE_ENABLED not in os.environ:
        first, last = max(profile.steps[0], run.position.step + 1), profile.steps[1]
        if first <= last:
            profiler.windows.append(StepWindow(first, last - first + 1))
    listens = progress is not None and threading.current_thread() is threading.main_thread()
    if progress is not None and listens:
        path = profile_request_path(progress)
        signal.signal(PROFILE_SIGNAL, lambda *_: _add_requested_window(profiler, path))
        signal.siginterrupt(PROFILE_SIGNAL, False)
    try:
        yield profiler
    finally:
        if listens:
            signal.signal(PROFILE_SIGNAL, signal.SIG_IGN)
        profiler.close()


def _add_requested_window(profiler: StepProfiler, path: Path) -> None:
    """Add the window that a request names."""
    try:
        request = json.loads(path.read_text(encoding="utf-8"))
        steps = min(max(1, int(request["steps"])), MAX_PROFILED_STEPS)
        window = StepWindow(int(request["first"]), steps, path.with_name(Path(request["answer"]).name))
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("a request for a trace cannot be read (%s): ignored", error)
        return
    if CAPTURE_ENABLED in os.environ:
        conflict = f"{CAPTURE_ENABLED} is set for this rank, whose runtime captures by itself: torch.profiler conflicts"
        _write_outcome(window, {"problem": conflict})
    else:
        profiler.windows.append(window)


def _write_outcome(window: StepWindow, outcome: dict[str, Any]) -> None:
    if window.answer is not None:
        with contextlib.suppress(OSError):
            replace_text(window.answer, json.dumps(outcome))


def _wrap_parts(run: Run, record_function: Callable[[str], Any]) -> None:
    """Record the parts of a step as spans of the trace."""
    for owner_name, method_name, span in _PARTS:
        owner = getattr(run, owner_name)
        setattr(owner, method_name, _wrap_in_span(getattr(owner, method_name), span, record_function))


def _wrap_in_span(method: Callable[..., Any], span: str, record_function: Callable[[str], Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(span):
            return method(*args, **kwargs)

    return call


def _compress(draft: Path, path: Path) -> None:
    size = draft.stat().st_size
    if size > _MAX_BYTES:
        raise OSError(
            f"the trace has {size >> 20} MiB, more than the limit of {_MAX_BYTES >> 20} MiB: record fewer steps"
        )
    packed = draft.with_suffix(".packed")
    try:
        with draft.open("rb") as source, gzip.open(packed, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        packed.replace(path)
    finally:
        packed.unlink(missing_ok=True)
