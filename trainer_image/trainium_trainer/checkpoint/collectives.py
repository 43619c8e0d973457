"""Collectives of Python values of any size that scale to 4,096 ranks.

`all_gather_object` pads every value to the longest: with one long value, each of 4,096 ranks holds 4,096 long values.
Here values are reduced up a binary tree to rank 0, joined and compressed at each level. Only rank 0 decides, and sends
each rank its part of the decision down the same tree. Only rank 0 receives all values, and the total traffic grows with
the number of ranks times the height of the tree.

Guarantees:
- A rank receives the values of others compressed and without padding, from at most log2(ranks) ranks.
- All ranks return the same outcome or their part of it, or all raise the same error.
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
"""Above the tags of the exchange at resume, below those of the buddies."""
_LEVEL = 1
"""zlib level: the values of ranks differ in few bytes, so the fastest level compresses well enough."""

_VALUE, _ERROR = "value", "error"


def reduce_on_root(
    produce: Callable[[], T],
    decide: Callable[[list[T]], A],
    group: ProcessGroup | None,
    label: str,
    fold: Callable[[list[T]], list[T]] | None = None,
) -> A:
    """Run `decide` on rank 0 with the values of all ranks; all ranks get its outcome. Collective.

    Parameters and errors are those of `scatter_from_root`.
    """
    size = 1 if group is None else dist.get_world_size()
    return scatter_from_root(produce, lambda values: [decide(values)] * size, group, label, fold)


def scatter_from_root(
    produce: Callable[[], T],
    decide: Callable[[list[T]], Sequence[A]],
    group: ProcessGroup | None,
    label: str,
    fold: Callable[[list[T]], list[T]] | None = None,
) -> A:
    """Run `decide` on rank 0 with the values of all ranks; it returns one answer per rank, in order. Collective.

    An object that several answers share is written once into each message. An error on any rank, in `produce` or in
    `decide`, is raised on all ranks; of several errors, the first TrainerError, else the first one. `label` identifies
    the call; ranks in calls with different labels get a RuntimeError instead of each other's values. `fold` reduces the
    values that a rank has received, its own first, to fewer or smaller ones in the same order before the rank passes
    them on.
    """
    if group is None:
        (decision,) = decide([produce()])
        return decision
    own_outcome = _run_action(produce)
    reducer = None if fold is None else lambda values: _fold(values, label, fold)
    collected = _reduce_up((label, _pickle_outcome(own_outcome)), group, reducer)
    outcome = None
    if collected:
        values = [pickle.loads(packed) for packed in collected]  # noqa: S301 - our own ranks
        decided = _pickle_outcome(_run_action(lambda: list(decide(_raise_first_error(values, label)))))
        outcome = pickle.loads(decided)  # noqa: S301 - just pickled
    kind, value = _scatter_down(outcome, group)
    if kind == _ERROR:
        raise value from (own_outcome[1] if own_outcome[0] == _ERROR else None)
    local: A = value[0]
    return local


@contextmanager
def disable_gc() -> Iterator[None]:
    """Disable the garbage collector within the context.

    The values contain no garbage and live until all are read. At 4,096 ranks the collections would take as long as
    everything else, and their time grows faster than the number of ranks.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _raise_first_error(values: list[tuple[str, bytes]], label: str) -> list[Any]:
    """Return the values of the ranks; if a rank has an error, raise the error to raise on all ranks."""
    if labels := {other for other, _ in values} - {label}:
        raise RuntimeError(f"ranks are at different points: {label} and {min(labels)}")
    outcomes = [pickle.loads(outcome) for _, outcome in values]  # noqa: S301 - our own ranks
    errors = [value for kind, value in outcomes if kind == _ERROR]
    if errors:
        raise next((error for error in errors if isinstance(error, TrainerError)), errors[0])
    return [value for _, value in outcomes]


def _fold(values: list[bytes], label: str, fold: Callable[[list[T]], list[T]]) -> list[bytes]:
    """Return the values that a rank passes on: the folded values, or all of them with an error of this rank."""
    received = [pickle.loads(item) for item in values]  # noqa: S301 - our own ranks
    if any(other_label != label or pickle.loads(outcome)[0] == _ERROR for other_label, outcome in received):  # noqa: S301
        return values
    kind, value = _run_action(lambda: fold(_raise_first_error(received, label)))
    if kind == _ERROR:
        return [*values, pickle.dumps((label, _pickle_outcome((kind, value))))]
    return [pickle.dumps((label, _pickle_outcome((_VALUE, item)))) for item in value]


def _run_action(action: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return _VALUE, action()
    except BaseException as error:  # noqa: BLE001 - it is raised on all ranks
        return _ERROR, error


def _pickle_outcome(outcome: Any) -> bytes:
    """Pickle an outcome; an error that cannot be pickled becomes its text."""
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)  # noqa: S301 - just made; some errors can be written and not read
    except Exception as error:  # noqa: BLE001 - whatever an exception's own code raises
        return pickle.dumps((_ERROR, RuntimeError(f"{outcome[1]!r} ({error})")))
    return data


def _reduce_up(
    value: Any, group: ProcessGroup, reducer: Callable[[list[bytes]], list[bytes]] | None = None
) -> list[bytes]:
    """Return the values of all ranks, in their order, on rank 0; nothing on the others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    values = [pickle.dumps(value)]
    distance = 1
    while distance < size:
        if rank % (2 * distance):
            _send(pack_values(values if reducer is None else reducer(values)), rank - distance, group)
            return []
        if rank + distance < size:
            values += unpack_values(_receive(rank + distance, group))
        distance *= 2
    return values


def _scatter_down(outcome: tuple[str, Any] | None, group: ProcessGroup) -> tuple[str, Any]:
    """Return this rank's part of an outcome that rank 0 has for all ranks; an error goes to all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    distance = rank & -rank if rank else 1 << (size - 1).bit_length()
    if outcome is None:
        outcome = pickle.loads(zlib.decompress(_receive(rank - distance, group)))  # noqa: S301 - our own ranks
    kind, values = outcome
    while distance > 1:
        distance //= 2
        if rank + distance < size:
            sent = values if kind == _ERROR else values[distance : 2 * distance]
            _send(pack_part(kind, sent), rank + distance, group)
    return kind, values


def pack_part(kind: str, values: Any) -> bytes:
    """Serialize a part of an outcome for the way down the tree."""
    return zlib.compress(pickle.dumps((kind, values)), _LEVEL)


def pack_values(values: list[bytes]) -> bytes:
    """Serialize the values of several ranks, in their order."""
    return zlib.compress(pickle.dumps(values), _LEVEL)


def unpack_values(packed: bytes) -> list[bytes]:
    """Deserialize the result of `pack_values`."""
    values: list[bytes] = pickle.loads(zlib.decompress(packed))  # noqa: S301 - our own ranks
    return values


def _send(data: bytes, target: int, group: ProcessGroup) -> None:
    dist.send(torch.tensor([len(data)]), target, group=group, tag=_TAG)
    dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), target, group=group, tag=_TAG)


def _receive(source: int, group: ProcessGroup) -> bytes:
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, source, group=group, tag=_TAG)
    data = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(data, source, group=group, tag=_TAG)
    return data.numpy().tobytes()
