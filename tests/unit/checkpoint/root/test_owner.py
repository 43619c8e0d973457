"""One owner per checkpoint folder: a second job is refused by name before it writes anything."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testing.trainer.s3_gateway import run_gateway
from tests.unit.checkpoint.checkpoint_builders import ALPHA, BETA, HookedStorage, read_files, start_run
from trainium_contract.exit_codes import ExitCode
from trainium_contract.wire.checkpoint_manifest import GENERATION_FENCE_NAME
from trainium_trainer.checkpoint.errors import StaleGenerationError
from trainium_trainer.checkpoint.root.commit import read_fence
from trainium_trainer.checkpoint.root.owner import JobIdentity, OwnerRecords
from trainium_trainer.exits import TrainerError, find_exit_code
from trainium_trainer.storage.object_store import Limits, ObjectStorage
from trainium_trainer.storage.posix import PosixStorage
from trainium_trainer.storage.protocol import Retry, Storage

ALPHA_AGAIN = JobIdentity("cluster-1", "team-a", "alpha", "uid-alpha-2")
ALPHA_ELSEWHERE = JobIdentity("cluster-2", "team-a", "alpha", "uid-far")


@pytest.fixture(params=["posix", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    if request.param == "posix":
        yield PosixStorage(tmp_path / "root")
        return
    with run_gateway(tmp_path, monkeypatch):
        yield ObjectStorage("s3://bucket/runs/one", Limits(request_seconds=5.0))


def test_a_second_job_is_refused_by_name_and_leaves_no_trace(tmp_path: Path) -> None:
    active = start_run(tmp_path, job=ALPHA).save_steps(2)
    before = read_files(tmp_path)
    with pytest.raises(TrainerError, match=r"belongs to the job team-a/alpha: .*takeOver: team-a/alpha") as caught:
        start_run(tmp_path, job=BETA)
    assert find_exit_code(caught.value) == ExitCode.USER_ERROR
    assert read_files(tmp_path) == before
    # The first job still holds the fence: its next save is committed.
    active.save_steps(4)
    assert active.manager.durable_step == 4
    active.close()


def test_a_job_with_other_settings_does_not_take_the_fence_of_the_one_that_runs(tmp_path: Path) -> None:
    active = start_run(tmp_path).save_steps(2)
    before = read_files(tmp_path)
    with pytest.raises(TrainerError, match="other settings"):
        start_run(tmp_path, settings="another")
    assert read_files(tmp_path) == before
    active.save_steps(4)
    active.close()


def test_the_same_job_continues_after_restarts_and_in_later_generations(tmp_path: Path) -> None:
    start_run(tmp_path, job=ALPHA).save_steps(2).close()
    restarted = start_run(tmp_path, job=ALPHA, generation=1).close()
    assert restarted.resumed.step == 2
    assert start_run(tmp_path, job=ALPHA, generation=5).resumed is not None
    assert len(list(tmp_path.glob("OWNER-*"))) == 1


def test_a_recreated_job_continues_and_fences_out_its_predecessor(tmp_path: Path) -> None:
    old = start_run(tmp_path, job=ALPHA).save_steps(2)
    new = start_run(tmp_path, job=ALPHA_AGAIN)
    assert new.resumed.step == 2
    # Processes of the old job are fenced out at their next commit, and refused when their agent restarts them.
    with pytest.raises(StaleGenerationError):
        old.save_steps(4)
    with pytest.raises(TrainerError, match="was taken over by the job team-a/alpha") as caught:
        start_run(tmp_path, job=ALPHA)
    assert find_exit_code(caught.value) == ExitCode.USER_ERROR
    new.save_steps(4)
    new.close()


def test_a_job_of_the_same_name_in_another_cluster_is_another_job(tmp_path: Path) -> None:
    start_run(tmp_path, job=ALPHA).save_steps(2).close()
    with pytest.raises(TrainerError, match="belongs to the job team-a/alpha of another cluster"):
        start_run(tmp_path, job=ALPHA_ELSEWHERE)


def test_a_folder_is_taken_over_on_request_once(tmp_path: Path) -> None:
    start_run(tmp_path, job=ALPHA).save_steps(2).close()
    with pytest.raises(TrainerError, match="belongs to the job team-a/alpha"):
        start_run(tmp_path, job=BETA, take_over="team-a/gamma")
    for _ in range(2):
        assert start_run(tmp_path, job=BETA, take_over="team-a/alpha").close().resumed is not None
    with pytest.raises(TrainerError, match=r"taken over by the job team-b/beta.*recreate this job"):
        start_run(tmp_path, job=ALPHA, take_over="team-b/beta")
    assert start_run(tmp_path, job=ALPHA_AGAIN, take_over="team-b/beta").resumed is not None


def test_a_request_with_other_settings_is_refused_before_the_folder_changes_its_owner(tmp_path: Path) -> None:
    start_run(tmp_path, job=ALPHA).save_steps(2).close()
    with pytest.raises(TrainerError, match="other settings"):
        start_run(tmp_path, job=BETA, take_over="team-a/alpha", settings="another")
    assert start_run(tmp_path, job=ALPHA).resumed is not None


def test_a_folder_without_an_owner_is_adopted_by_the_first_job(tmp_path: Path) -> None:
    start_run(tmp_path, run="uid-old").save_steps(2).close()
    adopted = start_run(tmp_path, job=ALPHA).close()
    assert adopted.resumed is not None
    owner = json.loads((tmp_path / "OWNER-1").read_bytes())
    assert (owner["namespace"], owner["name"], owner["uid"]) == ("team-a", "alpha", "uid-alpha")
    with pytest.raises(TrainerError, match="belongs to the job team-a/alpha"):
        start_run(tmp_path, job=BETA)


def test_a_process_outside_kubernetes_is_refused_in_the_folder_of_a_job(tmp_path: Path) -> None:
    start_run(tmp_path, job=ALPHA).save_steps(2).close()
    before = read_files(tmp_path)
    with pytest.raises(TrainerError, match=r"belongs to the job team-a/alpha: choose another checkpoint.path"):
        start_run(tmp_path)
    assert read_files(tmp_path) == before


def test_one_of_many_jobs_that_start_together_owns_the_folder(store: Storage) -> None:
    jobs = [JobIdentity("c", "team", f"job-{number}", f"uid-{number}") for number in range(8)]
    start_barrier = threading.Barrier(len(jobs))
    outcomes: dict[str, str] = {}
    retry = Retry(delays=(0.01,) * 10)
    store.prepare()

    def attempt_ownership(job: JobIdentity) -> None:
        records = OwnerRecords(store, job)
        start_barrier.wait()
        try:
            retry.run(records.take_ownership, store.location)
            outcomes[job.name] = "owner" if retry.run(records.is_held, store.location) else "nobody"
        except TrainerError as error:
            outcomes[job.name] = str(error)

    threads = [threading.Thread(target=attempt_ownership, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    owners = [name for name, outcome in outcomes.items() if outcome == "owner"]
    assert len(owners) == 1
    refusals = [outcome for name, outcome in outcomes.items() if name not in owners]
    assert all(f"belongs to the job team/{owners[0]}" in outcome for outcome in refusals), outcomes


def test_the_owner_is_recorded_before_anything_else_is_written(tmp_path: Path) -> None:
    written: list[str] = []
    storage = HookedStorage(tmp_path, lambda access: written.append(access.removeprefix("before ")))
    start_run(tmp_path, job=ALPHA, storage=storage).close()
    first_accesses = [access for access in written if not access.startswith("after")]
    assert first_accesses[:2] == ["create OWNER-1", f"write {GENERATION_FENCE_NAME}"]


def test_a_record_that_cannot_be_read_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "OWNER-3").write_text("{")
    with pytest.raises(TrainerError, match="OWNER-3, which names the owner of the folder, cannot be read: remove it"):
        start_run(tmp_path, job=ALPHA)
    assert read_fence(PosixStorage(tmp_path)) is None
