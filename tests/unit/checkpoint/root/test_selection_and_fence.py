"""Choose a checkpoint of a root, refuse checkpoints of other settings, and claim the fence and the records."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.testing.trainer.s3_gateway import run_gateway
from tests.unit.checkpoint.checkpoint_builders import ALPHA, BETA, HookedStorage, committed_checkpoint, start_run
from trainium_contract.trainer.checkpoint import CheckpointConfig
from trainium_contract.wire.checkpoint_manifest import COMMIT_NAME, OWNER_PREFIX, Owner
from trainium_contract.wire.messages import MAX_GENERATION, MAX_GENERATION_LEAD
from trainium_trainer.checkpoint.errors import StaleGenerationError, UnusableCheckpointError
from trainium_trainer.checkpoint.root.commit import FenceToken, Receipt, check_fence, claim_fence, publish, read_fence
from trainium_trainer.checkpoint.root.commit_lease import CommitLease
from trainium_trainer.checkpoint.root.metrics_copy import RecordCopies, find_records_folder
from trainium_trainer.checkpoint.root.owner import NOBODY, OwnerRecords
from trainium_trainer.checkpoint.root.run_settings import format_differences, refuse_foreign
from trainium_trainer.checkpoint.root.selection import choose_checkpoint
from trainium_trainer.checkpoint.root.survey import Survey, survey
from trainium_trainer.exits import UserError
from trainium_trainer.storage.errors import StorageError
from trainium_trainer.storage.posix import PosixStorage
from trainium_trainer.storage.protocol import Retry

NO_RETRY = Retry(())
TOKEN = FenceToken(3, "run", "session")


# ---- settings -----------------------------------------------------------------------------------------------------


def test_different_settings_are_named_by_path_and_shortened() -> None:
    saved = {"model": {"hiddenSize": 64, "name": "x" * 50}, "seed": 1}
    current = {"model": {"hiddenSize": 128, "name": "x" * 50}, "data": {"path": "/data"}, "seed": 1}
    assert format_differences(saved, current) == (
        "data.path is absent there and /data here, model.hiddenSize is 64 there and 128 here"
    )
    assert format_differences({"name": "y" * 41}, {}) == f"name is {'y' * 12}… there and absent here"
    many = format_differences({}, dict.fromkeys("abcde", 1))
    assert many.count("absent there") == 3
    assert many.endswith(", and 2 more")
    assert format_differences(saved, saved) == ""


def test_a_converted_checkpoint_is_compared_in_the_settings_that_it_records() -> None:
    surveyed = Survey([committed_checkpoint(4, config_digest="", settings={"vocabulary": 64})])
    refuse_foreign(surveyed, "root", {"vocabulary": 64, "seed": 7}, "ours")
    with pytest.raises(UnusableCheckpointError, match="vocabulary is 64 there and 128 here"):
        refuse_foreign(surveyed, "root", {"vocabulary": 128, "seed": 7}, "ours")


@pytest.mark.parametrize(("newer", "refused"), [("step-2", False), ("step-4", False), ("step-6", True)])
def test_a_checkpoint_of_a_newer_version_stops_the_run_only_when_it_is_the_newest(newer: str, refused: bool) -> None:
    surveyed = Survey([committed_checkpoint(4)], other_versions={newer: f"{newer} was written by a newer version"})
    if refused:
        with pytest.raises(UnusableCheckpointError, match="continue with that version"):
            refuse_foreign(surveyed, "root", {}, "c")
    else:
        refuse_foreign(surveyed, "root", {}, "c")


# ---- which checkpoint ---------------------------------------------------------------------------------------------


def test_a_root_without_a_checkpoint_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"there is no committed checkpoint in {tmp_path}"):
        choose_checkpoint(PosixStorage(tmp_path), str(tmp_path), None, milestones=False)


def test_a_checkpoint_is_chosen_by_its_step_and_without_one_it_is_the_newest(tmp_path: Path) -> None:
    start_run(tmp_path).save_steps(2, 4).close()
    storage = PosixStorage(tmp_path)
    assert choose_checkpoint(storage, "root", 2, milestones=False).step == 2
    assert choose_checkpoint(storage, "root", None, milestones=False).step == 4
    with pytest.raises(UserError, match="no committed checkpoint of step 3 in root: there are 2, 4"):
        choose_checkpoint(storage, "root", 3, milestones=True)


class UnlistableStorage(PosixStorage):
    def list(self, folder: str) -> Any:
        raise PermissionError(13, "Permission denied", folder)


def test_a_root_that_cannot_be_read_is_an_error_of_the_store(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="Permission denied"):
        choose_checkpoint(UnlistableStorage(tmp_path), str(tmp_path), None, milestones=False)


# ---- owner and fence ----------------------------------------------------------------------------------------------


def test_a_job_that_lost_the_race_for_a_folder_that_it_may_take_over_tries_again(tmp_path: Path) -> None:
    def create_rival_owner(access: str) -> None:
        if access == f"before create {OWNER_PREFIX}2":
            name = f"{OWNER_PREFIX}2"
            rival = Owner(cluster="cluster-1", namespace="team-a", name="alpha", uid="uid-alpha-2", since=0.0)
            PosixStorage(tmp_path).create(name, rival.model_dump_json(by_alias=True).encode())

    OwnerRecords(PosixStorage(tmp_path), ALPHA).take_ownership()
    records = OwnerRecords(HookedStorage(tmp_path, create_rival_owner), BETA, take_over="team-a/alpha")
    with pytest.raises(OSError, match="the owner of the folder has just changed"):
        records.take_ownership()
    records.take_ownership()  # as a retry does
    assert records.is_held()


class ResponseLosingStorage(PosixStorage):
    """A folder that creates a file and then reports that it exists, like a retry after a lost response."""

    def create(self, name: str, data: bytes) -> None:
        super().create(name, data)
        raise FileExistsError(17, "File exists", name)


def test_a_commit_whose_response_was_lost_is_recognized_as_ours(tmp_path: Path) -> None:
    receipt = Receipt("step-4", b"receipt")
    publish(ResponseLosingStorage(tmp_path), receipt, NO_RETRY)
    assert PosixStorage(tmp_path).read(f"step-4/{COMMIT_NAME}") == b"receipt"
    with pytest.raises(StaleGenerationError, match="committed by another start of the run"):
        publish(PosixStorage(tmp_path), Receipt("step-4", b"another"), NO_RETRY)


@pytest.mark.parametrize(
    ("text", "token"),
    [
        (b'{"generation": 7, "run": "r"}', FenceToken(7, "r", "")),
        (b'{"generation": "seven"}', None),
        (b"{}", None),
        (b"\xff", None),
        (b"[1]", None),
        (b"7", None),
        (b'{"generation": -1}', None),
        (json.dumps({"generation": MAX_GENERATION + 1}).encode(), None),
    ],
)
def test_an_unreadable_fence_is_ignored(tmp_path: Path, text: bytes, token: FenceToken | None) -> None:
    (tmp_path / "GENERATION").write_bytes(text)
    fence = read_fence(PosixStorage(tmp_path))
    assert (fence and fence.token) == token


@pytest.mark.parametrize("generation", [4, 3 + MAX_GENERATION_LEAD])
def test_an_older_generation_is_refused_with_the_number_of_the_newer_one(tmp_path: Path, generation: int) -> None:
    claim_fence(PosixStorage(tmp_path), replace(TOKEN, generation=generation))
    for refused in (claim_fence, check_fence):
        with pytest.raises(StaleGenerationError, match=f"generation {generation}") as caught:
            refused(PosixStorage(tmp_path), TOKEN)
        assert caught.value.newer == generation


def test_a_fence_that_no_restore_explains_is_an_error_for_the_user(tmp_path: Path) -> None:
    claim_fence(PosixStorage(tmp_path), replace(TOKEN, generation=4 + MAX_GENERATION_LEAD))
    with pytest.raises(UnusableCheckpointError, match="Remove the file GENERATION"):
        claim_fence(PosixStorage(tmp_path), TOKEN)


def create_lease(folder: Path) -> CommitLease:
    storage = PosixStorage(folder)
    return CommitLease(storage, OwnerRecords(storage, NOBODY), TOKEN, NO_RETRY)


def test_a_fence_that_is_claimed_is_not_claimed_again_before_each_commit(tmp_path: Path) -> None:
    lease = create_lease(tmp_path)
    lease.acquire(lambda _: None)
    newer = FenceToken(4, "run", "newer session")
    claim_fence(PosixStorage(tmp_path), newer)
    lease.ensure()
    assert read_fence(PosixStorage(tmp_path)).token == newer, "the newer start keeps the fence"
    with pytest.raises(StaleGenerationError):
        lease.check()


def test_a_start_that_could_not_claim_the_fence_claims_it_before_its_first_commit(tmp_path: Path) -> None:
    lease = create_lease(tmp_path)
    lease.check()  # there is no newer start
    lease.ensure()
    assert lease.claimed
    assert read_fence(PosixStorage(tmp_path)).token == TOKEN
    lease.check()


# ---- records ------------------------------------------------------------------------------------------------------


def test_a_node_that_has_its_records_keeps_them_and_another_gets_the_whole_lines(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path / "root")
    first_node, second_node = (tmp_path / name for name in ("first", "second"))
    first, second = (
        RecordCopies(CheckpointConfig(path=str(tmp_path / "root"), records_path=str(folder)), storage)
        for folder in (first_node, second_node)
    )
    first_node.mkdir()
    (first_node / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2}\n{"st')
    first.send()
    second.fetch()
    assert (second_node / "metrics.jsonl").read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    (second_node / "metrics.jsonl").write_bytes(b'{"step": 3}\n')
    second.fetch()
    assert (second_node / "metrics.jsonl").read_bytes() == b'{"step": 3}\n'
    assert survey(storage).committed == []


@pytest.mark.parametrize(
    ("records", "copies"),
    [(None, {"run/metrics.jsonl"}), ("s3://bucket/records", {"run/metrics.jsonl", "records/metrics.jsonl"})],
)
def test_records_in_a_bucket_are_on_the_node_and_copied_at_each_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: str | None, copies: set[str]
) -> None:
    with run_gateway(tmp_path, monkeypatch) as server:
        lines = b'{"step":1}\n'
        for node in ("one", "two"):
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / node))
            run = start_run("s3://bucket/run", records=records).flush()
            RecordCopies(run.manager._config, run.manager._durable._storage).fetch()
            path = find_records_folder(run.manager._config) / "metrics.jsonl"
            assert path.is_relative_to(tmp_path / node)
            if node == "one":
                path.parent.mkdir(parents=True)
                path.write_bytes(lines)
                run.save_steps(2)
            run.close()
            assert path.read_bytes() == lines
        assert {key for key in server.objects("bucket") if key.endswith("metrics.jsonl")} == copies
