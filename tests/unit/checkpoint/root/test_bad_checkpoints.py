"""Bad checkpoints and bad stores: a sentence, the contract's exit code, and nothing that was there is touched."""

import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.testing.trainer.s3_gateway import Fault, run_gateway
from tests.unit.checkpoint.checkpoint_builders import HookedStorage, run_alone
from trainium_contract.exit_codes import ExitCode
from trainium_contract.trainer.checkpoint import CheckpointConfig
from trainium_trainer import cli
from trainium_trainer.exits import TrainerError, find_exit_code
from trainium_trainer.storage.object_store import Limits, ObjectStorage
from trainium_trainer.storage.protocol import Retry


def contents(root: Path) -> dict[str, bytes]:
    """Read all files below a root but the fence, which each start claims."""
    files = (path for path in root.rglob("*") if path.is_file())
    return {name: path.read_bytes() for path in files if (name := str(path.relative_to(root))) != "GENERATION"}


def half_deleted(root: Path) -> None:
    for step in (2, 4):
        shutil.rmtree(next(path for path in (root / f"step-{step}").iterdir() if path.is_dir()))


def shards_of_each_other(root: Path) -> None:
    two, four = (next((root / f"step-{step}").glob("*/shard-*")) for step in (2, 4))
    there = two.read_bytes()
    two.write_bytes(four.read_bytes())
    four.write_bytes(there)


def newer_format(root: Path) -> None:
    receipt = root / "step-4" / "COMMITTED"
    receipt.write_text(json.dumps(json.loads(receipt.read_text()) | {"formatVersion": 9, "novelty": 1}))


def nothing(_: Path) -> None:
    """Leave the checkpoint intact; the run is of another model."""


@pytest.mark.parametrize(
    ("spoil", "settings", "sentence"),
    [
        (nothing, "another", r"other settings \(model is one there and another here\)"),
        (newer_format, "one", r"step-4 was written by a newer version .*format 9.*go on with that version"),
        (half_deleted, "one", r"none is whole \(.*manifest.json is missing.*restore one from a backup"),
        (shards_of_each_other, "one", r"none is whole .*restore one from a backup"),
    ],
)
def test_checkpoints_that_cannot_be_resumed_are_refused_and_not_changed(
    tmp_path: Path, spoil: Callable[[Path], None], settings: str, sentence: str
) -> None:
    run = run_alone(tmp_path)
    for step in (2, 4):
        run.run_to(step, save_at=(step,)).flush()
    run.manager.close()
    spoil(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(TrainerError, match=sentence) as caught:
        run_alone(tmp_path, settings=settings)
    assert find_exit_code(caught.value) == ExitCode.USER_ERROR
    assert contents(tmp_path) == before


def test_a_store_that_fails_five_times_in_a_row_costs_time_and_nothing_else(tmp_path: Path) -> None:
    waits: list[float] = []
    failures = [OSError(5, "Input/output error")] * 5

    def fail(what: str) -> None:
        if "before write step-" in what and failures:
            raise failures.pop()

    run = run_alone(tmp_path, storage=HookedStorage(tmp_path, fail), retry=replace(Retry(), sleep=waits.append)).flush()
    run.run_to(1, save_at=(1,)).flush()
    assert waits == list(Retry().delays[:5])
    assert (run.manager.durable_step, run.manager.warnings) == (1, [])
    assert run_alone(tmp_path).resumed.step == 1


def test_a_folder_that_stalls_and_recovers_stops_no_step(tmp_path: Path) -> None:
    stalled, back = threading.Event(), threading.Event()

    def stall(what: str) -> None:
        if "before write step-" in what:
            stalled.set()
            assert back.wait(60)

    run = run_alone(tmp_path, storage=HookedStorage(tmp_path, stall)).flush()
    run.run_to(1, save_at=(1,))
    assert stalled.wait(60)
    run.run_to(50)
    assert (run.manager.durable_step, contents(tmp_path)) == (-1, {})
    back.set()
    run.flush()
    assert run.manager.durable_step == 1
    assert run_alone(tmp_path).wrong == []
    # A stall of a minute is waited for.
    assert CheckpointConfig.model_validate({"path": "x"}).durable.save_timeout_seconds > 60


def test_a_bucket_that_stalls_for_two_requests_is_tolerated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default a request is given up after 30 s, so that a store which stalls for 60 s costs two of them."""
    with run_gateway(tmp_path, monkeypatch) as server:
        limits = Limits(request_seconds=0.3, first_pause_seconds=0.01, longest_pause_seconds=0.02)
        assert Limits().request_seconds * 2 >= 60
        assert Limits().retry_seconds > 60
        storage = ObjectStorage("s3://bucket/run", limits)
        run = run_alone("s3://bucket/run", storage=storage).flush()
        server.fail(Fault(stall=threading.Event(), times=2, method="PUT"))
        run.run_to(1, save_at=(1,)).flush()
        assert (run.manager.durable_step, run.manager.warnings) == (1, [])
        assert run_alone("s3://bucket/run").resumed.step == 1


def test_commands_name_a_checkpoint_that_they_cannot_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refusal(*argv: str) -> str:
        assert cli.run(list(argv)) == ExitCode.USER_ERROR
        return capsys.readouterr().err

    root = tmp_path / "root"
    run = run_alone(root).run_to(1, save_at=(1,)).flush()
    run.manager.close()
    targets: list[Any] = [("export", str(root), str(tmp_path / "model"))]
    targets.append(("convert", "to-nxd", str(root), str(tmp_path / "tag"), "--tensor", "1"))
    for target in targets:
        assert "has no description of its model" in refusal(*target)
        assert "no committed checkpoint of step 3" in refusal(*target, "--step", "3")
    newer = root / "step-1" / "COMMITTED"
    newer.write_text(json.dumps(json.loads(newer.read_text()) | {"formatVersion": 9}))
    for target in targets:
        assert "written by a newer version" in refusal(*target)
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / "tag").exists()
