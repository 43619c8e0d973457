"""`trainium-trainer inspect`, on folders and on S3: what it lists, verifies and sets aside, and how it exits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from checkpoint_world import solo

from tests.testing.trainer.s3_gateway import serving
from trainium_contract.exit_codes import ExitCode
from trainium_trainer import cli
from trainium_trainer.checkpoint import inspect
from trainium_trainer.storage.opening import open_storage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


# The first test pays for importing torch in the server that ranks are forked from.
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(params=["posix", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where a run left checkpoints of steps 1, 2 and 3, of which the second has a flipped bit, and a save cut short."""
    if request.param == "posix":
        _train(str(tmp_path))
        path = next((tmp_path / "step-2").glob("*/shard-00000.safetensors"))
        path.write_bytes(_flipped(path.read_bytes()))
        (tmp_path / "step-9" / "g1-a").mkdir(parents=True)
        (tmp_path / "step-9" / "g1-a" / "shard-00000.safetensors").write_text("half")
        yield str(tmp_path)
        return
    with serving(tmp_path, monkeypatch) as server:
        _train("s3://bucket/run")
        objects = server.objects("bucket")
        (key,) = (key for key in objects if key.startswith("run/step-2/") and key.endswith("shard-00000.safetensors"))
        server.put("bucket", key, _flipped(objects[key]))
        server.put("bucket", "run/step-9/g1-a/shard-00000.safetensors", b"half")
        yield "s3://bucket/run"


def _train(path: str) -> None:
    run = solo(path)
    for step in (1, 2, 3):
        run.to(step, save_at=(step,)).settle()
    run.manager.close()


def _flipped(data: bytes) -> bytes:
    return data[:-100] + bytes([data[-100] ^ 8]) + data[-99:]


def rows(root: str, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, str]]:
    capsys.readouterr()
    code = cli.run(["inspect", root, "--json", *options])
    return code, {row["folder"]: row["state"] for row in json.loads(capsys.readouterr().out)}


def test_inspect_lists_verifies_and_sets_aside(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    listed = {"step-1": "committed", "step-2": "committed", "step-3": "committed", "step-9": "uncommitted"}
    assert rows(root, capsys) == (ExitCode.FINISHED, listed)
    verified = {"step-1": "verified", "step-2": "damaged", "step-3": "verified", "step-9": "uncommitted"}
    assert rows(root, capsys, "--verify") == (ExitCode.USER_ERROR, verified)

    assert cli.run(["inspect", root, "--verify", "--repair"]) == ExitCode.FINISHED
    out, err = capsys.readouterr()
    assert "set aside: step-2, step-9" in err
    assert "does not have the contents that were written" in out
    repaired = {"step-1": "verified", "step-2": "set aside", "step-3": "verified", "step-9": "set aside"}
    assert rows(root, capsys, "--verify") == (ExitCode.FINISHED, repaired)

    run = solo(root)
    assert (run.resumed.step, run.wrong, run.manager.warnings) == (3, [], [])
    run.to(4, save_at=(4,)).settle()
    run.to(5, save_at=(5,)).settle()
    run.manager.close()
    kept = {"step-2": "set aside", "step-3": "verified", "step-4": "verified", "step-5": "verified"}
    assert rows(root, capsys, "--verify") == (ExitCode.FINISHED, kept | {"step-9": "set aside"})


def test_a_save_that_ends_between_the_survey_and_the_repair_counts(tmp_path: Path) -> None:
    run = solo(str(tmp_path)).to(1, save_at=(1,)).settle()
    receipt = tmp_path / "step-1" / "COMMITTED"
    text = receipt.read_bytes()
    receipt.unlink()
    storage = open_storage(str(tmp_path))
    seen = inspect.list_checkpoints(storage)
    assert [row.state for row in seen] == ["uncommitted"]
    receipt.write_bytes(text)
    inspect.set_aside(storage, seen)
    run.manager.close()
    assert [row.state for row in inspect.list_checkpoints(storage, verify=True)] == ["verified"]


def test_metrics_of_a_run_in_s3_are_beside_its_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = b'{"step":1}\n{"step":2}\n'
    with serving(tmp_path, monkeypatch):
        first, second = tmp_path / "first", tmp_path / "second"
        run = solo("s3://bucket/run", records=first).settle()
        first.mkdir()
        (first / "metrics.jsonl").write_bytes(lines + b'{"step"')
        run.to(2, save_at=(2,)).settle()
        run.manager.close()
        solo("s3://bucket/run", records=second).manager.close()
        assert (second / "metrics.jsonl").read_bytes() == lines


def test_the_table_is_for_people(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["inspect", root, "--verify"]) == ExitCode.USER_ERROR
    out, err = capsys.readouterr()
    line = next(line for line in out.splitlines() if line.startswith("step-3"))
    assert line.split()[:2] == ["step-3", "verified"]
    assert "3,000" in line
    assert "1x1x1" in line
    assert err.splitlines()[-1].startswith(f"1 of 4 checkpoints in {root} are damaged")


def test_a_root_that_is_not_there_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["inspect", str(tmp_path / "none")]) == ExitCode.USER_ERROR
    assert "name the folder that holds the step-N folders" in capsys.readouterr().err
