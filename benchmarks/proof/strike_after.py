# ruff: noqa: PLC0415 - what is patched is private, and imported by the rank that is to die
"""Deaths after the last step: while artifacts are written, and while they are measured. See `strike`.

A place is drawn among those that this rank comes to, and how often it passes it unharmed: the first rank alone makes
plans, commits and results, the data files and the questions are divided among all.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from benchmarks.proof.strike import Fuse, cut, half

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

ARTIFACTS = "artifacts"
"""Folder of the artifacts below a run's."""
_EXPORT = {"file": 1, "merge": 3, "gather": 8}
"""Places and the most passes before a death there."""
_EXPORT_FIRST = {"file": 4, "merge": 8, "gather": 8, "small": 18, "small ": 18, "tidy": 1}
_EVALUATE = {"load": 1, "take": 1, "gather": 5}
_EVALUATE_FIRST = {**_EVALUATE, "result": 3, "result ": 3}


def in_export(fuse: Fuse, dice: random.Random) -> None:
    """Die in a data file, in the merge of a weight, around a small file or the last removal, or in a gather."""
    from trainium_trainer.artifacts.result import Result

    place, fuse = _drawn(_EXPORT_FIRST if _is_first() else _EXPORT, fuse, dice)
    if place == "file":
        _in_data_file(fuse)
    elif place == "merge":
        result: Any = Result  # what is patched takes any arguments
        rows = result.rows

        def merged(self: Any, name: str, *rest: Any) -> Any:
            beside = f"{name.removesuffix('.weight')}.lora_B.weight"
            return fuse.around(lambda: rows(self, name, *rest)) if beside in self._names else rows(self, name, *rest)

        result.rows = merged
    elif place == "gather":
        _in_gather(fuse, lambda: True)
    elif place == "small":
        _around("write", fuse, lambda name: not name.startswith("evaluation"))
    else:
        _around("remove_files", fuse, lambda _: True)


def in_evaluation(fuse: Fuse, dice: random.Random) -> None:
    """Die around the loading of a model, its questions, a gather, or a file of the result."""
    from trainium_trainer.evaluate import compare as imported
    from trainium_trainer.evaluate import stage

    compare: Any = imported  # it calls these names, and gives them to nobody
    place, fuse = _drawn(_EVALUATE_FIRST if _is_first() else _EVALUATE, fuse, dice)
    begun: list[bool] = []
    evaluate = stage.evaluate_artifacts

    def evaluate_artifacts(*given: Any, **named: Any) -> Any:
        begun.append(True)
        return evaluate(*given, **named)

    stage.evaluate_artifacts = evaluate_artifacts
    if place == "load":
        load = compare.load
        compare.load = lambda *given, **named: fuse.around(lambda: load(*given, **named))
    elif place == "take":
        take = compare.take

        def taken(model: Any, exam: Any, mine: Any, *rest: Any, **named: Any) -> Any:
            mine = list(mine)
            some = mine[: len(mine) // 2]
            return fuse.around(
                lambda: take(model, exam, mine, *rest, **named), lambda: _done(take(model, exam, some, *rest, **named))
            )

        compare.take = taken
    elif place == "gather":
        _in_gather(fuse, lambda: bool(begun))
    else:
        _around("write", fuse, lambda _: bool(begun))


def _is_first() -> bool:
    return os.environ["RANK"] == "0"


def _drawn(places: dict[str, int], fuse: Fuse, dice: random.Random) -> tuple[str, Fuse]:
    """A place and the fuse for it; a name with blanks behind it is the same place, drawn more often."""
    place = dice.choice(tuple(places))
    return place.strip(), Fuse(dice.randint(0, places[place]), fuse.fraction)


def _in_data_file(fuse: Fuse) -> None:
    from trainium_trainer.checkpoint.storage.posix import PosixStorage

    write = PosixStorage.write_stream

    def write_stream(self: Any, name: str, pieces: Any, size: int) -> None:
        burns = ARTIFACTS in self._root.parts and fuse.burns()
        write(self, name, cut(pieces, int(fuse.fraction * size)) if burns else pieces, size)

    PosixStorage.write_stream = write_stream  # type: ignore[method-assign]


def _in_gather(fuse: Fuse, counts: Callable[[], bool]) -> None:
    from trainium_trainer.peers import Peers

    gather = Peers.gather
    Peers.gather = lambda self, value: (  # type: ignore[method-assign]
        fuse.around(lambda: gather(self, value)) if counts() else gather(self, value)
    )


def _around(method: str, fuse: Fuse, counts: Callable[[str], bool]) -> None:
    from trainium_trainer.checkpoint.storage.posix import PosixStorage

    original = getattr(PosixStorage, method)

    def access(self: Any, name: str, *rest: Any) -> Any:
        if ARTIFACTS not in self._root.parts or not counts(name):
            return original(self, name, *rest)
        return fuse.around(lambda: original(self, name, *rest), lambda: half(self, method, name))

    setattr(PosixStorage, method, access)


def _done(_: object) -> None:
    """The result is of no use."""
