"""Starts while the durable store is full or away: memory is enough to go on, the fence is claimed later."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import pytest
from checkpoint_world import HookedStorage, solo

from trainium_trainer.checkpoint.errors import StaleGenerationError
from trainium_trainer.checkpoint.root.commit import read_fence
from trainium_trainer.checkpoint.root.owner import JobIdentity
from trainium_trainer.storage.errors import StorageError
from trainium_trainer.storage.posix import PosixStorage

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(180)

ALPHA = JobIdentity("c", "team", "alpha", "uid-alpha")
BETA = JobIdentity("c", "team", "beta", "uid-beta")
TOLERANT = {"failureTolerance": 100}


class TroubledStorage(HookedStorage):
    """A store that takes no file while `full`, and answers nothing while `away`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, self._refuse)
        self.full = self.away = False

    def _refuse(self, what: str) -> None:
        if (self.full or self.away) and what.startswith("before"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def list(self, folder: str) -> list[Any]:
        self._answer()
        return super().list(folder)

    def read(self, name: str) -> bytes:
        self._answer()
        return super().read(name)

    def _answer(self) -> None:
        if self.away:
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


@pytest.fixture
def store(tmp_path: Path) -> TroubledStorage:
    return TroubledStorage(tmp_path / "root")


def first_run(tmp_path: Path, store: TroubledStorage, **settings: Any) -> None:
    run = solo(tmp_path / "root", tmp_path / "memory", storage=store, job=ALPHA, **settings)
    run.to(5, save_at=(3,)).settle()
    run.manager.close()


@pytest.mark.parametrize("problem", ["full", "away"])
def test_a_restart_in_place_goes_on_from_memory_and_saves_when_the_store_is_back(
    tmp_path: Path, store: TroubledStorage, problem: str
) -> None:
    first_run(tmp_path, store)
    setattr(store, problem, True)
    again = solo(tmp_path / "root", tmp_path / "memory", storage=store, job=ALPHA, durable=TOLERANT)
    assert (again.resumed.step, again.report()["source"], again.wrong) == (5, "memory", [])
    assert any("training goes on, and saves as soon as" in warning for warning in again.manager.warnings)
    again.to(6, save_at=(6,)).manager._durable._thread.join()
    again.to(8)
    assert again.manager.durable_step == (3 if problem == "full" else -1)
    setattr(store, problem, False)
    again.to(9, save_at=(9,)).settle()
    assert again.manager.durable_step == 9
    again.manager.close()


def test_without_memory_a_start_on_a_full_store_ends_with_the_reason(tmp_path: Path, store: TroubledStorage) -> None:
    first_run(tmp_path, store)
    new = TroubledStorage(tmp_path / "new")
    store.full = new.full = True
    with pytest.raises(StorageError, match="the store is full"):
        solo(tmp_path / "root", storage=store, job=ALPHA)
    with pytest.raises(StorageError, match="the store is full"):
        solo(tmp_path / "new", tmp_path / "new-memory", storage=new, job=ALPHA)


def test_memory_of_an_earlier_generation_is_not_trusted_while_nothing_is_known_of_the_store(
    tmp_path: Path, store: TroubledStorage
) -> None:
    first_run(tmp_path, store)
    store.away = True
    with pytest.raises(StorageError):
        solo(tmp_path / "root", tmp_path / "memory", storage=store, job=ALPHA, generation=2)
    store.away, store.full = False, True
    resumed = solo(tmp_path / "root", tmp_path / "memory", storage=store, job=ALPHA, generation=2)
    assert resumed.resumed.step == 5
    resumed.manager.close()


def test_a_start_without_the_fence_does_not_take_it_from_a_newer_generation(
    tmp_path: Path, store: TroubledStorage
) -> None:
    first_run(tmp_path, store)
    store.full = True
    old = solo(tmp_path / "root", tmp_path / "memory", storage=store, job=ALPHA, durable=TOLERANT)
    store.full = False
    new = solo(tmp_path / "root", tmp_path / "elsewhere", job=ALPHA, generation=2)
    with pytest.raises(StaleGenerationError):
        old.to(7, save_at=(6,)).settle()
    fence = read_fence(PosixStorage(tmp_path / "root"))
    assert fence is not None
    assert fence.generation == 2
    old.manager.close()
    new.manager.close()


def test_a_full_store_does_not_hide_that_the_folder_is_another_job_s(tmp_path: Path, store: TroubledStorage) -> None:
    first_run(tmp_path, store)
    store.full = True
    with pytest.raises(Exception, match="belongs to the job team/alpha"):
        solo(tmp_path / "root", tmp_path / "memory-of-beta", storage=store, job=BETA)
