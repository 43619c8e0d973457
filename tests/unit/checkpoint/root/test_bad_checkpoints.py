"""Refuse bad checkpoints with a sentence and an exit code of the contract; tolerate stores that fail for a while."""

import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.testing.trainer.s3_gateway import Fault, run_gateway
from tests.unit.checkpoint.checkpoint_builders import HookedStorage, read_files, start_run
from trainium_contract.exit_codes import ExitCode
from trainium_contract.trainer.checkpoint import CheckpointConfig
from trainium_contract.wire.checkpoint_manifest import GENERATION_FENCE_NAME
from trainium_trainer import cli
from trainium_trainer.exits import TrainerError, find_exit_code
from trainium_trainer.storage.object_store import Limits, ObjectStorage
from trainium_trainer.storage.protocol import Retry


def delete_shards(root: Path) -> None:
    for step in (2, 4):
        shutil.rmtree(next(path for path in (root / f"step-{step}").iterdir() if path.is_dir()))


def swap_shards(root: Path) -> None:
    two, four = (next((root / f"step-{step}").glob("*/shard-*")) for step in (2, 4))
    shard_of_step_2 = two.read_bytes()
    two.write_bytes(four.read_bytes())
    four.write_bytes(shard_of_step_2)


def raise_format_version(root: Path) -> None:
    receipt = root / "step-4" / "COMMITTED"
    receipt.write_text(json.dumps(json.loads(receipt.read_text()) | {"formatVersion": 9, "novelty": 1}))


def leave_intact(_: Path) -> None:
    """Leave the checkpoint intact; the run is of another model."""


@pytest.mark.parametrize(
    ("damage", "settings", "sentence"),
    [
        (leave_intact, "another", r"other settings \(model is one there and another here\)"),
        (raise_format_version, "one", r"step-4 was written by a newer version .*format 9.*continue with that version"),
        (delete_shards, "one", r"none is whole \(.*manifest.json is missing.*restore one from a backup"),
        (swap_shards, "one", r"none is whole .*restore one from a backup"),
    ],
)
def test_checkpoints_that_cannot_be_resumed_are_refused_and_not_changed(
    tmp_path: Path, damage: Callable[[Path], None], settings: str, sentence: str
) -> None:
    start_run(tmp_path).save_steps(2, 4).close()
    damage(tmp_path)
    before = read_files(tmp_path, GENERATION_FENCE_NAME)
    with pytest.raises(TrainerError, match=sentence) as caught:
        start_run(tmp_path, settings=settings)
    assert find_exit_code(caught.value) == ExitCode.USER_ERROR
    assert read_files(tmp_path, GENERATION_FENCE_NAME) == before


def test_a_store_that_fails_five_times_in_a_row_costs_time_and_nothing_else(tmp_path: Path) -> None:
    waits: list[float] = []
    failures = [OSError(5, "Input/output error")] * 5

    def inject_fault(access: str) -> None:
        if "before write step-" in access and failures:
            raise failures.pop()

    run = (
        start_run(tmp_path, storage=HookedStorage(tmp_path, inject_fault), retry=replace(Retry(), sleep=waits.append))
        .flush()
        .save_steps(1)
    )
    assert waits == list(Retry().delays[:5])
    assert (run.manager.durable_step, run.manager.warnings) == (1, [])
    assert start_run(tmp_path).resumed.step == 1


def test_a_folder_that_stalls_and_recovers_stops_no_step(tmp_path: Path) -> None:
    stalled, back = threading.Event(), threading.Event()

    def stall(access: str) -> None:
        if "before write step-" in access:
            stalled.set()
            assert back.wait(60)

    run = start_run(tmp_path, storage=HookedStorage(tmp_path, stall)).flush()
    run.run_to(1, save_at=(1,))
    assert stalled.wait(60)
    run.run_to(50)
    assert (run.manager.durable_step, read_files(tmp_path, GENERATION_FENCE_NAME)) == (-1, {})
    back.set()
    run.flush()
    assert run.manager.durable_step == 1
    assert start_run(tmp_path).wrong_tensors == []
    # By default, saves wait for a stall of a minute.
    assert CheckpointConfig.model_validate({"path": "x"}).durable.save_timeout_seconds > 60


def test_a_bucket_that_stalls_for_two_requests_is_tolerated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request ends after 30 s by default, so a store that stalls for 60 s costs two of them."""
    with run_gateway(tmp_path, monkeypatch) as server:
        limits = Limits(request_seconds=0.3, first_pause_seconds=0.01, longest_pause_seconds=0.02)
        assert Limits().request_seconds * 2 >= 60
        assert Limits().retry_seconds > 60
        storage = ObjectStorage("s3://bucket/run", limits)
        run = start_run("s3://bucket/run", storage=storage).flush()
        server.inject_fault(Fault(stall=threading.Event(), times=2, method="PUT"))
        run.save_steps(1)
        assert (run.manager.durable_step, run.manager.warnings) == (1, [])
        assert start_run("s3://bucket/run").resumed.step == 1


def test_commands_name_a_checkpoint_that_they_cannot_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refusal(*argv: str) -> str:
        assert cli.run(list(argv)) == ExitCode.USER_ERROR
        return capsys.readouterr().err

    root = tmp_path / "root"
    start_run(root).save_steps(1).close()
    commands = (
        ("export", str(root), str(tmp_path / "model")),
        ("convert", "to-nxd", str(root), str(tmp_path / "tag"), "--tensor", "1"),
    )
    for command in commands:
        assert "has no description of its model" in refusal(*command)
        assert "no committed checkpoint of step 3" in refusal(*command, "--step", "3")
    receipt = root / "step-1" / "COMMITTED"
    receipt.write_text(json.dumps(json.loads(receipt.read_text()) | {"formatVersion": 9}))
    for command in commands:
        assert "written by a newer version" in refusal(*command)
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / "tag").exists()
