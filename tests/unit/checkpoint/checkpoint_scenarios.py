"""Functions that tests run in each rank; forked processes import this module."""

import contextlib
import errno
import functools
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.unit.checkpoint.checkpoint_builders import HookedStorage, Run, start_run
from trainium_contract.wire.checkpoint_manifest import COMMIT_NAME
from trainium_trainer.checkpoint.collectives import reduce_on_root, scatter_from_root
from trainium_trainer.checkpoint.interfaces import MeshCoordinates
from trainium_trainer.storage.errors import StorageError
from trainium_worker.snapshots.files import SnapshotFile


def train_until_killed(root: Any, memory: Any, completed: Any) -> None:
    run = start_run(root, memory, scale=4000)
    while True:
        run.advance()
        completed.value = run.step


def report_after(coordinates: MeshCoordinates, root: Any, memories: Any, steps: int, settings: Any) -> dict[str, Any]:
    """Resume, advance to `steps`, and report; `memories` has one folder per rank."""
    memory = memories[coordinates.rank] if memories else None
    settings = dict(settings)
    save_at = settings.pop("save_at", ())
    if (count := settings.pop("snapshots", None)) is not None:
        limit_snapshots(count)
    if settings.pop("reversed_order", False):
        coordinates = replace(coordinates, dp_rank=coordinates.dp_size - 1 - coordinates.dp_rank)
    run = Run(coordinates, root, memory, **settings)
    report = run.report()
    while run.step < steps:
        run.advance(save=run.step + 1 in save_at)
        if run.step in save_at:
            run.flush()
    run.manager.finish_snapshot()
    report["durable_step"] = run.manager.durable_step
    copying = None if run.manager._memory is None else run.manager._memory._copying
    report["buddy_step"] = None if copying is None else copying.newest
    run.manager.close()
    return report


def save_as_a_peer_dies(coordinates: MeshCoordinates, root: Any) -> str:
    """Save step 1, kill rank 1 between the commit of rank 0 and its arrival, and return the error of rank 0."""
    pid_file = Path(f"{root}-peer")
    if coordinates.rank == 1:
        pid_file.write_text(str(os.getpid()))
    dist.barrier()

    def kill_peer(access: str) -> None:
        if access.startswith("after create") and access.endswith(COMMIT_NAME):
            os.kill(int(pid_file.read_text()), signal.SIGKILL)
            with contextlib.suppress(RuntimeError):  # raised as soon as this rank detects the death of its peer
                dist.barrier(run.manager._durable._group)

    run = Run(coordinates, root, storage=HookedStorage(root, kill_peer))
    run.run_to(1, save_at=(1,))
    try:
        run.flush()
    except Exception as error:  # noqa: BLE001 - gloo raises errors of several types
        return str(error)
    return ""


def limit_snapshots(count: int) -> None:
    """Fail the creation of snapshot files after the first `count`."""
    create = SnapshotFile.create
    remaining = iter(range(count))

    def create_or_fail(path: Any, payload_bytes: int) -> SnapshotFile:
        if next(remaining, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return create(path, payload_bytes)

    SnapshotFile.create = staticmethod(create_or_fail)


def gather_texts(coordinates: MeshCoordinates, sizes: list[int]) -> list[str]:
    """Gather a text of `sizes[rank]` characters from each rank."""
    text, group = chr(ord("a") + coordinates.rank) * sizes[coordinates.rank], dist.new_group(backend="gloo")
    return reduce_on_root(lambda: text, list, group, "texts")


class UnpicklableError(Exception):
    """An error that can be pickled but not unpickled."""

    def __init__(self, message: str, place: str) -> None:
        super().__init__(f"{message} at {place}")


def return_or_raise(value: Any, error: Exception | None) -> Any:
    if error is not None:
        raise error
    return value


def describe_outcome(action: Callable[[], Any]) -> str:
    """Return the result of the action, or its error, as a text."""
    try:
        return str(action())
    except Exception as error:  # noqa: BLE001 - the test checks it
        return f"{type(error).__name__}: {error}"


def reduce_with_failures(coordinates: MeshCoordinates) -> list[str]:
    """Return the outcome of each rank when all succeed, and when ranks fail in several ways."""
    group = dist.new_group(backend="gloo")

    def outcome(failing: dict[int, Exception], decide: Any = sum, label: str = "same", fold: Any = None) -> str:
        contribute = functools.partial(return_or_raise, coordinates.rank, failing.get(coordinates.rank))
        return describe_outcome(lambda: reduce_on_root(contribute, decide, group, label, fold))

    def refuse(_: list[int]) -> None:
        raise StorageError("no room")

    return [
        outcome({}),
        outcome({1: ValueError("one")}),
        outcome({1: ValueError("one"), 2: StorageError("two")}),
        outcome({0: OSError(28, "full")}),
        outcome({}, refuse),
        outcome({2: UnpicklableError("lost", "sea")}),
        outcome({}, label="late" if coordinates.rank == 1 else "same"),
        outcome({}),
        outcome({}, list, fold=lambda values: [100 * sum(values)]),
        outcome({}, fold=lambda values: [1 // (values[0] - 2)]),
        outcome({1: ValueError("one")}, fold=lambda values: [sum(values)]),
    ]


def scatter_with_failures(coordinates: MeshCoordinates) -> list[str]:
    """Return the answer to each rank when all succeed, and when ranks or the decision fail."""
    group = dist.new_group(backend="gloo")

    letter = chr(ord("a") + coordinates.rank)

    def outcome(failing: dict[int, Exception], decide: Any, label: str = "same") -> str:
        contribute = functools.partial(return_or_raise, letter, failing.get(coordinates.rank))
        return describe_outcome(lambda: scatter_from_root(contribute, decide, group, label))

    def build_answers(values: list[str]) -> list[str]:
        return [f"{number} of {''.join(values)}{'x' * 50_000 * (number == 1)}" for number in range(len(values))]

    def refuse(_: list[str]) -> list[str]:
        raise StorageError("no room")

    return [
        outcome({}, build_answers),
        outcome({1: ValueError("one"), 2: StorageError("two")}, build_answers),
        outcome({}, refuse),
        outcome({}, build_answers, label="late" if coordinates.rank == 1 else "same"),
        outcome({}, lambda values: [lambda: values for _ in values]),
        outcome({}, build_answers),
    ]
