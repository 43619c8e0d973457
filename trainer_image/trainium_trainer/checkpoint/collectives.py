"""One value of each rank for all ranks, of any size, at a cost that 4,096 ranks can bear.

`all_gather_object` gives every rank as much room as the longest value needs: one rank with a long sentence and 4,096
ranks hold 4,096 long sentences. Here values climb a tree of pairs to rank 0, joined and compressed at each meeting, and
come back in one broadcast.

Where rank 0 alone has to know and decide, `settle` sends back what it decided instead, and `deal` to each rank what
concerns it, down the same tree: then only rank 0 hears of all, and the bytes of all ranks together grow with their
number and the height of the tree.

Invariants: a rank receives the sum of what was said, compressed, and no padding; it meets at most log2(ranks) others on
the way up; all ranks return equal lists, or the same outcome, or all raise the same error.
"""

from __future__ import annotations

import gc
import pickle
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from trainium_trainer.exits import TrainerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import ProcessGroup

T = TypeVar("T")
A = TypeVar("A")
_TAG = 1 << 15
"""Above those of the exchange at resume, below those of the buddies."""
_LEVEL = 1
"""Of zlib: what ranks say differs in few bytes, which the fastest level finds as well."""

_VALUE, _ERROR = "value", "error"


def gather(value: T, group: ProcessGroup | None) -> list[T]:
    """The values of all ranks, in their order. Collective over `group`, which spans all ranks; None: one rank alone."""
    if group is None:
        return [value]
    said = _climb(value, group)
    return [pickle.loads(each) for each in unpack(_broadcast(pack(said) if said else b"", group))]  # noqa: S301 - our own ranks


def settle(
    say: Callable[[], T],
    decide: Callable[[list[T]], A],
    group: ProcessGroup | None,
    label: str,
    fold: Callable[[list[T]], list[T]] | None = None,
) -> A:
    """What rank 0 makes of what all ranks say: `decide` runs there alone, all ranks get its outcome. Collective.

    An error on any rank, in saying or in deciding, is raised on all of them, if there are several the first one's, and
    one with a sentence for a person before others. `label` names the occasion; ranks at different occasions get a
    RuntimeError instead of each other's values. `fold`: what a rank makes of the values that it has heard, its own
    first, before it passes them on: fewer or smaller ones, in the same order.
    """
    if group is None:
        return decide([say()])
    mine = _outcome(say)
    shorter = None if fold is None else lambda said: _folded(said, label, fold)
    said = [pickle.loads(each) for each in _climb((label, _told(mine)), group, shorter)]  # noqa: S301 - our own ranks
    answer = _told(_outcome(lambda: decide(_agreed(said, label)))) if said else b""
    kind, value = pickle.loads(_broadcast(answer, group))  # noqa: S301 - our own ranks
    if kind == _ERROR:
        raise value from (mine[1] if mine[0] == _ERROR else None)
    outcome: A = value
    return outcome


def deal(say: Callable[[], T], decide: Callable[[list[T]], Sequence[A]], group: ProcessGroup | None, label: str) -> A:
    """Like `settle`, but `decide` gives an answer for each rank, in their order; each rank gets its own. Collective.

    What several answers share (one object) is written once into each message.
    """
    if group is None:
        (answer,) = decide([say()])
        return answer
    mine = _outcome(say)
    climbed = _climb((label, _told(mine)), group)
    with uncollected():
        said = [pickle.loads(each) for each in climbed]  # noqa: S301 - our own ranks
        told = pickle.loads(_told(_outcome(lambda: list(decide(_agreed(said, label)))))) if said else None  # noqa: S301
        kind, value = _descend(told, group)
    if kind == _ERROR:
        raise value from (mine[1] if mine[0] == _ERROR else None)
    own: A = value[0]
    return own


@contextmanager
def uncollected() -> Iterator[None]:
    """No search for circles of objects meanwhile.

    What ranks say holds none, and lives until all is read: at 4,096 ranks the searches take as long as everything else,
    and grow faster than the number of ranks.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _agreed(said: list[tuple[str, bytes]], label: str) -> list[Any]:
    """What the ranks said, if all did; else the error to raise everywhere is raised."""
    if labels := {each for each, _ in said} - {label}:
        raise RuntimeError(f"ranks are at different points: {label} and {min(labels)}")
    outcomes = [pickle.loads(told) for _, told in said]  # noqa: S301 - our own ranks
    errors = [value for kind, value in outcomes if kind == _ERROR]
    if errors:
        raise next((error for error in errors if isinstance(error, TrainerError)), errors[0])
    return [value for _, value in outcomes]


def _folded(said: list[bytes], label: str, fold: Callable[[list[T]], list[T]]) -> list[bytes]:
    """What a rank passes on; an error of its own beside what it has heard, and errors of others untouched."""
    heard = [pickle.loads(each) for each in said]  # noqa: S301 - our own ranks
    if any(theirs != label or pickle.loads(told)[0] == _ERROR for theirs, told in heard):  # noqa: S301
        return said
    kind, value = _outcome(lambda: fold(_agreed(heard, label)))
    if kind == _ERROR:
        return [*said, pickle.dumps((label, _told((kind, value))))]
    return [pickle.dumps((label, _told((_VALUE, each)))) for each in value]


def _outcome(action: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return _VALUE, action()
    except BaseException as error:  # noqa: BLE001 - it is raised on all ranks
        return _ERROR, error


def _told(outcome: Any) -> bytes:
    """An outcome as it travels; of an error that cannot, its words."""
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)  # noqa: S301 - just made; some errors can be written and not read
    except Exception as error:  # noqa: BLE001 - whatever an exception's own code raises
        return pickle.dumps((_ERROR, RuntimeError(f"{outcome[1]!r} ({error})")))
    return data


def _climb(
    value: Any, group: ProcessGroup, shorter: Callable[[list[bytes]], list[bytes]] | None = None
) -> list[bytes]:  # fmt: skip
    """On rank 0 what each rank says, in their order; nothing on the others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    said = [pickle.dumps(value)]
    distance = 1
    while distance < size:
        if rank % (2 * distance):
            _send(pack(said if shorter is None else shorter(said)), rank - distance, group)
            return []
        if rank + distance < size:
            said += unpack(_receive(rank + distance, group))
        distance *= 2
    return said


def _descend(told: tuple[str, Any] | None, group: ProcessGroup) -> tuple[str, Any]:
    """Of an outcome with a list of values for all ranks, given on rank 0, this rank's part; an error goes to all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    distance = rank & -rank if rank else 1 << (size - 1).bit_length()
    if told is None:
        told = pickle.loads(zlib.decompress(_receive(rank - distance, group)))  # noqa: S301 - our own ranks
    kind, values = told
    while distance > 1:
        distance //= 2
        if rank + distance < size:
            theirs = values if kind == _ERROR else values[distance : 2 * distance]
            _send(part(kind, theirs), rank + distance, group)
    return kind, values


def part(kind: str, values: Any) -> bytes:
    """A part of an outcome as it travels down."""
    return zlib.compress(pickle.dumps((kind, values)), _LEVEL)


def pack(said: list[bytes]) -> bytes:
    """What several ranks said, in their order, as it travels."""
    return zlib.compress(pickle.dumps(said), _LEVEL)


def unpack(packed: bytes) -> list[bytes]:
    """What `pack` was given."""
    said: list[bytes] = pickle.loads(zlib.decompress(packed))  # noqa: S301 - our own ranks
    return said


def _send(data: bytes, target: int, group: ProcessGroup) -> None:
    dist.send(torch.tensor([len(data)]), target, group=group, tag=_TAG)
    dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), target, group=group, tag=_TAG)


def _receive(source: int, group: ProcessGroup) -> bytes:
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, source, group=group, tag=_TAG)
    data = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(data, source, group=group, tag=_TAG)
    return data.numpy().tobytes()


def _broadcast(data: bytes, group: ProcessGroup) -> bytes:
    """Rank 0's bytes on all ranks."""
    length = torch.tensor([len(data)])
    dist.broadcast(length, 0, group=group)
    whole = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(int(length), dtype=torch.uint8)
    )
    dist.broadcast(whole, 0, group=group)
    return whole.numpy().tobytes()
