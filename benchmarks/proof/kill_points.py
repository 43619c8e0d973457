# ruff: noqa: PLC0415, SLF001 - patched functions are private, and only the rank to kill imports them
"""Let a rank kill itself (SIGKILL, without cleanup) at a chosen point of its work.

A forked rank calls `install_kill` with the value of `TRAINIUM_PROOF`: the point, the number of hits before the kill,
and the position within the point. Points are real calls of the trainer; a kill before, within or after them leaves
different files. Patches only determine when the rank is killed, not its work.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

VARIABLE = "TRAINIUM_PROOF"


class Point(StrEnum):
    """The points at which a rank is killed."""

    STEP = "step"
    """Anywhere in a training step: forward, backward, reduction, update."""
    STAGING = "staging"
    """While the state is copied into a snapshot or for a durable save, or while a snapshot is committed or sent."""
    WRITING = "writing"
    """While a file of a durable checkpoint is written."""
    COMMIT = "commit"
    """Around manifest, receipt and the removal of older checkpoints (on the first rank)."""
    LOAD = "load"
    """While a run that was killed before restores the state."""
    EXPORT = "export"
    """While artifacts are written: in a data file, around a small one, in the merge, in a gather."""
    EVALUATE = "evaluate"
    """While artifacts are evaluated: around the questions, the result, and the table in the model cards."""

    @property
    def follows_training(self) -> bool:
        """Whether it is after the last step, so that no step may be lost."""
        return self in (Point.EXPORT, Point.EVALUATE)


@dataclass(frozen=True, slots=True)
class Kill:
    """A kill of a rank."""

    point: Point
    hits: int
    """Number of hits of the point before the kill."""
    fraction: float
    """Position within the point, 0 to 1."""
    seed: int

    def to_text(self) -> str:
        """Return the kill as the value of an environment variable."""
        return json.dumps(asdict(self))


def install_kill(text: str) -> None:
    """Patch this process for the kill that `Kill.to_text` describes."""
    raw = json.loads(text)
    kill = Kill(Point(raw["point"]), raw["hits"], raw["fraction"], raw["seed"])
    _PATCHES[kill.point](HitCounter(kill.hits, kill.fraction), random.Random(kill.seed))


def kill_process() -> NoReturn:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit("not reached")


class HitCounter:
    """Counts the hits of a point, and reports once that the chosen one is reached."""

    def __init__(self, hits: int, fraction: float) -> None:
        self.fraction = fraction
        self._remaining = hits

    def count_hit(self) -> bool:
        """Count a hit; return whether it is the chosen one."""
        self._remaining -= 1
        return self._remaining == -1

    def kill_around(self, call: Callable[[], Any], middle: Callable[[], object] | None = None) -> Any:
        """Make a call, or kill the process before it, within it (`middle` does half of it) or after it."""
        if not self.count_hit():
            return call()
        if self.fraction < 1 / 3:
            kill_process()
        if self.fraction < 2 / 3 and middle is not None:
            middle()
            kill_process()
        call()
        kill_process()


def truncate(pieces: Iterable[memoryview], size: int) -> Iterator[memoryview]:
    """Yield the first `size` bytes of some pieces, then kill the process."""
    for piece in pieces:
        if len(piece) >= size:
            yield piece[:size]
            kill_process()
        size -= len(piece)
        yield piece
    kill_process()


def _kill_in_calls(
    owner: Any,
    name: str,
    hits: HitCounter,
    *,
    middle: Callable[..., object] | None = None,
    is_counted: Callable[..., bool] = lambda *_: True,
) -> None:
    """Patch a function of a module or class, whose calls are hits of the point.

    `middle` gets the function and the arguments, and does half of a call. `is_counted` gets the arguments.
    """
    original = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if not is_counted(*arguments):
            return original(*arguments, **options)
        half = None if middle is None else lambda: middle(original, *arguments, **options)
        return hits.kill_around(lambda: original(*arguments, **options), half)

    setattr(owner, name, call)


def _copy_half(copy: Any, targets: list[Any], sources: list[Any]) -> None:
    half = len(targets) // 2
    copy(targets[:half], sources[:half])


def _kill_in_storage(method: str, hits: HitCounter, is_counted: Callable[..., bool]) -> None:
    """Patch a method of `PosixStorage`; `is_counted` gets the storage and the name."""
    from trainium_trainer.storage.posix import PosixStorage

    def do_half(_: object, storage: Any, name: str, *__: object) -> None:
        write_half(storage, method, name)

    _kill_in_calls(PosixStorage, method, hits, middle=do_half, is_counted=lambda *given: is_counted(*given[:2]))


def write_half(storage: Any, method: str, name: str) -> None:
    """Do half of what a method of `PosixStorage` does: write a draft, or remove one file of a folder."""
    if method in ("write", "create"):
        storage._draft(name, b"half of it")
        return
    files = sorted(path for path in (storage._root / name).rglob("*") if path.is_file())
    for path in files[:1]:
        path.unlink()


def _kill_in_streams(hits: HitCounter, is_counted: Callable[[Any], bool]) -> None:
    """Patch the method of `PosixStorage` that writes a stream, within which the process is killed."""
    from trainium_trainer.storage.posix import PosixStorage

    write = PosixStorage.write_stream

    def write_stream(self: Any, name: str, pieces: Any, size: int) -> None:
        is_reached = is_counted(self) and hits.count_hit()
        write(self, name, truncate(pieces, int(hits.fraction * size)) if is_reached else pieces, size)

    PosixStorage.write_stream = write_stream  # type: ignore[method-assign]


def _kill_in_step(hits: HitCounter, _: random.Random) -> None:
    from trainium_trainer.monitor.progress import ProgressWriter

    writer: Any = ProgressWriter  # patched functions take any arguments
    original = writer.record_step

    def record_step(self: Any, *arguments: Any, seconds: float) -> None:
        original(self, *arguments, seconds=seconds)
        if hits.count_hit():
            threading.Timer(hits.fraction * 1.2 * seconds, kill_process).start()

    writer.record_step = record_step


def _kill_in_staging(hits: HitCounter, rng: random.Random) -> None:
    from trainium_trainer.checkpoint.format import live_state
    from trainium_trainer.checkpoint.memory import memory_tier
    from trainium_worker.snapshots import copies
    from trainium_worker.snapshots.files import SnapshotFile

    point = rng.choice(("copy", "copy", "finalize", "send"))
    # Without a memory tier, this is the only point: nothing is finalized or sent.
    _kill_in_calls(live_state, "copy_all", hits, middle=_copy_half)
    if point == "copy":
        _kill_in_calls(memory_tier, "copy_all", hits, middle=_copy_half)
        return
    if point == "send" and rng.random() < 0.5:  # otherwise, and if nothing is sent: when it is finished
        _kill_in_calls(copies, "send_part", hits)
    _kill_in_calls(SnapshotFile, "finish", hits)


def _kill_in_writing(hits: HitCounter, _: random.Random) -> None:
    _kill_in_streams(hits, lambda _: True)


def _kill_in_commit(hits: HitCounter, rng: random.Random) -> None:
    for method in rng.choice((("write",), ("create",), ("write", "create"), ("remove_file", "remove_files"))):
        _kill_in_storage(method, hits, lambda _, name: name.startswith("step-"))


def _kill_in_load(hits: HitCounter, rng: random.Random) -> None:
    from trainium_trainer.checkpoint.format.reader import CheckpointReader
    from trainium_trainer.checkpoint.resume import resume

    if rng.choice(("gather", "copy")) == "gather":
        _kill_in_calls(resume, "scatter_from_root", hits)
        return
    _kill_in_calls(resume, "copy_all", hits, middle=_copy_half)
    _kill_in_calls(CheckpointReader, "_read_extent", hits)


ARTIFACTS = "artifacts"
"""Folder of the artifacts in the folder of a run."""
_EXPORT_POINTS = (("file", 1), ("merge", 3), ("gather", 8))
"""Points, and the maximum number of hits before the kill; a point that is listed twice is drawn twice as often."""
_FIRST_RANK_EXPORT_POINTS = (("file", 4), ("merge", 8), ("gather", 8), ("small", 18), ("small", 18), ("tidy", 1))
_EVALUATION_POINTS = (("load", 1), ("score", 1), ("gather", 5))
_FIRST_RANK_EVALUATION_POINTS = (*_EVALUATION_POINTS, ("result", 3), ("result", 3))


def _kill_in_export(hits: HitCounter, rng: random.Random) -> None:
    """Kill in a data file, in the merge of a weight, around a small file or the last removal, or in a gather."""
    from trainium_trainer.artifacts.merged_parameters import MergedParameters
    from trainium_trainer.peers import Peers

    point, hits = _draw_place(_FIRST_RANK_EXPORT_POINTS if _is_first() else _EXPORT_POINTS, hits, rng)
    match point:
        case "file":
            _kill_in_streams(hits, _is_of_artifacts)
        case "merge":
            _kill_in_calls(MergedParameters, "read_rows", hits, is_counted=_has_adapter)
        case "gather":
            _kill_in_calls(Peers, "gather", hits)
        case "small":
            _kill_in_storage(
                "write", hits, lambda storage, name: _is_of_artifacts(storage) and not name.startswith("evaluation")
            )
        case _:
            _kill_in_storage("remove_files", hits, lambda storage, _: _is_of_artifacts(storage))


def _is_of_artifacts(storage: Any) -> bool:
    return ARTIFACTS in storage._root.parts


def _has_adapter(parameters: Any, name: str, *_: object) -> bool:
    """Return whether the rows of a weight are merged with an adapter."""
    return f"{name.removesuffix('.weight')}.lora_B.weight" in parameters._names


def _kill_in_evaluation(hits: HitCounter, rng: random.Random) -> None:
    """Kill around the load of a model, its examples, a gather, or a file of the result."""
    from trainium_trainer.evaluate import compare, stage
    from trainium_trainer.peers import Peers

    point, hits = _draw_place(_FIRST_RANK_EVALUATION_POINTS if _is_first() else _EVALUATION_POINTS, hits, rng)
    started: list[bool] = []
    evaluate = stage.evaluate_artifacts

    def evaluate_artifacts(*arguments: Any, **options: Any) -> Any:
        started.append(True)
        return evaluate(*arguments, **options)

    stage.evaluate_artifacts = evaluate_artifacts
    match point:
        case "load":
            _kill_in_calls(compare, "load", hits)
        case "score":
            _kill_in_calls(compare, "score_model", hits, middle=_score_half)
        case "gather":
            _kill_in_calls(Peers, "gather", hits, is_counted=lambda *_: bool(started))
        case _:
            _kill_in_storage("write", hits, lambda storage, _: _is_of_artifacts(storage) and bool(started))


def _score_half(score: Any, model: Any, held_out: Any, items: Any, *rest: Any, **options: Any) -> None:
    items = list(items)
    score(model, held_out, items[: len(items) // 2], *rest, **options)


def _is_first() -> bool:
    return os.environ["RANK"] == "0"


def _draw_place(places: Sequence[tuple[str, int]], hits: HitCounter, rng: random.Random) -> tuple[str, HitCounter]:
    """Draw a point and its number of hits."""
    point, max_hits = rng.choice(places)
    return point, HitCounter(rng.randint(0, max_hits), hits.fraction)


_PATCHES: dict[Point, Callable[[HitCounter, random.Random], None]] = {
    Point.STEP: _kill_in_step,
    Point.STAGING: _kill_in_staging,
    Point.WRITING: _kill_in_writing,
    Point.COMMIT: _kill_in_commit,
    Point.LOAD: _kill_in_load,
    Point.EXPORT: _kill_in_export,
    Point.EVALUATE: _kill_in_evaluation,
}
