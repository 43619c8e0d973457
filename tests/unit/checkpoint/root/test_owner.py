"""One owner per checkpoint folder: a second job is refused by name before it writes anything."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import pytest
from checkpoint_world import HookedStorage, solo

from tests.testing.trainer.s3_gateway import serving
from trainium_contract.exit_codes import ExitCode
from trainium_contract.wire.checkpoint_manifest import GENERATION_FENCE_NAME
from trainium_trainer.checkpoint.errors import StaleGenerationError
from trainium_trainer.checkpoint.root.commit import read_fence
from trainium_trainer.checkpoint.root.owner import JobIdentity, OwnerRecords
from trainium_trainer.exits import TrainerError, find_exit_code
from trainium_trainer.storage.object_store import Limits, ObjectStorage
from trainium_trainer.storage.posix import PosixStorage
from trainium_trainer.storage.protocol import Retry, Storage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


pytestmark = pytest.mark.timeout(180)

ALPHA = JobIdentity("cluster-1", "team-a", "alpha", "uid-alpha")
ALPHA_AGAIN = JobIdentity("cluster-1", "team-a", "alpha", "uid-alpha-2")
ALPHA_ELSEWHERE = JobIdentity("cluster-2", "team-a", "alpha", "uid-far")
BETA = JobIdentity("cluster-1", "team-b", "beta", "uid-beta")


@pytest.fixture(params=["posix", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    if request.param == "posix":
        yield PosixStorage(tmp_path / "root")
        return
    with serving(tmp_path, monkeypatch):
        yield ObjectStorage("s3://bucket/runs/one", Limits(request_seconds=5.0))


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_second_job_is_refused_by_name_and_leaves_no_trace(tmp_path: Path) -> None:
    first = solo(tmp_path, job=ALPHA)
    first.to(2, save_at=(2,)).settle()
    before = files(tmp_path)
    with pytest.raises(TrainerError, match=r"belongs to the job team-a/alpha: .*takeOver: team-a/alpha") as caught:
        solo(tmp_path, job=BETA)
    assert find_exit_code(caught.value) == ExitCode.USER_ERROR
    assert files(tmp_path) == before
    # The innocent one has the fence still: its next save is committed.
    first.to(4, save_at=(4,)).settle()
    assert first.manager.durable_step == 4
    first.manager.close()


def test_a_job_with_other_settings_does_not_take_the_fence_of_the_one_that_runs(tmp_path: Path) -> None:
    first = solo(tmp_path)
    first.to(2, save_at=(2,)).settle()
    before = files(tmp_path)
    with pytest.raises(TrainerError, match="other settings"):
        solo(tmp_path, settings="another")
    assert files(tmp_path) == before
    first.to(4, save_at=(4,)).settle()
    first.manager.close()


def test_the_same_job_goes_on_after_restarts_and_in_later_generations(tmp_path: Path) -> None:
    solo(tmp_path, job=ALPHA).to(2, save_at=(2,)).settle().manager.close()
    again = solo(tmp_path, job=ALPHA, generation=1)
    assert again.resumed is not None
    assert again.resumed.step == 2
    again.manager.close()
    assert solo(tmp_path, job=ALPHA, generation=5).resumed is not None
    assert len(list(tmp_path.glob("OWNER-*"))) == 1


def test_a_job_made_again_under_its_name_goes_on_and_its_predecessor_never_returns(tmp_path: Path) -> None:
    old = solo(tmp_path, job=ALPHA)
    old.to(2, save_at=(2,)).settle()
    new = solo(tmp_path, job=ALPHA_AGAIN)
    assert new.resumed is not None
    assert new.resumed.step == 2
    # What is left of the old one is fenced out at its next commit, and ended when its agent starts it again.
    with pytest.raises(StaleGenerationError):
        old.to(4, save_at=(4,)).settle()
    with pytest.raises(TrainerError, match="was taken over by the job team-a/alpha") as caught:
        solo(tmp_path, job=ALPHA)
    assert find_exit_code(caught.value) == ExitCode.USER_ERROR
    new.to(4, save_at=(4,)).settle()
    new.manager.close()


def test_a_job_of_the_same_name_in_another_cluster_is_another_job(tmp_path: Path) -> None:
    solo(tmp_path, job=ALPHA).to(2, save_at=(2,)).settle().manager.close()
    with pytest.raises(TrainerError, match="belongs to the job team-a/alpha of another cluster"):
        solo(tmp_path, job=ALPHA_ELSEWHERE)


def test_a_folder_is_taken_over_on_request_once_and_not_in_turns(tmp_path: Path) -> None:
    solo(tmp_path, job=ALPHA).to(2, save_at=(2,)).settle().manager.close()
    with pytest.raises(TrainerError, match="belongs to the job team-a/alpha"):
        solo(tmp_path, job=BETA, take_over="team-a/gamma")
    taken = solo(tmp_path, job=BETA, take_over="team-a/alpha")
    assert taken.resumed is not None
    taken.manager.close()
    assert solo(tmp_path, job=BETA, take_over="team-a/alpha").resumed is not None
    with pytest.raises(TrainerError, match=r"taken over by the job team-b/beta.*recreate this job"):
        solo(tmp_path, job=ALPHA, take_over="team-b/beta")
    assert solo(tmp_path, job=ALPHA_AGAIN, take_over="team-b/beta").resumed is not None


def test_a_request_with_other_settings_is_refused_before_the_folder_changes_hands(tmp_path: Path) -> None:
    solo(tmp_path, job=ALPHA).to(2, save_at=(2,)).settle().manager.close()
    with pytest.raises(TrainerError, match="other settings"):
        solo(tmp_path, job=BETA, take_over="team-a/alpha", settings="another")
    assert solo(tmp_path, job=ALPHA).resumed is not None


def test_a_folder_of_before_there_were_owners_is_adopted_by_the_first_job(tmp_path: Path) -> None:
    solo(tmp_path, run="uid-old").to(2, save_at=(2,)).settle().manager.close()
    adopted = solo(tmp_path, job=ALPHA)
    assert adopted.resumed is not None
    adopted.manager.close()
    owner = json.loads((tmp_path / "OWNER-1").read_bytes())
    assert (owner["namespace"], owner["name"], owner["uid"]) == ("team-a", "alpha", "uid-alpha")
    with pytest.raises(TrainerError, match="belongs to the job team-a/alpha"):
        solo(tmp_path, job=BETA)


def test_a_process_outside_of_kubernetes_keeps_out_of_a_job_s_folder(tmp_path: Path) -> None:
    solo(tmp_path, job=ALPHA).to(2, save_at=(2,)).settle().manager.close()
    before = files(tmp_path)
    with pytest.raises(TrainerError, match=r"belongs to the job team-a/alpha: choose another checkpoint.path"):
        solo(tmp_path)
    assert files(tmp_path) == before


def test_of_many_jobs_that_begin_in_the_same_moment_one_has_the_folder(store: Storage) -> None:
    jobs = [JobIdentity("c", "team", f"job-{number}", f"uid-{number}") for number in range(8)]
    began = threading.Barrier(len(jobs))
    outcomes: dict[str, str] = {}
    retry = Retry(delays=(0.01,) * 10)
    store.prepare()

    def begin(job: JobIdentity) -> None:
        owning = OwnerRecords(store, job)
        began.wait()
        try:
            retry.run(owning.take_ownership, store.location)
            outcomes[job.name] = "owner" if retry.run(owning.is_held, store.location) else "nobody"
        except TrainerError as error:
            outcomes[job.name] = str(error)

    threads = [threading.Thread(target=begin, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    owners = [name for name, outcome in outcomes.items() if outcome == "owner"]
    assert len(owners) == 1
    others = [outcome for name, outcome in outcomes.items() if name not in owners]
    assert all(f"belongs to the job team/{owners[0]}" in outcome for outcome in others), outcomes


def test_the_owner_is_known_before_anything_else_is_written(tmp_path: Path) -> None:
    written: list[str] = []
    storage = HookedStorage(tmp_path, lambda what: written.append(what.removeprefix("before ")))
    solo(tmp_path, job=ALPHA, storage=storage).manager.close()
    started = [what for what in written if not what.startswith("after")]
    assert started[:2] == ["create OWNER-1", f"write {GENERATION_FENCE_NAME}"]


def test_a_record_that_cannot_be_read_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "OWNER-3").write_text("{")
    with pytest.raises(TrainerError, match="OWNER-3, which names the owner of the folder, cannot be read: remove it"):
        solo(tmp_path, job=ALPHA)
    assert read_fence(PosixStorage(tmp_path)) is None
