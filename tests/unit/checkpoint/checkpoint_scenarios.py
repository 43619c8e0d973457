"""Functions that tests run in each rank, in a module that a forked process can import."""

import contextlib
import errno
import gc
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.unit.checkpoint.checkpoint_builders import HookedStorage, Run, position, run_alone
from trainium_contract.wire.checkpoint_manifest import COMMIT_NAME
from trainium_trainer.checkpoint.collectives import reduce_on_root, scatter_from_root
from trainium_trainer.checkpoint.interfaces import MeshCoordinates
from trainium_trainer.checkpoint.memory.snapshot import SnapshotFile
from trainium_trainer.storage.errors import StorageError


def train_until_killed(root: Any, memory: Any, completed: Any) -> None:
    run = run_alone(root, memory, scale=4000)
    while True:
        run.advance()
        completed.value = run.step


def report_after(place: MeshCoordinates, root: Any, memories: Any, steps: int, settings: Any) -> dict[str, Any]:
    """Resume, advance to `steps` with saves at the given ones, and report; `memories` has one folder per rank."""
    memory = memories[place.rank] if memories else None
    settings = dict(settings)
    save_at = settings.pop("save_at", ())
    finish = settings.pop("finish", False)
    if (count := settings.pop("snapshots", None)) is not None:
        limit_snapshots(count)
    if settings.pop("wired_backwards", False):
        place = replace(place, dp_rank=place.dp_size - 1 - place.dp_rank)
    run = Run(place, root, memory, **settings)
    report = run.report()
    while run.step < steps:
        run.advance(save=run.step + 1 in save_at)
        if run.step in save_at:
            run.flush()
    if finish:
        run.manager.finish(position(run.step))
    run.manager.before_update()
    report["reached"] = run.step
    report["durable"] = run.manager.durable_step
    report["guarded"] = run.manager.buddy_step
    run.manager.close()
    return report


def save_as_a_peer_dies(place: MeshCoordinates, root: Any) -> str:
    """Save step 1, kill rank 1 between the commit of rank 0 and its arrival, and return the error of rank 0."""
    peer = Path(f"{root}-peer")
    if place.rank == 1:
        peer.write_text(str(os.getpid()))
    dist.barrier()

    def kill_peer(what: str) -> None:
        if what.startswith("after create") and what.endswith(COMMIT_NAME):
            os.kill(int(peer.read_text()), signal.SIGKILL)
            with contextlib.suppress(RuntimeError):  # raised once this rank knows that the peer is gone
                dist.barrier(run.manager._durable._group)

    run = Run(place, root, storage=HookedStorage(root, kill_peer))
    run.run_to(1, save_at=(1,))
    try:
        run.flush()
    except Exception as error:  # noqa: BLE001 - whatever gloo makes of it
        return str(error)
    return ""


def limit_snapshots(count: int) -> None:
    """Let there be room for so many snapshot files and no more."""
    create = SnapshotFile.create
    left = [count]

    def limited(path: Any, payload_bytes: int) -> SnapshotFile:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1
        return create(path, payload_bytes)

    SnapshotFile.create = staticmethod(limited)


def gather_texts(place: MeshCoordinates, sizes: list[int]) -> list[str]:
    """Gather a text of `sizes[rank]` characters from each rank."""
    text, group = chr(ord("a") + place.rank) * sizes[place.rank], dist.new_group(backend="gloo")
    return reduce_on_root(lambda: text, list, group, "texts")


class UnpicklableError(Exception):
    """An error that can be pickled and not unpickled."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} at {where}")


def reduce_with_failures(place: MeshCoordinates) -> list[str]:
    """Return the outcome of each rank when all succeed, and when ranks fail in several ways."""
    group = dist.new_group(backend="gloo")

    def outcome(failing: dict[int, Exception], decide: Any = sum, label: str = "same", fold: Any = None) -> str:
        def contribute() -> int:
            if place.rank in failing:
                raise failing[place.rank]
            return place.rank

        try:
            return str(reduce_on_root(contribute, decide, group, label, fold))
        except Exception as error:  # noqa: BLE001 - that is the question
            return f"{type(error).__name__}: {error}"

    def refuse(_: list[int]) -> None:
        raise StorageError("no room")

    return [
        outcome({}),
        outcome({1: ValueError("one")}),
        outcome({1: ValueError("one"), 2: StorageError("two")}),
        outcome({0: OSError(28, "full")}),
        outcome({}, refuse),
        outcome({2: UnpicklableError("lost", "sea")}),
        outcome({}, label="late" if place.rank == 1 else "same"),
        outcome({}),
        outcome({}, list, fold=lambda values: [100 * sum(values)]),
        outcome({}, fold=lambda values: [1 // (values[0] - 2)]),
        outcome({1: ValueError("one")}, fold=lambda values: [sum(values)]),
    ]


def scatter_with_failures(place: MeshCoordinates) -> list[str]:
    """Return the answer to each rank when all succeed, and when ranks or the decision fail."""
    group = dist.new_group(backend="gloo")

    def outcome(failing: dict[int, Exception], decide: Any, label: str = "same") -> str:
        def contribute() -> str:
            if place.rank in failing:
                raise failing[place.rank]
            return chr(ord("a") + place.rank)

        try:
            return str(scatter_from_root(contribute, decide, group, label))
        except Exception as error:  # noqa: BLE001 - that is the question
            return f"{type(error).__name__}: {error}"

    def answers(values: list[str]) -> list[str]:
        return [f"{number} of {''.join(values)}{'x' * 50_000 * (number == 1)}" for number in range(len(values))]

    def refuse(_: list[str]) -> list[str]:
        raise StorageError("no room")

    return [
        outcome({}, answers),
        outcome({1: ValueError("one"), 2: StorageError("two")}, answers),
        outcome({}, refuse),
        outcome({}, answers, label="late" if place.rank == 1 else "same"),
        outcome({}, lambda values: [lambda: values for _ in values]),
        outcome({}, answers),
        outcome({}, lambda values: [gc.isenabled() for _ in values]) + str(gc.isenabled()),
    ]
