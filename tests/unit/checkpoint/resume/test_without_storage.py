"""Start while the durable store is full or unreachable: from memory, and the fence is claimed later."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoint.checkpoint_builders import ALPHA, BETA, HookedStorage, run_alone
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

    def _refuse(self, what: str) -> None:
        if (self.full or self.unreachable) and what.startswith("before"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def list(self, folder: str) -> list[Any]:
        self._answer()
        return super().list(folder)

    def read(self, name: str) -> bytes:
        self._answer()
        return super().read(name)

    def _answer(self) -> None:
        if self.unreachable:
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


@pytest.fixture
def store(tmp_path: Path) -> UnavailableStorage:
    return UnavailableStorage(tmp_path / "root")


def first_run(tmp_path: Path, store: UnavailableStorage, **settings: Any) -> None:
    run = run_alone(tmp_path / "root", tmp_path / "memory", storage=store, job=ALPHA, **settings)
    run.run_to(5, save_at=(3,)).flush()
    run.manager.close()


@pytest.mark.parametrize("problem", ["full", "unreachable"])
def test_a_restart_in_place_resumes_from_memory_and_saves_when_the_store_is_back(
    tmp_path: Path, store: UnavailableStorage, problem: str
) -> None:
    first_run(tmp_path, store)
    setattr(store, problem, True)
    again = run_alone(tmp_path / "root", tmp_path / "memory", storage=store, job=ALPHA, durable=TOLERANT)
    assert (again.resumed.step, again.report()["source"], again.wrong) == (5, "memory", [])
    assert any("training goes on, and saves as soon as" in warning for warning in again.manager.warnings)
    again.run_to(6, save_at=(6,)).manager._durable._thread.join()
    again.run_to(8)
    assert again.manager.durable_step == (3 if problem == "full" else -1)
    setattr(store, problem, False)
    again.run_to(9, save_at=(9,)).flush()
    assert again.manager.durable_step == 9
    again.manager.close()


def test_without_memory_a_start_on_a_full_store_ends_with_the_reason(tmp_path: Path, store: UnavailableStorage) -> None:
    first_run(tmp_path, store)
    new = UnavailableStorage(tmp_path / "new")
    store.full = new.full = True
    with pytest.raises(StorageError, match="the store is full"):
        run_alone(tmp_path / "root", storage=store, job=ALPHA)
    with pytest.raises(StorageError, match="the store is full"):
        run_alone(tmp_path / "new", tmp_path / "new-memory", storage=new, job=ALPHA)


def test_memory_of_an_earlier_generation_is_not_trusted_while_nothing_is_known_of_the_store(
    tmp_path: Path, store: UnavailableStorage
) -> None:
    first_run(tmp_path, store)
    store.unreachable = True
    with pytest.raises(StorageError):
        run_alone(tmp_path / "root", tmp_path / "memory", storage=store, job=ALPHA, generation=2)
    store.unreachable, store.full = False, True
    resumed = run_alone(tmp_path / "root", tmp_path / "memory", storage=store, job=ALPHA, generation=2)
    assert resumed.resumed.step == 5
    resumed.manager.close()


def test_a_start_without_the_fence_does_not_take_it_from_a_newer_generation(
    tmp_path: Path, store: UnavailableStorage
) -> None:
    first_run(tmp_path, store)
    store.full = True
    old = run_alone(tmp_path / "root", tmp_path / "memory", storage=store, job=ALPHA, durable=TOLERANT)
    store.full = False
    new = run_alone(tmp_path / "root", tmp_path / "elsewhere", job=ALPHA, generation=2)
    with pytest.raises(StaleGenerationError):
        old.run_to(7, save_at=(6,)).flush()
    fence = read_fence(PosixStorage(tmp_path / "root"))
    assert fence.generation == 2
    old.manager.close()
    new.manager.close()


def test_a_full_store_does_not_hide_that_the_folder_is_another_job_s(tmp_path: Path, store: UnavailableStorage) -> None:
    first_run(tmp_path, store)
    store.full = True
    with pytest.raises(Exception, match="belongs to the job team-a/alpha"):
        run_alone(tmp_path / "root", tmp_path / "memory-of-beta", storage=store, job=BETA)
