# ruff: noqa: PLC0415, SLF001 - what is patched is private, and imported by the rank that is to die
"""Lets a rank kill itself (SIGKILL, no warning, no clean-up) at a chosen instant of its work.

A forked rank calls `arm` with what `TRAINIUM_PROOF` says: the point, how many times the rank passes it first, and how
far into it. Points are real calls of the trainer; before, in the middle of, and after them a kill leaves different
things behind. What is patched is only when the rank dies, never what it does.
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
    from collections.abc import Callable, Iterable, Iterator

VARIABLE = "TRAINIUM_PROOF"


class Point(StrEnum):
    """Where a rank dies."""

    STEP = "step"
    """Anywhere in a training step: forward, backward, reduction, update."""
    STAGING = "staging"
    """While the state is copied into a snapshot or for a durable save, or while a snapshot is sealed or passed on."""
    WRITING = "writing"
    """While a file of a durable checkpoint is written."""
    COMMIT = "commit"
    """Around manifest, receipt and the removal of older checkpoints (on the first rank)."""
    LOAD = "load"
    """While the state is restored by a run that was killed before."""
    EXPORT = "export"
    """While artifacts are written: in a data file, around a small one, in the merge, while the ranks gather."""
    EVALUATE = "evaluate"
    """While what was written is measured: around the questions, the result, the table in the cards."""

    @property
    def follows_training(self) -> bool:
        """Whether it lies after the last step, so that no step may be lost."""
        return self in (Point.EXPORT, Point.EVALUATE)


@dataclass(frozen=True, slots=True)
class Strike:
    """When one rank dies."""

    point: Point
    passes: int
    """Times that the rank passes the point unharmed."""
    fraction: float
    """How far into it, 0 to 1."""
    seed: int

    def to_text(self) -> str:
        """For the environment."""
        return json.dumps(asdict(self))


def arm(text: str) -> None:
    """Patch this process as `Strike.to_text` said."""
    raw = json.loads(text)
    strike = Strike(Point(raw["point"]), raw["passes"], raw["fraction"], raw["seed"])
    from benchmarks.proof import strike_after  # which needs what is below

    patches = _PATCHES | {Point.EXPORT: strike_after.in_export, Point.EVALUATE: strike_after.in_evaluation}
    patches[strike.point](Fuse(strike.passes, strike.fraction), random.Random(strike.seed))


def die() -> NoReturn:
    """End this process as a power cut would."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit("not reached")


class Fuse:
    """Counts passes; at the one that is meant, `burns` is true once."""

    def __init__(self, passes: int, fraction: float) -> None:
        self.fraction = fraction
        self._left = passes

    def burns(self) -> bool:
        """Count one pass."""
        self._left -= 1
        return self._left == -1

    def around(self, call: Callable[[], Any], middle: Callable[[], None] | None = None) -> Any:
        """Make a call, or die before it, in its middle (where `middle` does half of it), or after it."""
        if not self.burns():
            return call()
        if self.fraction < 1 / 3:
            die()
        if self.fraction < 2 / 3 and middle is not None:
            middle()
            die()
        call()
        die()


def cut(pieces: Iterable[memoryview], left: int) -> Iterator[memoryview]:
    """The first `left` bytes of some pieces; then this process dies."""
    for piece in pieces:
        if len(piece) >= left:
            yield piece[:left]
            die()
        left -= len(piece)
        yield piece
    die()


def _in_step(fuse: Fuse, _: random.Random) -> None:
    from trainium_trainer.monitor.progress import ProgressWriter

    writer: Any = ProgressWriter  # what is patched takes any arguments
    done = writer.step_done

    def step_done(self: Any, *given: Any, seconds: float) -> None:
        done(self, *given, seconds=seconds)
        if fuse.burns():
            threading.Timer(fuse.fraction * 1.2 * seconds, die).start()

    writer.step_done = step_done


def _in_staging(fuse: Fuse, dice: random.Random) -> None:
    from trainium_trainer.checkpoint.durable import staging
    from trainium_trainer.checkpoint.memory import buddy, memory_tier, snapshot

    def halved(copy: Any) -> Any:
        def copy_all(targets: list[Any], sources: list[Any]) -> None:
            half = len(targets) // 2
            fuse.around(lambda: copy(targets, sources), lambda: copy(targets[:half], sources[:half]))

        return copy_all

    place = dice.choice(("copy", "copy", "seal", "send"))
    # Always: without a memory tier nothing is sealed or sent.
    staging.copy_all = halved(staging.copy_all)  # type: ignore[attr-defined]
    if place == "copy":
        memory_tier.copy_all = halved(memory_tier.copy_all)  # type: ignore[attr-defined]
    elif place == "seal":
        seal = snapshot.SnapshotFile.seal
        snapshot.SnapshotFile.seal = lambda *given: fuse.around(lambda: seal(*given))  # type: ignore[method-assign]
    else:
        send, seal = buddy.Sender.send, snapshot.SnapshotFile.seal
        if dice.random() < 0.5:  # where nothing is sent, at the seal
            buddy.Sender.send = lambda *given: fuse.around(lambda: send(*given))  # type: ignore[method-assign]
        snapshot.SnapshotFile.seal = lambda *given: fuse.around(lambda: seal(*given))  # type: ignore[method-assign]


def _in_writing(fuse: Fuse, _: random.Random) -> None:
    from trainium_trainer.checkpoint.storage.posix import PosixStorage

    write = PosixStorage.write_stream

    def write_stream(self: Any, name: str, pieces: Any, size: int) -> None:
        write(self, name, cut(pieces, int(fuse.fraction * size)) if fuse.burns() else pieces, size)

    PosixStorage.write_stream = write_stream  # type: ignore[method-assign]


def _in_commit(fuse: Fuse, dice: random.Random) -> None:
    from trainium_trainer.checkpoint.storage.posix import PosixStorage

    def around(method: str) -> None:
        original = getattr(PosixStorage, method)

        def access(self: Any, name: str, *rest: Any) -> Any:
            if not name.startswith("step-"):
                return original(self, name, *rest)
            return fuse.around(lambda: original(self, name, *rest), lambda: half(self, method, name))

        setattr(PosixStorage, method, access)

    for method in dice.choice((("write",), ("create",), ("write", "create"), ("remove_file", "remove_files"))):
        around(method)


def half(storage: Any, method: str, name: str) -> None:
    """Half of what a method of `PosixStorage` does: a draft, or of a folder one file removed."""
    if method in ("write", "create"):
        storage._draft(name, b"half of it")
        return
    inside = sorted(path for path in (storage._root / name).rglob("*") if path.is_file())
    for path in inside[:1]:
        path.unlink()


def _in_load(fuse: Fuse, dice: random.Random) -> None:
    from trainium_trainer.checkpoint.format import contents
    from trainium_trainer.checkpoint.resume import resume as imported

    resume: Any = imported  # it calls these names, and gives them to nobody
    place = dice.choice(("gather", "copy"))
    if place == "gather":
        deal = resume.deal
        resume.deal = lambda *given: fuse.around(lambda: deal(*given))
        return
    copy, read = resume.copy_all, contents.Contents._read_extent

    def copy_all(targets: list[Any], sources: list[Any]) -> None:
        half = len(targets) // 2
        fuse.around(lambda: copy(targets, sources), lambda: copy(targets[:half], sources[:half]))

    resume.copy_all = copy_all
    contents.Contents._read_extent = lambda *given: fuse.around(lambda: read(*given))  # type: ignore[method-assign]


_PATCHES: dict[Point, Callable[[Fuse, random.Random], None]] = {
    Point.STEP: _in_step,
    Point.STAGING: _in_staging,
    Point.WRITING: _in_writing,
    Point.COMMIT: _in_commit,
    Point.LOAD: _in_load,
}
