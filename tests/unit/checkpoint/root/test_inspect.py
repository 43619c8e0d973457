"""List, verify and set aside checkpoints with `trainium-trainer inspect`, in folders and in S3."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testing.trainer.base_models import flip_bit, with_flipped_bit
from tests.testing.trainer.s3_gateway import run_gateway
from tests.unit.checkpoint.checkpoint_builders import start_run
from trainium_contract.exit_codes import ExitCode
from trainium_contract.trainer.checkpoint import CheckpointConfig
from trainium_trainer import cli
from trainium_trainer.checkpoint import inspect
from trainium_trainer.checkpoint.root.metrics_copy import RecordCopies
from trainium_trainer.storage import open_storage


@pytest.fixture(params=["posix", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return a root with checkpoints of steps 1, 2 and 3, the second with a flipped bit, and an interrupted save."""
    if request.param == "posix":
        start_run(str(tmp_path)).save_steps(1, 2, 3).close()
        flip_bit(next((tmp_path / "step-2").glob("*/shard-00000.safetensors")))
        (tmp_path / "step-9" / "g1-a").mkdir(parents=True)
        (tmp_path / "step-9" / "g1-a" / "shard-00000.safetensors").write_text("half")
        yield str(tmp_path)
        return
    with run_gateway(tmp_path, monkeypatch) as server:
        start_run("s3://bucket/run").save_steps(1, 2, 3).close()
        objects = server.objects("bucket")
        (key,) = (key for key in objects if key.startswith("run/step-2/") and key.endswith("shard-00000.safetensors"))
        server.put("bucket", key, with_flipped_bit(objects[key]))
        server.put("bucket", "run/step-9/g1-a/shard-00000.safetensors", b"half")
        yield "s3://bucket/run"


def inspect_states(root: str, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, str]]:
    capsys.readouterr()
    code = cli.run(["inspect", root, "--json", *options])
    return code, {row["folder"]: row["state"] for row in json.loads(capsys.readouterr().out)}


def test_inspect_lists_verifies_and_sets_aside(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    listed = {"step-1": "committed", "step-2": "committed", "step-3": "committed", "step-9": "uncommitted"}
    assert inspect_states(root, capsys) == (ExitCode.FINISHED, listed)
    verified = {"step-1": "verified", "step-2": "damaged", "step-3": "verified", "step-9": "uncommitted"}
    assert inspect_states(root, capsys, "--verify") == (ExitCode.USER_ERROR, verified)

    assert cli.run(["inspect", root, "--verify", "--repair"]) == ExitCode.FINISHED
    out, err = capsys.readouterr()
    assert "set aside: step-2, step-9" in err
    assert "does not have the contents that were written" in out
    repaired = {"step-1": "verified", "step-2": "set aside", "step-3": "verified", "step-9": "set aside"}
    assert inspect_states(root, capsys, "--verify") == (ExitCode.FINISHED, repaired)

    run = start_run(root)
    assert (run.resumed.step, run.wrong_tensors, run.manager.warnings) == (3, [], [])
    run.save_steps(4)
    run.save_steps(5)
    run.close()
    kept = {"step-2": "set aside", "step-3": "verified", "step-4": "verified", "step-5": "verified"}
    assert inspect_states(root, capsys, "--verify") == (ExitCode.FINISHED, kept | {"step-9": "set aside"})


def test_a_save_that_ends_between_the_survey_and_the_repair_is_kept(tmp_path: Path) -> None:
    run = start_run(str(tmp_path)).save_steps(1)
    receipt = tmp_path / "step-1" / "COMMITTED"
    text = receipt.read_bytes()
    receipt.unlink()
    storage = open_storage(str(tmp_path))
    surveyed = inspect.list_checkpoints(storage)
    assert [row.state for row in surveyed] == ["uncommitted"]
    receipt.write_bytes(text)
    inspect.set_aside(storage, surveyed)
    run.close()
    assert [row.state for row in inspect.list_checkpoints(storage, verify=True)] == ["verified"]


def test_metrics_of_a_run_in_s3_are_beside_its_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = b'{"step":1}\n{"step":2}\n'
    with run_gateway(tmp_path, monkeypatch):
        first, second = tmp_path / "first", tmp_path / "second"
        run = start_run("s3://bucket/run", records=first).flush()
        first.mkdir()
        (first / "metrics.jsonl").write_bytes(lines + b'{"step"')
        run.save_steps(2)
        run.close()
        on_another_node = CheckpointConfig(path="s3://bucket/run", records_path=str(second))
        RecordCopies(on_another_node, open_storage("s3://bucket/run")).fetch()
        assert (second / "metrics.jsonl").read_bytes() == lines


def test_inspect_prints_a_table(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["inspect", root, "--verify"]) == ExitCode.USER_ERROR
    out, err = capsys.readouterr()
    line = next(line for line in out.splitlines() if line.startswith("step-3"))
    assert line.split()[:2] == ["step-3", "verified"]
    assert "3,000" in line
    assert "1x1x1" in line
    assert err.splitlines()[-1].startswith(f"1 of 4 checkpoints in {root} are damaged")


def test_a_root_that_does_not_exist_is_refused_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["inspect", str(tmp_path / "none")]) == ExitCode.USER_ERROR
    assert "name the folder that holds the step-N folders" in capsys.readouterr().err
