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

    def kill_around(self, call: Callable[[], Any], middle: Callable[[], None] | None = None) -> Any:
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


def _in_step(hits: HitCounter, _: random.Random) -> None:
    from trainium_trainer.monitor.progress import ProgressWriter

    writer: Any = ProgressWriter  # patched functions take any arguments
    original = writer.record_step

    def record_step(self: Any, *arguments: Any, seconds: float) -> None:
        original(self, *arguments, seconds=seconds)
        if hits.count_hit():
            threading.Timer(hits.fraction * 1.2 * seconds, kill_process).start()

    writer.record_step = record_step


def _in_staging(hits: HitCounter, rng: random.Random) -> None:
    from trainium_trainer.checkpoint.format import live_state
    from trainium_trainer.checkpoint.memory import memory_tier
    from trainium_worker.snapshots import copies
    from trainium_worker.snapshots.files import SnapshotFile

    def killed_in_copy(copy: Any) -> Any:
        def copy_all(targets: list[Any], sources: list[Any]) -> None:
            half = len(targets) // 2
            hits.kill_around(lambda: copy(targets, sources), lambda: copy(targets[:half], sources[:half]))

        return copy_all

    place = rng.choice(("copy", "copy", "finalize", "send"))
    # Without a memory tier, this is the only point: nothing is finalized or sent.
    live_state.copy_all = killed_in_copy(live_state.copy_all)
    if place == "copy":
        memory_tier.copy_all = killed_in_copy(memory_tier.copy_all)  # type: ignore[attr-defined]
    elif place == "finalize":
        finish = SnapshotFile.finish
        SnapshotFile.finish = lambda *arguments: hits.kill_around(lambda: finish(*arguments))  # type: ignore[method-assign]
    else:
        send, finish = copies.send_part, SnapshotFile.finish
        if rng.random() < 0.5:  # otherwise, and if nothing is sent: when it is finished
            copies.send_part = lambda *arguments: hits.kill_around(lambda: send(*arguments))
        SnapshotFile.finish = lambda *arguments: hits.kill_around(lambda: finish(*arguments))  # type: ignore[method-assign]


def _in_writing(hits: HitCounter, _: random.Random) -> None:
    from trainium_trainer.storage.posix import PosixStorage

    write = PosixStorage.write_stream

    def write_stream(self: Any, name: str, pieces: Any, size: int) -> None:
        write(self, name, truncate(pieces, int(hits.fraction * size)) if hits.count_hit() else pieces, size)

    PosixStorage.write_stream = write_stream  # type: ignore[method-assign]


def _in_commit(hits: HitCounter, rng: random.Random) -> None:
    from trainium_trainer.storage.posix import PosixStorage

    def patch(method: str) -> None:
        original = getattr(PosixStorage, method)

        def access(self: Any, name: str, *rest: Any) -> Any:
            if not name.startswith("step-"):
                return original(self, name, *rest)
            return hits.kill_around(lambda: original(self, name, *rest), lambda: write_half(self, method, name))

        setattr(PosixStorage, method, access)

    for method in rng.choice((("write",), ("create",), ("write", "create"), ("remove_file", "remove_files"))):
        patch(method)


def write_half(storage: Any, method: str, name: str) -> None:
    """Do half of what a method of `PosixStorage` does: write a draft, or remove one file of a folder."""
    if method in ("write", "create"):
        storage._draft(name, b"half of it")
        return
    files = sorted(path for path in (storage._root / name).rglob("*") if path.is_file())
    for path in files[:1]:
        path.unlink()


def _in_load(hits: HitCounter, rng: random.Random) -> None:
    from trainium_trainer.checkpoint.format import reader
    from trainium_trainer.checkpoint.resume import resume as module

    resume: Any = module  # the trainer calls these names and does not pass them on
    place = rng.choice(("gather", "copy"))
    if place == "gather":
        scatter = resume.scatter_from_root
        resume.scatter_from_root = lambda *arguments: hits.kill_around(lambda: scatter(*arguments))
        return
    copy, read = resume.copy_all, reader.CheckpointReader._read_extent

    def copy_all(targets: list[Any], sources: list[Any]) -> None:
        half = len(targets) // 2
        hits.kill_around(lambda: copy(targets, sources), lambda: copy(targets[:half], sources[:half]))

    resume.copy_all = copy_all
    reader.CheckpointReader._read_extent = lambda *arguments: hits.kill_around(lambda: read(*arguments))  # type: ignore[method-assign]


ARTIFACTS = "artifacts"
"""Folder of the artifacts in the folder of a run."""
_EXPORT_PLACES = (("file", 1), ("merge", 3), ("gather", 8))
"""Places, and the maximum number of hits before the kill; a place that is listed twice is drawn twice as often."""
_FIRST_RANK_EXPORT_PLACES = (("file", 4), ("merge", 8), ("gather", 8), ("small", 18), ("small", 18), ("tidy", 1))
_EVALUATION_PLACES = (("load", 1), ("score", 1), ("gather", 5))
_FIRST_RANK_EVALUATION_PLACES = (*_EVALUATION_PLACES, ("result", 3), ("result", 3))


def _in_export(hits: HitCounter, rng: random.Random) -> None:
    """Kill in a data file, in the merge of a weight, around a small file or the last removal, or in a gather."""
    from trainium_trainer.artifacts.merged_parameters import MergedParameters

    place, hits = _draw_place(_FIRST_RANK_EXPORT_PLACES if _is_first() else _EXPORT_PLACES, hits, rng)
    if place == "file":
        _in_data_file(hits)
    elif place == "merge":
        merged_parameters: Any = MergedParameters  # patched functions take any arguments
        rows = merged_parameters.rows

        def rows_or_kill(self: Any, name: str, *rest: Any) -> Any:
            adapter_weight = f"{name.removesuffix('.weight')}.lora_B.weight"
            return (
                hits.kill_around(lambda: rows(self, name, *rest))
                if adapter_weight in self._names
                else rows(self, name, *rest)
            )

        merged_parameters.rows = rows_or_kill
    elif place == "gather":
        _in_gather(hits, lambda: True)
    elif place == "small":
        _patch_storage_method("write", hits, lambda name: not name.startswith("evaluation"))
    else:
        _patch_storage_method("remove_files", hits, lambda _: True)


def _in_evaluation(hits: HitCounter, rng: random.Random) -> None:
    """Kill around the load of a model, its questions, a gather, or a file of the result."""
    from trainium_trainer.evaluate import compare as module
    from trainium_trainer.evaluate import stage

    compare: Any = module  # the trainer calls these names and does not pass them on
    place, hits = _draw_place(_FIRST_RANK_EVALUATION_PLACES if _is_first() else _EVALUATION_PLACES, hits, rng)
    started: list[bool] = []
    evaluate = stage.evaluate_artifacts

    def evaluate_artifacts(*arguments: Any, **options: Any) -> Any:
        started.append(True)
        return evaluate(*arguments, **options)

    stage.evaluate_artifacts = evaluate_artifacts
    if place == "load":
        load = compare.load
        compare.load = lambda *arguments, **options: hits.kill_around(lambda: load(*arguments, **options))
    elif place == "score":
        score = compare.score_model

        def score_or_kill(model: Any, exam: Any, items: Any, *rest: Any, **options: Any) -> Any:
            items = list(items)
            half = items[: len(items) // 2]
            return hits.kill_around(
                lambda: score(model, exam, items, *rest, **options),
                lambda: _discard(score(model, exam, half, *rest, **options)),
            )

        compare.score_model = score_or_kill
    elif place == "gather":
        _in_gather(hits, lambda: bool(started))
    else:
        _patch_storage_method("write", hits, lambda _: bool(started))


def _is_first() -> bool:
    return os.environ["RANK"] == "0"


def _draw_place(places: Sequence[tuple[str, int]], hits: HitCounter, rng: random.Random) -> tuple[str, HitCounter]:
    """Draw a place and its number of hits."""
    place, max_hits = rng.choice(places)
    return place, HitCounter(rng.randint(0, max_hits), hits.fraction)


def _in_data_file(hits: HitCounter) -> None:
    from trainium_trainer.storage.posix import PosixStorage

    write = PosixStorage.write_stream

    def write_stream(self: Any, name: str, pieces: Any, size: int) -> None:
        is_reached = ARTIFACTS in self._root.parts and hits.count_hit()
        write(self, name, truncate(pieces, int(hits.fraction * size)) if is_reached else pieces, size)

    PosixStorage.write_stream = write_stream  # type: ignore[method-assign]


def _in_gather(hits: HitCounter, is_counted: Callable[[], bool]) -> None:
    from trainium_trainer.peers import Peers

    gather = Peers.gather
    Peers.gather = lambda self, value: (  # type: ignore[method-assign]
        hits.kill_around(lambda: gather(self, value)) if is_counted() else gather(self, value)
    )


def _patch_storage_method(method: str, hits: HitCounter, is_counted: Callable[[str], bool]) -> None:
    from trainium_trainer.storage.posix import PosixStorage

    original = getattr(PosixStorage, method)

    def access(self: Any, name: str, *rest: Any) -> Any:
        if ARTIFACTS not in self._root.parts or not is_counted(name):
            return original(self, name, *rest)
        return hits.kill_around(lambda: original(self, name, *rest), lambda: write_half(self, method, name))

    setattr(PosixStorage, method, access)


def _discard(_: object) -> None:
    """Discard a result."""


_PATCHES: dict[Point, Callable[[HitCounter, random.Random], None]] = {
    Point.STEP: _in_step,
    Point.STAGING: _in_staging,
    Point.WRITING: _in_writing,
    Point.COMMIT: _in_commit,
    Point.LOAD: _in_load,
    Point.EXPORT: _in_export,
    Point.EVALUATE: _in_evaluation,
}
