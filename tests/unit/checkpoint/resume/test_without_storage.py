"""Start from memory while the durable store is full or unreachable, and claim the fence later."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoint.checkpoint_builders import ALPHA, BETA, HookedStorage, start_run
from trainium_trainer.checkpoint.errors import StaleGenerationError
from trainium_trainer.checkpoint.root.commit import read_fence
from trainium_trainer.storage.errors import StorageError
from trainium_trainer.storage.posix import PosixStorage

TOLERANT = {"failureTolerance": 100}


class UnavailableStorage(HookedStorage):
    """A store that refuses files while it is `full`, and every request while it is `unreachable`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, self._refuse)
        self.full = self.unreachable = False

    def _refuse(self, access: str) -> None:
        if (self.full or self.unreachable) and access.startswith("before"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def list(self, folder: str) -> list[Any]:
        self._check_reachable()
        return super().list(folder)

    def read(self, name: str) -> bytes:
        self._check_reachable()
        return super().read(name)

    def _check_reachable(self) -> None:
        if self.unreachable:
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


@pytest.fixture
def store(tmp_path: Path) -> UnavailableStorage:
    return UnavailableStorage(tmp_path / "root")


def train_first(tmp_path: Path, store: UnavailableStorage, **settings: Any) -> None:
    run = start_run(tmp_path / "root", tmp_path / "memory", storage=store, job=ALPHA, **settings)
    run.run_to(5, save_at=(3,)).flush()
    run.close()


@pytest.mark.parametrize("problem", ["full", "unreachable"])
def test_a_restart_in_place_resumes_from_memory_and_saves_when_the_store_recovers(
    tmp_path: Path, store: UnavailableStorage, problem: str
) -> None:
    train_first(tmp_path, store)
    setattr(store, problem, True)
    restarted = start_run(tmp_path / "root", tmp_path / "memory", storage=store, job=ALPHA, durable=TOLERANT)
    assert (restarted.resumed.step, restarted.report()["source"], restarted.wrong_tensors) == (5, "memory", [])
    assert any("training continues, and saves as soon as" in warning for warning in restarted.manager.warnings)
    restarted.run_to(6, save_at=(6,)).manager._durable._thread.join()
    restarted.run_to(8)
    assert restarted.manager.durable_step == (3 if problem == "full" else -1)
    setattr(store, problem, False)
    restarted.save_steps(9)
    assert restarted.manager.durable_step == 9
    restarted.close()


def test_without_memory_a_start_on_a_full_store_ends_with_the_reason(tmp_path: Path, store: UnavailableStorage) -> None:
    train_first(tmp_path, store)
    new = UnavailableStorage(tmp_path / "new")
    store.full = new.full = True
    with pytest.raises(StorageError, match="the store is full"):
        start_run(tmp_path / "root", storage=store, job=ALPHA)
    with pytest.raises(StorageError, match="the store is full"):
        start_run(tmp_path / "new", tmp_path / "new-memory", storage=new, job=ALPHA)


def test_memory_of_an_earlier_generation_is_not_used_while_the_store_is_unreachable(
    tmp_path: Path, store: UnavailableStorage
) -> None:
    train_first(tmp_path, store)
    store.unreachable = True
    with pytest.raises(StorageError):
        start_run(tmp_path / "root", tmp_path / "memory", storage=store, job=ALPHA, generation=2)
    store.unreachable, store.full = False, True
    resumed = start_run(tmp_path / "root", tmp_path / "memory", storage=store, job=ALPHA, generation=2).close()
    assert resumed.resumed.step == 5


def test_a_start_without_the_fence_does_not_take_it_from_a_newer_generation(
    tmp_path: Path, store: UnavailableStorage
) -> None:
    train_first(tmp_path, store)
    store.full = True
    old = start_run(tmp_path / "root", tmp_path / "memory", storage=store, job=ALPHA, durable=TOLERANT)
    store.full = False
    new = start_run(tmp_path / "root", tmp_path / "elsewhere", job=ALPHA, generation=2)
    with pytest.raises(StaleGenerationError):
        old.run_to(7, save_at=(6,)).flush()
    fence = read_fence(PosixStorage(tmp_path / "root")).token
    assert fence.generation == 2
    old.close()
    new.close()


def test_a_full_store_does_not_hide_that_the_folder_is_another_job_s(tmp_path: Path, store: UnavailableStorage) -> None:
    train_first(tmp_path, store)
    store.full = True
    with pytest.raises(Exception, match="belongs to the job team-a/alpha"):
        start_run(tmp_path / "root", tmp_path / "memory-of-beta", storage=store, job=BETA)
